"""A target on a GPU: passes of buckets, whose states, factors and windows never leave the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.gpu.pass_batch import Bucket, SessionPass
from specla.kernels.gpu.selector import Choice, LayerShape, Mode, Selector
from specla.kernels.sampling import RowLogprobs, RowSampling, Sampled, check_row, row_logprobs
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch
from specla.verifier_service.features import FINAL_NORM
from specla.verifier_service.gpu.buffers import PassBuffers
from specla.verifier_service.gpu.forward import adjust_and_sample, run_head, run_rows, verify_of
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuWeights

TREE_ROWS = (1, 16, 32, 64, 129)
"""Rows of one session that buckets are made for; a pass runs in the least that holds its trees."""

LEAST_PENDING = 16


class GpuBackend:
    """See `Backend`.

    A pass first commits what its sessions accepted before, inside the verification kernels; sessions that sit out keep
    their factors in their pools, for as long as they like.
    """

    chain_rows = 64

    def __init__(self, weights: GpuWeights, mode: Mode, selector: Selector, *, slots: int, max_rows: int) -> None:
        """Room for `slots` sessions of up to `max_rows` rows a pass.

        Args:
            weights: the model.
            mode: whose kernels are used.
            selector: which of them.
            slots: sessions at once.
            max_rows: rows of one session in one pass.
        """
        rows = max(max_rows, self.chain_rows)
        self.weights, self.mode, self._selector = weights, mode, selector
        self.store = GpuStore(weights.config, slots, rows, rows, weights.dtype, weights.device)
        self.scratch_slot = self.store.scratch_slot
        self._buffers: dict[tuple[Bucket, bool], PassBuffers] = {}

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return self.store.free_slots

    def acquire(self) -> int:
        """Take a slot."""
        return self.store.acquire()

    def clear(self, slot: int) -> None:
        """Set a slot to an empty text."""
        self.store.clear(slot)

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self.store.release(slot)

    def run(
        self,
        slots: Sequence[int],
        batch: TreeBatch,
        row_tokens: Sequence[int],
        sampling: RowSampling | None,
        layers: Sequence[int] = (),
    ) -> GpuPassRows:
        """Run all rows; the sessions' earlier factors are committed on the way."""
        pending = max(len(self.store.rows[slot].pending) for slot in slots)
        choice = self._choose(batch.topologies, pending)
        bucket = self._bucket(batch, pending, choice)
        buffers = self._buffers_of(bucket, features=any(layer != FINAL_NORM for layer in layers))
        pool_rows = self._fill(buffers, slots, batch, row_tokens)
        run_rows(self.weights, self.store, buffers, verify_of(choice, buffers))
        for slot in slots:
            self.store.rows[slot].flushed()  # the kernels have stored every state with what was pending
        out = GpuPassRows(self, buffers, slots, pool_rows)
        if sampling is not None:
            out.sample(sampling)
        return out

    def run_chunk(self, slot: int, tokens: Sequence[int], layers: Sequence[int]) -> None:
        """There is no such form here yet."""
        return

    def _choose(self, topologies: Sequence[Topology], pending: int) -> Choice:
        config = self.weights.config
        shape = LayerShape(config.head_dim, config.head_v_dim, config.value_heads)
        return self._selector.choose(
            self.mode, shape, topologies, pending=_least_pending(pending), dtype=self.weights.dtype
        )

    def _bucket(self, batch: TreeBatch, pending: int, choice: Choice) -> Bucket:
        largest = max(len(topology) for topology in batch.topologies)
        tree_rows = next(size for size in TREE_ROWS if size >= largest)
        return Bucket(
            sessions=_power_of_two(batch.sessions),
            rows=max(_power_of_two(batch.rows), tree_rows),
            tree_rows=tree_rows,
            pending=_least_pending(pending),
            taps=self.weights.config.conv_size,
            groups=choice.groups,
        )

    def _buffers_of(self, bucket: Bucket, *, features: bool) -> PassBuffers:
        key = (bucket, features)
        if key not in self._buffers:
            self._buffers[key] = PassBuffers(self.weights, bucket, features=features)
        return self._buffers[key]

    def _fill(
        self, buffers: PassBuffers, slots: Sequence[int], batch: TreeBatch, row_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Puts sessions and tokens in place; returns the pool rows of every session's rows."""
        sessions, taken = [], []
        for slot, topology in zip(slots, batch.topologies, strict=True):
            rows = self.store.rows[slot]
            taken.append(rows.take(len(topology)))
            sessions.append(
                SessionPass(
                    slot=slot,
                    topology=topology,
                    pool_rows=taken[-1],
                    pending=rows.pending,
                    history=rows.history,
                    write_state=True,
                )
            )
        buffers.batch.fill(sessions)
        buffers.put_tokens(row_tokens)
        return taken


class GpuPassRows:
    """See `PassRows`: views of a bucket's buffers, until the next pass writes there."""

    def __init__(
        self, backend: GpuBackend, buffers: PassBuffers, slots: Sequence[int], pool_rows: list[list[int]]
    ) -> None:
        """After the rows were run."""
        self._backend, self._buffers, self._slots, self._pool_rows = backend, buffers, slots, pool_rows
        self._sampled: Sampled | None = None
        self._raw = buffers.logits

    def sample(self, sampling: RowSampling) -> None:
        """Head, penalties and sampling for all rows; waits for the result."""
        buffers = self._buffers
        buffers.sampler.fill(sampling)
        buffers.entries.fill(sampling)
        run_head(self._backend.weights, buffers)
        if any(session.params.adjusts for session in sampling.sessions):
            self._raw = buffers.logits.clone()
        adjust_and_sample(buffers)
        count = len(sampling.row_session)
        tokens = buffers.sampled[:count].cpu().numpy().astype(np.int64)
        failed = [int(row) for row in np.flatnonzero(buffers.errors[:count].cpu().numpy())]
        logprobs: dict[int, RowLogprobs] = {}
        for row, index in enumerate(sampling.row_session):
            wanted = sampling.sessions[index].params.top_logprobs
            if wanted is not None and tokens[row] >= 0:
                logprobs[row] = row_logprobs(self.logits(row), int(tokens[row]), wanted)
        errors = {row: check_row(self.logits(row)) or "every token has been ruled out" for row in failed}
        self._sampled = Sampled(tokens, errors, logprobs)

    @property
    def sampled(self) -> Sampled:
        """The tokens that the rows sampled."""
        assert self._sampled is not None, "the pass was run without sampling"
        return self._sampled

    def logits(self, row: int) -> NDArray[np.float32]:
        """A row's logits, before penalties."""
        values: NDArray[np.float32] = self._raw[row].cpu().numpy()
        return values

    def hidden(self, layer: int, rows: Sequence[int]) -> Tensor:
        """The stream after a layer."""
        if layer == FINAL_NORM:
            source = self._buffers.final
        else:
            assert self._buffers.hidden is not None, "the pass was run without features"
            source = self._buffers.hidden[layer]
        return source[torch.tensor(rows, device=source.device)].float().cpu()

    def take(self, index: int, rows: Sequence[int]) -> None:
        """The rows' factors stay in the pool until the session's next pass commits them."""
        pool = self._pool_rows[index]
        self._backend.store.rows[self._slots[index]].accept([pool[row] for row in rows], state_written=False)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _least_pending(pending: int) -> int:
    return max(LEAST_PENDING, _power_of_two(pending) if pending else 0)
