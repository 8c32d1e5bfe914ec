"""Which device a verifier runs on, and in which numbers; refuses what is not there. Only for "cuda" is CUDA touched."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.targets.weights import EMBEDDINGS

Device = Literal["cpu", "cuda"]

LEAST_CAPABILITY = (9, 0)
"""What the kernels' overlapping launches need: Hopper."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OR_CPU = "or choose device 'cpu'"


def device_of(config: VerifierConfig) -> Device:
    """The device that a configuration names. A GPU has to be named: a text's bits would change with it.

    Raises:
        InvalidRequestError: the device is not there, or does not run in these numbers.
    """
    if config.device == "cuda":
        _check_cuda()
        return "cuda"
    if config.dtype not in ("auto", "float32"):
        raise InvalidRequestError(
            "dtype", f"dtype is {config.dtype!r} on the CPU", hint="Give 'float32' or 'auto', or choose device 'cuda'"
        )
    return "cpu"


def dtype_of(config: VerifierConfig, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """What matrices and activations are held in: on a GPU the checkpoint's own numbers, unless others are asked for."""
    if config.dtype == "auto":
        return tensors[EMBEDDINGS].dtype if config.device == "cuda" else torch.float32
    return _DTYPES[config.dtype]


def is_out_of_memory(error: Exception) -> bool:
    """Whether a GPU had no room left: only PyTorch's own allocator has an exception for that. Graphs, kernels that are
    loaded and libraries say it in words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in words for sign in ("out of memory", "alloc_failed"))


def _check_cuda() -> None:
    fault, hint = _cuda_fault()
    if fault:
        raise InvalidRequestError("device", f"device is 'cuda', but {fault}", hint=hint)


def _cuda_fault() -> tuple[str, str]:
    """What is missing, and how to mend it; nothing where all is there."""
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA",
            f"Install a CUDA build of PyTorch (https://pytorch.org/get-started), {_OR_CPU}",
        )
    if not torch.cuda.is_available():
        return "no CUDA device is found", f"See what `nvidia-smi` and CUDA_VISIBLE_DEVICES say, {_OR_CPU}"
    if find_spec("triton") is None:
        return "Triton is not installed", f"Install triton, {_OR_CPU}"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), LEAST_CAPABILITY
        return (
            f"{name} has compute capability {'.'.join(map(str, capability))}",
            f"The kernels need {major}.{minor} or later, as an H100 has: take such a device, {_OR_CPU}",
        )
    return "", ""
