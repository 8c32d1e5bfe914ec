"""What a target is and how it is trained: frozen settings, read from TOML."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A training configuration that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """Shape of a Gated DeltaNet model, named as in fla's `GatedDeltaNetConfig`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    num_v_heads: int | None = None
    expand_v: float = 1.0
    conv_size: int = 4
    norm_eps: float = 1e-6
    allow_neg_eigval: bool = False
    initializer_range: float = 0.02

    @property
    def value_heads(self) -> int:
        """Number of value heads, HV."""
        return self.num_v_heads or self.num_heads

    @property
    def head_v_dim(self) -> int:
        """Width of a value head, V."""
        return int(self.head_dim * self.expand_v)

    @property
    def name(self) -> str:
        """What servers call a model of this shape: by its millions of weights in matrices."""
        keys, values = self.num_heads * self.head_dim, self.value_heads * self.head_v_dim
        mixer = self.hidden_size * (2 * keys + 3 * values)
        mlp = 3 * self.hidden_size * self.intermediate_size
        weights = self.vocab_size * self.hidden_size + self.num_hidden_layers * (mixer + mlp)
        return f"specla-gdn-{round(weights / 1e6)}m"

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's config.json, as fla's class reads it."""
        return {
            "architectures": ["GatedDeltaNetForCausalLM"],
            "model_type": "gated_deltanet",
            "_name_or_path": self.name,
            **asdict(self),
            "attn": None,
            "attn_mode": "chunk",
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": 0,
            "hidden_act": "swish",
            "hidden_ratio": None,
            "max_position_embeddings": 8192,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_gate": True,
            "use_short_conv": True,
        }

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "TargetShape":
        """The shape in a config.json that `to_json` wrote."""
        return cls(**{f.name: config[f.name] for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    tokens: training tokens in all. batch, length: rows a step and tokens a row. mix: share of rows a domain.
    warmup, decay: shares of the run that the learning rate rises and falls over, straight lines. clip: largest norm of
    the gradient. reset: a document begins with an empty state and an empty convolution window.
    """

    shape: TargetShape
    tokens: int
    batch: int
    length: int
    mix: Mapping[str, float]
    learning_rate: float
    warmup: float = 0.02
    decay: float = 0.4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    reset: bool = True
    seed: int = 7
    save_every_seconds: float = 120.0
    validate_every: int = 1000
    compile: bool = True

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return self.tokens // (self.batch * self.length)

    def rate(self, step: int) -> float:
        """Learning rate of a step: warm-up, level, then straight down to zero."""
        warm, fall = max(1.0, self.warmup * self.steps), max(1.0, self.decay * self.steps)
        return self.learning_rate * max(0.0, min(1.0, (step + 1) / warm, (self.steps - step) / fall))


def load_config(path: Path) -> TrainConfig:
    """Read a TOML file of two tables, `[shape]` and `[train]`, with the fields of the two classes as keys.

    Raises:
        ConfigError: an unknown or missing key, or shares that do not add up.
    """
    table = tomllib.loads(path.read_text())
    if set(table) != {"shape", "train"}:
        raise ConfigError(f"{path.name}: must hold the tables shape and train; holds {sorted(table)}")
    train = dict(table["train"])
    if "betas" in train:
        train["betas"] = tuple(train["betas"])
    try:
        config = TrainConfig(shape=TargetShape(**table["shape"]), **train)
    except TypeError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    if abs(sum(config.mix.values()) - 1) > 1e-6:
        raise ConfigError(f"{path.name}: the shares in mix add up to {sum(config.mix.values())}, not to 1")
    if config.steps < 1:
        raise ConfigError(f"{path.name}: {config.tokens} tokens are less than one step of {config.batch} rows")
    return config
