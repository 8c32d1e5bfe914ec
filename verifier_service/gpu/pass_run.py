"""One bucket's pass, captured once: inputs to the device, all launches, results to the host; then replayed."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.kernels.gpu.adjusting import Changes, LogitEntries, adjust_logits
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.sampling import sample
from specla.kernels.gpu.selector import Choice
from specla.verifier_service.gpu.buckets import FEW_ROWS
from specla.verifier_service.gpu.buffers import PassBuffers
from specla.verifier_service.gpu.capture import captured
from specla.verifier_service.gpu.forward import run_head, run_rows, sample_rows, verify_of
from specla.verifier_service.gpu.host_side import HostSide
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.targets.config import GatedDeltaNetConfig

_PATIENCE_S = 0.1  # how long tokens are looked for before the device is asked


class PassKey(NamedTuple):
    """What one captured graph serves."""

    bucket: Bucket
    choice: Choice
    samples: bool
    """Whether there are head and sampling, or known tokens only."""
    layers: tuple[int, ...]
    """Whose streams are kept."""

    @property
    def serial(self) -> bool:
        """Whether a serial kernel runs."""
        return self.choice.kernel == "serial"

    def can_run_as(self, other: PassKey) -> bool:
        """Whether such passes run on what was made for another key: with other programs, or up to twice the rows, or
        few.

        In exact mode their bits are the same.
        """
        mine, its = self.bucket, other.bucket
        alike = (other.samples, other.layers) == (self.samples, self.layers)
        alike &= (its.sessions, its.pending, its.taps) == (mine.sessions, mine.pending, mine.taps)
        return alike and its.tree_rows >= mine.tree_rows and mine.rows <= its.rows <= max(2 * mine.rows, FEW_ROWS)

    def apart_from(self, other: PassKey) -> tuple[int, int, int, bool]:
        """How much slower such passes may be on what was made for another key; the least is the best."""
        mine, its = self.bucket, other.bucket
        same = other.choice.kernel == self.choice.kernel
        return its.rows - mine.rows, its.tree_rows - mine.tree_rows, abs(its.groups - mine.groups), not same

    def arena_bytes(self, config: GatedDeltaNetConfig, dtype: torch.dtype) -> int:
        """Bytes of the arena that its passes need."""
        return PassBuffers.nbytes(config, dtype, self.bucket, layers=len(self.layers), serial=self.serial)


class PassRun:
    """The launches of a key's passes; on a GPU as a CUDA graph, in the interpreter one by one.

    Attributes:
        buffers: what the launches read and write.
        host: fills their inputs and reads their results.
    """

    def __init__(
        self,
        weights: GpuWeights,
        store: GpuStore,
        key: PassKey,
        arena: Tensor,
        entries: LogitEntries,
        pool: Any,
    ) -> None:
        """Compiles and captures, over an empty batch: nothing of any session changes.

        Args:
            weights: the model.
            store: the sessions' memory.
            key: what for.
            arena: memory that runs share, `arena_bytes` of the key or more.
            entries: likewise.
            pool: handle of the memory that graphs take while they are captured; None where there are none.
        """
        self._weights, self._store, self._samples = weights, store, key.samples
        self.buffers = PassBuffers(
            weights.config, weights.dtype, key.bucket, arena, entries, layers=key.layers, serial=key.serial
        )
        self.host = HostSide(self.buffers, store.in_use)
        self._verify = verify_of(key.choice, self.buffers)
        self._graph = self._captured(pool) if weights.device.type == "cuda" else None
        self._done = torch.cuda.Event() if self._graph is not None else None
        self._runs = False

    def launch(self, changes: Changes | None) -> None:
        """Starts a pass over what the buffers hold; `changes` are made to the logits before rows sample."""
        buffers = self.buffers
        if self._samples:
            buffers.expect_results()
        if changes is not None and len(changes.shared) > buffers.entries.capacity:
            self._launch_in_rounds(changes)
        else:
            if changes is not None:
                buffers.entries.put(changes)
            self.replay()
        self._runs = True
        buffers.upload.sent(self.wait)
        if self._done is not None and not self._samples:
            self._done.record()

    def wait(self) -> None:
        """Until the last pass that was launched has ended or, if it samples, until all its tokens are here: they are
        what it does last. An event behind it would come later, and takes the host time to record.

        Raises:
            RuntimeError: the device has failed.
        """
        if not self._runs:
            return
        if self._samples:
            self._wait_for_results()
        elif self._done is not None:
            self._done.synchronize()
        self._runs = False
        self.buffers.upload.arrived()

    def replay(self) -> None:
        """Starts all launches of a pass over what the buffers hold, for whoever waits by other means than `wait`."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def _wait_for_results(self) -> None:
        asked_at = time.perf_counter() + _PATIENCE_S
        while not self.buffers.have_results():
            if time.perf_counter() < asked_at:
                continue
            torch.cuda.current_stream(self.buffers.batch.device).synchronize()  # raises what the device has to say
            if not self.buffers.have_results():
                raise RuntimeError("the device ended a pass without giving its tokens")

    def _captured(self, pool: Any) -> torch.cuda.CUDAGraph:
        self.buffers.entries.clear()
        self._launch()  # compiles
        return captured(self._launch, pool)

    def _launch(self) -> None:
        self.buffers.upload.fetch()
        run_rows(self._weights, self._store, self.buffers, self._verify)
        if self._samples:
            sample_rows(self._weights, self.buffers)

    def _launch_in_rounds(self, changes: Changes) -> None:
        """For more changes than one launch takes: each changes other logits, so their order does not count."""
        buffers = self.buffers
        buffers.upload.send()
        run_rows(self._weights, self._store, buffers, self._verify)
        for part in buffers.parts:
            run_head(self._weights, buffers, part)
            for round_of in changes.parts(buffers.entries.capacity):
                buffers.entries.put(round_of)
                adjust_logits(part.logits, buffers.entries, part=part.rows)
            sample(part.logits, buffers.sampler, buffers.sampled, buffers.errors, part=part.rows)
