"""Reads a checkpoint's safetensors files into float32 tensors, and refuses names and shapes that do not belong."""

import hashlib
import json
import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specla.rpc.errors import UnsupportedModelError
from specla.verifier_service.targets.config import GatedDeltaNetConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD = "lm_head.weight"
EMBEDDINGS = "model.embeddings.weight"
_SHOWN = 4  # names listed in an error


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by fla's names, in the checkpoint's dtypes, and the SHA-256 of the files they came from."""

    tensors: dict[str, Tensor]
    digest: str


def expected_shapes(config: GatedDeltaNetConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of this configuration holds, the head included where it is not tied."""
    hidden, mlp = config.hidden_size, config.mlp_dim
    keys, values, heads = config.key_dim, config.value_dim, config.value_heads
    layer = {
        "attn_norm.weight": (hidden,),
        "attn.q_proj.weight": (keys, hidden),
        "attn.k_proj.weight": (keys, hidden),
        "attn.v_proj.weight": (values, hidden),
        "attn.a_proj.weight": (heads, hidden),
        "attn.b_proj.weight": (heads, hidden),
        "attn.A_log": (heads,),
        "attn.dt_bias": (heads,),
        "attn.q_conv1d.weight": (keys, 1, config.conv_size),
        "attn.k_conv1d.weight": (keys, 1, config.conv_size),
        "attn.v_conv1d.weight": (values, 1, config.conv_size),
        "attn.o_norm.weight": (config.head_v_dim,),
        "attn.o_proj.weight": (hidden, values),
        "mlp_norm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if config.use_gate:
        layer["attn.g_proj.weight"] = (values, hidden)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDINGS: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def load_checkpoint(folder: Path, config: GatedDeltaNetConfig) -> Checkpoint:
    """Read every tensor of the configuration from one file or from the shards that an index names.

    A tied checkpoint may also hold the head, as a copy of the embeddings.

    Raises:
        UnsupportedModelError: no weights, unreadable files, names missing or unexpected, a wrong shape or dtype,
            weights that are not finite.
    """
    files = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (no mapping)
                    tensors[name] = reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{file} cannot be read: {error}", hint="Copy the checkpoint anew") from None
    shapes = expected_shapes(config)
    if config.tie_word_embeddings and HEAD in tensors:
        head = tensors.pop(HEAD)
        _check_tensor(HEAD, head, shapes[EMBEDDINGS])
        if not torch.equal(head, tensors.get(EMBEDDINGS, head)):
            raise UnsupportedModelError(
                f"the head is said to be tied, but {HEAD} differs from {EMBEDDINGS}",
                hint="Set tie_word_embeddings to false in config.json",
            )
    _check_names(tensors.keys(), shapes.keys())
    for name, shape in shapes.items():
        _check_tensor(name, tensors[name], shape)
    return Checkpoint(tensors, _digest(files))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UnsupportedModelError(f"{index} has no weight_map: {error}", hint="Copy the index anew") from None
        for name in names:
            if not isinstance(name, str):
                raise UnsupportedModelError(
                    f"the weight_map of {index} holds {reprlib.repr(name)}",
                    hint="Supported: each tensor's file name; copy the index anew",
                )
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise UnsupportedModelError(f"{file} does not exist", hint=f"Supported: {SINGLE_FILE}, or {INDEX_FILE}")
    return files


def _check_names(found: Iterable[str], expected: Iterable[str]) -> None:
    found, expected = set(found), set(expected)
    hint = "Supported: the tensors of fla's GatedDeltaNetForCausalLM for this config.json"
    if missing := sorted(expected - found):
        raise UnsupportedModelError(
            f"{len(missing)} of {len(expected)} tensors are missing: {_few(missing)}", hint=hint
        )
    if unexpected := sorted(found - expected):
        raise UnsupportedModelError(f"{len(unexpected)} tensors are unexpected: {_few(unexpected)}", hint=hint)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UnsupportedModelError(f"{name} is {list(tensor.shape)}", hint=f"config.json asks for {list(shape)}")
    if tensor.dtype not in DTYPES:
        raise UnsupportedModelError(f"{name} is {tensor.dtype}", hint="Supported: bfloat16, float16, float32")
    low, high = (float(x) for x in torch.aminmax(tensor))  # one pass; both are NaN where any number is
    if not (math.isfinite(low) and math.isfinite(high)):
        what = "NaN" if math.isnan(high) else "infinite numbers"
        raise UnsupportedModelError(f"{name} holds {what}", hint="Supported: finite weights; copy the checkpoint anew")


def _digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
