"""How many bytes a target takes on a GPU, and how many sessions fit: counted on tensors without storage.

What a backend would hold is read off the backend itself, made on PyTorch's meta device, so that no size is written
down twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specla.kernels.gpu.selector import Mode, Selector
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.memory import FLOAT32, MIB
from specla.verifier_service.targets.config import GatedDeltaNetConfig

CUDA = 232 * MIB
"""What CUDA itself takes, at most, for kernels and libraries as they are loaded and for captured graphs, and buckets'
own small arrays. Whoever has made all passes ready compares it with what is taken (`GpuMemoryAccount.beyond`)."""

RESERVE = 80 * MIB
"""Kept free for what single operations allocate."""

_USABLE = 0.9  # of what is free, where no limit is given


@dataclass(frozen=True)
class GpuMemoryAccount:
    """Bytes by purpose, on a GPU.

    Attributes:
        config: the model's shape.
        dtype: of matrices and activations.
        mode: whose kernels run.
        selector: which of them.
        max_batch_rows: rows of all sessions in one pass.
        weights: bytes of the weights, which are loaded.
        free: bytes that the device has beside them.
        prefill_chunk: tokens of one chunk of a prompt.
    """

    config: GatedDeltaNetConfig
    dtype: torch.dtype
    mode: Mode
    selector: Selector
    max_batch_rows: int
    weights: int
    free: int
    prefill_chunk: int = 128

    @classmethod
    def of(
        cls, weights: GpuWeights, mode: Mode, selector: Selector, *, max_batch_rows: int, prefill_chunk: int = 128
    ) -> GpuMemoryAccount:
        """The account of a target that has been loaded, on its device as it is now."""
        gc.collect()  # a backend before this one, which has cycles
        torch.cuda.empty_cache()  # and what loading has used
        free, _ = torch.cuda.mem_get_info(weights.device)
        return cls(weights.config, weights.dtype, mode, selector, max_batch_rows, weights.nbytes, free, prefill_chunk)

    @property
    def state_per_session(self) -> int:
        """The bare recurrent state of one session, whatever the length of its text."""
        c = self.config
        return FLOAT32 * c.num_hidden_layers * c.value_heads * c.head_dim * c.head_v_dim

    def backend_bytes(self, sessions: int, max_rows: int) -> int:
        """Bytes of all that is not weights: slots, what passes share, what CUDA takes; without the reserve."""
        return self.allocated_bytes(sessions, max_rows) + CUDA

    def allocated_bytes(self, sessions: int, max_rows: int) -> int:
        """Bytes of what a backend allocates when it is made: slots, and what passes share."""
        return held_bytes(self._backend(sessions, max_rows))

    def taken(self) -> int:
        """Bytes that have gone from the device since the account was made, whatever for and whoever took them."""
        torch.cuda.empty_cache()
        return self.free - torch.cuda.mem_get_info()[0]

    def beyond(self, sessions: int, max_rows: int) -> int:
        """Bytes that were taken beyond the account, the reserve not among it; less than 0 where it holds."""
        return self.taken() - self.backend_bytes(sessions, max_rows)

    def overhead(self, sessions: int, max_rows: int = 16) -> float:
        """What a session takes, its share of all that is not weights or reserve included, over its bare state."""
        return self.backend_bytes(sessions, max_rows) / sessions / self.state_per_session

    def slots(self, max_sessions: int, max_rows: int, limit_mib: int) -> int:
        """How many sessions fit, at most max_sessions; the limit is on all that is held, weights included.

        Raises:
            InvalidRequestError: not even one session fits, or the device holds less than the limit.
        """
        there = self.weights + self.free
        limit = limit_mib * MIB if limit_mib else self.weights + int(_USABLE * self.free)
        if limit > there:
            raise InvalidRequestError(
                "memory_mib",
                f"memory_mib is {limit_mib}, but the GPU has {there // MIB} MiB for weights and sessions",
                hint=f"Give at most {there // MIB}, or 0 for most of what is free",
            )

        def needed(sessions: int) -> int:
            return self.weights + self.backend_bytes(sessions, max_rows) + RESERVE

        fitting = _most(lambda sessions: needed(sessions) <= limit, max_sessions)
        if fitting < 1:
            least = -(-needed(1) // MIB)
            raise InvalidRequestError(
                "memory_mib",
                f"{limit // MIB} MiB hold no session: with the weights one takes {least} MiB",
                hint=f"Give {least} MiB or more on a GPU that has them, or lower max_rows or prefill_chunk",
            )
        return fitting

    @cached_property
    def _shapes(self) -> GpuWeights:
        """The model without its weights: what sizes are read off."""
        none = torch.empty(0, dtype=self.dtype, device="meta")
        return GpuWeights(self.config, self.dtype, none, (), none, none)

    def _backend(self, slots: int, max_rows: int) -> GpuBackend:
        return GpuBackend(
            self._shapes,
            self.mode,
            self.selector,
            slots=slots,
            max_rows=max_rows,
            max_batch_rows=self.max_batch_rows,
            prefill_chunk=self.prefill_chunk,
        )


def held_bytes(thing: object) -> int:
    """Bytes on the meta device that an object holds, at any depth, each storage counted once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in _tensors(thing, set())}.values())


def _tensors(thing: object, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.is_meta:
            yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from _tensors(value, seen)
    elif type(thing).__module__.startswith("specla."):
        yield from _tensors(getattr(thing, "__dict__", {}), seen)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` that fits; less never fits worse."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
