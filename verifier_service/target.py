"""A loaded target: its weights on their device, and the names by which others know it."""

import hashlib
import json
import math
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specla.kernels.dense import numerics_tag
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.devices import device_of, dtype_of, is_out_of_memory
from specla.verifier_service.memory import MIB, MemoryAccount
from specla.verifier_service.targets.config import GatedDeltaNetConfig, check_folder
from specla.verifier_service.targets.gated_deltanet import TargetWeights, prepare
from specla.verifier_service.targets.weights import Checkpoint, expected_shapes, load_checkpoint

if TYPE_CHECKING:
    from specla.verifier_service.gpu.weights import GpuWeights

ARITHMETIC = 2
"""Raised whenever a change of the code changes the bits of a text on a CPU."""

GPU_ARITHMETIC = 3
"""The same for a GPU."""


@dataclass(frozen=True)
class Target:
    """What a verifier runs.

    Attributes:
        config: the model's shape.
        weights: ready for passes, on their device.
        model_name: for people.
        numerics_id: equal ids give equal bits for equal requests: device, dtype, mode, build and weights.
        tokenizer_hash: SHA-256 of tokenizer.json, hexadecimal.
    """

    config: GatedDeltaNetConfig
    weights: "TargetWeights | GpuWeights"
    model_name: str
    numerics_id: str
    tokenizer_hash: str

    @classmethod
    def load(cls, config: VerifierConfig) -> "Target":
        """Load a checkpoint for the configured device and mode; on a CPU for PyTorch's present number of threads.

        Raises:
            InvalidRequestError: a folder without a target, a device that is not there or has no room, a dtype that it
                does not run, a memory limit that can hold no session.
            UnsupportedModelError: a checkpoint that cannot be run.
        """
        device, folder = device_of(config), config.target
        check_folder(folder)
        model = GatedDeltaNetConfig.from_folder(folder)
        check_memory_limit(config, model)
        checkpoint = load_checkpoint(folder, model)
        weights: TargetWeights | GpuWeights
        if device == "cuda":
            weights = _on_gpu(config, model, checkpoint)
            numerics_id = _gpu_numerics_id(config, weights.dtype, checkpoint.digest)
        else:
            weights = prepare(model, checkpoint.tensors, config.numerics, config.cpu_kernels)
            numerics_id = _numerics_id(config, weights, checkpoint.digest)
        return cls(
            config=model,
            weights=weights,
            model_name=_model_name(folder),
            numerics_id=numerics_id,
            tokenizer_hash=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        )


def check_memory_limit(config: VerifierConfig, model: GatedDeltaNetConfig) -> None:
    """Refuse, before the weights are read, a `memory_mib` that holds no session: on a GPU not even the weights.

    Raises:
        InvalidRequestError: so little.
    """
    if config.device != "cuda":
        MemoryAccount.of(model).slots(config.max_sessions, config.max_rows, config.memory_mib)
        return
    width = 4 if config.dtype == "float32" else 2  # of the checkpoint's own numbers ("auto"), at the least
    least = -(-width * sum(math.prod(shape) for shape in expected_shapes(model).values()) // MIB)
    if 0 < config.memory_mib < least:
        raise InvalidRequestError(
            "memory_mib",
            f"{config.memory_mib} MiB hold no session: on a GPU the limit is on the weights too",
            hint=f"Give {least} MiB or more for the weights, and what sessions take besides",
        )


def _on_gpu(config: VerifierConfig, model: GatedDeltaNetConfig, checkpoint: Checkpoint) -> "GpuWeights":
    from specla.verifier_service.gpu.weights import GpuWeights

    try:
        return GpuWeights.load(model, checkpoint.tensors, dtype_of(config, checkpoint.tensors), "cuda")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        mib = sum(x.nbytes for x in checkpoint.tensors.values()) >> 20
        raise InvalidRequestError(
            "device",
            f"the checkpoint's {mib} MiB do not fit the GPU beside what it holds: {_free_memory()}",
            hint="Free some, take a larger device or a 16-bit dtype, or choose device 'cpu'",
        ) from None


def _free_memory() -> str:
    try:
        free, total = (size >> 20 for size in torch.cuda.mem_get_info())
    except RuntimeError:
        return "not even CUDA itself has room"
    return f"{free} of {total} MiB are free"


def _model_name(folder: Path) -> str:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(values.get("_name_or_path") or folder.resolve().name)


def _numerics_id(config: VerifierConfig, weights: TargetWeights, digest: str) -> str:
    parts = (
        "cpu",
        "float32",
        config.numerics,
        f"arithmetic-{ARITHMETIC}",
        weights.kernels,
        numerics_tag(weights.dense_weights()),
        f"threads-{torch.get_num_threads()}",
        f"chunk-{config.chunk_tokens}",
        digest[:16],
    )
    return "/".join(parts)


def _gpu_numerics_id(config: VerifierConfig, dtype: torch.dtype, digest: str) -> str:
    from specla.verifier_service.gpu.buckets import chain_rows

    parts = (
        "cuda",
        torch.cuda.get_device_name(),
        str(dtype).removeprefix("torch."),
        config.numerics,
        f"arithmetic-{GPU_ARITHMETIC}",
        f"torch-{torch.__version__}",
        f"triton-{version('triton')}",
        f"chunk-{config.chunk_tokens}",
        f"chain-{chain_rows(config.max_rows)}",  # the end of a prompt runs as a chunk or, up to here, as a chain
        digest[:16],
    )
    return "/".join(parts)
