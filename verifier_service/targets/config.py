"""What a Gated DeltaNet checkpoint looks like: read from its config.json, refused where this project cannot run it."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from specla.rpc.errors import InvalidRequestError, UnsupportedModelError

MODEL_TYPE = "gated_deltanet"
ACTIVATIONS = ("swish", "silu", "sigmoid")
SHAPE_MULTIPLE = 16  # of head dimensions; the kernels' tiles
MOST_LAYERS = 1 << 12
LARGEST_DIMENSION = 1 << 24  # any count of heads, channels or tokens, so that no product of two overflows
NORM_EPS_RANGE = (1e-12, 1.0)

# Keys of config.json that change the arithmetic, and the only values this project runs.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "attn": (None,),
    "attnres_block_size": (None,),
    "conv_bias": (None, False),
    "hidden_act": (None, "swish"),
    "use_short_conv": (None, True),
}


FILES = ("config.json", "tokenizer.json", "*.safetensors")


def check_folder(folder: Path, needed: Sequence[str] = FILES) -> None:
    """Refuse a folder that holds no target; every command does it here, so in the same words.

    Args:
        needed: files of it, or patterns of files.

    Raises:
        InvalidRequestError: there is no such folder, it cannot be looked into, or it lacks one of these.
    """
    try:
        missing = [name for name in needed if not any(path.is_file() for path in folder.glob(name))]
        fault = f"{folder} lacks {', '.join(missing)}" if folder.is_dir() else f"there is no folder {folder}"
    except OSError as error:
        missing, fault = [*needed], f"{folder} cannot be read: {error.strerror}"
    if missing:
        raise InvalidRequestError(
            "target", fault, hint=f"A target's folder holds {', '.join(FILES[:-1])} and {FILES[-1]}"
        )


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Shape of a Gated DeltaNet language model; field names and defaults are those of fla's `GatedDeltaNetConfig`.

    Attributes:
        expand_v: head dimension of the values over that of the keys.
        num_v_heads: value heads, a multiple of num_heads (grouped value attention); None for num_heads.
        use_gate: whether the layer's output is gated.
        output_gate_activation: "swish" (also "silu") or "sigmoid".
        allow_neg_eigval: writing strength up to 2 instead of 1.
        conv_size: taps of the short convolutions.
        intermediate_size: width of the MLP; None: two thirds of hidden_ratio * hidden_size, up to a multiple of 256.
        eos_token_ids: ids that end a text.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    num_v_heads: int | None = None
    expand_v: float = 2.0
    use_gate: bool = True
    output_gate_activation: str = "swish"
    allow_neg_eigval: bool = False
    conv_size: int = 4
    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse types and shapes that no kernel runs.

        Raises:
            UnsupportedModelError: says what was found and what is supported.
        """
        for name in (*_ESSENTIAL, "conv_size"):
            _check_dimension(
                name, getattr(self, name), MOST_LAYERS if name == "num_hidden_layers" else LARGEST_DIMENSION
            )
        for name in ("num_v_heads", "intermediate_size"):
            if getattr(self, name) is not None:
                _check_dimension(name, getattr(self, name), LARGEST_DIMENSION)
        for name in ("use_gate", "allow_neg_eigval", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise _unsupported(name, getattr(self, name), "true or false")
        _check_number("expand_v", self.expand_v, 0, LARGEST_DIMENSION)
        _check_number("norm_eps", self.norm_eps, *NORM_EPS_RANGE)
        if self.hidden_ratio is not None:
            _check_number("hidden_ratio", self.hidden_ratio, 0, LARGEST_DIMENSION)
        self._check_shape()
        if self.output_gate_activation not in ACTIVATIONS:
            raise _unsupported("output_gate_activation", self.output_gate_activation, ", ".join(ACTIVATIONS))
        for token in self.eos_token_ids:
            if not _is_int(token) or not 0 <= token < self.vocab_size:
                raise _unsupported("eos_token_id", token, f"an id from 0 to {self.vocab_size - 1}, or a list of such")

    def _check_shape(self) -> None:
        if self.value_heads % self.num_heads:
            raise _unsupported("num_v_heads", self.num_v_heads, f"a multiple of num_heads ({self.num_heads})")
        if self.head_dim % SHAPE_MULTIPLE:
            raise _unsupported("head_dim", self.head_dim, f"a multiple of {SHAPE_MULTIPLE}")
        whole = abs(self.head_dim * self.expand_v - self.head_v_dim) <= 1e-5
        if not whole or self.head_v_dim < 1 or self.head_v_dim % SHAPE_MULTIPLE:
            raise _unsupported("expand_v", self.expand_v, f"head_dim * expand_v a multiple of {SHAPE_MULTIPLE}")
        if self.conv_size < 2:
            raise _unsupported("conv_size", self.conv_size, "2 or more")
        if self.mlp_dim < 1:
            raise _unsupported("hidden_ratio", self.hidden_ratio, "a ratio that leaves the MLP at least one channel")

    @property
    def value_heads(self) -> int:
        """HV, the number of value heads."""
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def head_v_dim(self) -> int:
        """V, the value head's dimension."""
        return round(self.head_dim * self.expand_v)

    @property
    def key_dim(self) -> int:
        """Width of q, and of k: H * K."""
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of v, and of the gate: HV * V."""
        return self.value_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """D, channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        width = int(self.hidden_size * ratio * 2 / 3)
        return -(-width // 256) * 256

    @classmethod
    def from_folder(cls, folder: Path) -> "GatedDeltaNetConfig":
        """Read config.json, and the end-of-text ids of generation_config.json where it names them.

        Raises:
            InvalidRequestError: no such file.
            UnsupportedModelError: not JSON, or a model this project does not run.
        """
        check_folder(folder, FILES[:1])
        values = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = _read_json(generation).get("eos_token_id")
            if eos is not None:
                values["eos_token_id"] = eos
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "GatedDeltaNetConfig":
        """The configuration that the keys of a config.json describe; keys without a bearing on inference are ignored.

        Raises:
            UnsupportedModelError: another model type, a missing key, or a value that is not supported.
        """
        if values.get("model_type") != MODEL_TYPE:
            raise _unsupported("model_type", values.get("model_type"), MODEL_TYPE)
        for name, allowed in _REQUIRED_VALUES.items():
            if values.get(name) not in allowed:
                raise _unsupported(name, values[name], f"{allowed[-1]!r}")
        missing = [name for name in _ESSENTIAL if values.get(name) is None]
        if missing:
            raise _unsupported("config.json", f"without {', '.join(missing)}", "all of " + ", ".join(_ESSENTIAL))
        fields = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        eos = values.get("eos_token_id")
        ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        return cls(**{**fields, "eos_token_ids": ids})


_ESSENTIAL = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_dimension(name: str, value: object, most: int) -> None:
    if not (_is_int(value) and 1 <= value <= most):
        raise _unsupported(name, value, f"a positive integer, at most {most}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    """JSON also gives NaN and infinity, both outside any range."""
    if not (isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high):
        raise _unsupported(name, value, f"a number from {low:g} to {high:g}")


def _unsupported(name: str, found: object, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is {reprlib.repr(found)}" if name != "config.json" else f"config.json is {found}",
        hint=f"Supported: {supported}",
        metadata={"found": reprlib.repr(found), "supported": supported},
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}", hint="Copy the checkpoint anew") from None
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{path} holds no object", hint="Copy the checkpoint anew")
    return values
