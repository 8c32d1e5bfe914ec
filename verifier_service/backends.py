"""From a loaded target to what an engine runs it on. What belongs to a GPU is imported only where one is used."""

from typing import TYPE_CHECKING

import torch

from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.backend import Backend
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cpu_backend import CpuBackend
from specla.verifier_service.devices import is_out_of_memory
from specla.verifier_service.memory import Memory, MemoryAccount
from specla.verifier_service.self_check import prove_exact, prove_passes
from specla.verifier_service.state import StateStore
from specla.verifier_service.target import Target
from specla.verifier_service.targets.gated_deltanet import TargetWeights

if TYPE_CHECKING:
    from specla.kernels.gpu.selector import Selector
    from specla.verifier_service.gpu.weights import GpuWeights


def memory_of(config: VerifierConfig, target: Target) -> Memory:
    """How much memory there is where the target lies, and how many sessions fit."""
    if isinstance(target.weights, TargetWeights):
        return MemoryAccount.of(target.config)
    from specla.verifier_service.gpu.memory import GpuMemoryAccount

    return GpuMemoryAccount.of(
        target.weights,
        config.numerics,
        _selector(),
        max_batch_rows=config.max_batch_rows,
        prefill_chunk=config.chunk_tokens,
    )


def backend_for(config: VerifierConfig, target: Target, slots: int) -> Backend:
    """The target's device with room for `slots` sessions; in exact mode it has proved that it keeps the promise.

    Raises:
        InternalError: this build or device does not keep exact mode's promise.
        InvalidRequestError: the device has no room after all.
    """
    if isinstance(target.weights, TargetWeights):
        store = StateStore(target.config, slots)
        if config.numerics == "exact":
            prove_exact(target.weights, store, config.max_rows)
        return CpuBackend(target.weights, store)
    try:
        return _gpu_backend(config, target.weights, slots)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InvalidRequestError(
            "memory_mib",
            f"the GPU has no room for {slots} sessions: something else took its memory meanwhile",
            hint="Free it, or give a smaller memory_mib",
        ) from None


def _gpu_backend(config: VerifierConfig, weights: "GpuWeights", slots: int) -> Backend:
    from specla.verifier_service.gpu.backend import GpuBackend

    backend = GpuBackend(
        weights,
        config.numerics,
        _selector(),
        slots=slots,
        max_rows=config.max_rows,
        max_batch_rows=config.max_batch_rows,
        prefill_chunk=config.chunk_tokens,
    )
    if config.numerics == "exact":
        prove_passes(backend, weights.config.vocab_size, config.max_rows)
    return backend


def _selector() -> "Selector":
    """The kernels' measured times on the GPU at hand."""
    from specla.kernels.gpu.selector import Selector

    return Selector.for_device(torch.cuda.get_device_name())
