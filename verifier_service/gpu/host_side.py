"""The host's side of one run's passes, which the device waits for: the next inputs, and what comes of the tokens.

A pass of the same sessions with the same trees as the run's last one, which is the usual case, is given only what has
changed: tokens, positions, and which rows of the pools are pending, read and free. Any other is laid out anew by the
buffers themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specla.kernels.gpu.adjusting import NO_CHANGES, Changes
from specla.kernels.gpu.factor_pool import Ints, PoolTable
from specla.kernels.gpu.pass_batch import put_pools
from specla.kernels.jit import compiled
from specla.kernels.tree import TreeBatch
from specla.verifier_service.acceptance import Walks, walk, walk_words
from specla.verifier_service.gpu.buckets import MOST_PENDING, worth_waiting
from specla.verifier_service.gpu.buffers import PassBuffers
from specla.verifier_service.lineup import Lineup


class HostSide:
    """Fills the inputs of one run's buffers, and knows what they hold: nobody else fills them.

    Attributes:
        slots: int32 [B], of the last pass.
    """

    def __init__(self, buffers: PassBuffers, pools: PoolTable) -> None:
        """For buffers whose sessions' pools a table knows."""
        self._buffers, self._pools = buffers, pools
        batch, words, rows = buffers.batch, buffers.upload.words(), buffers.bucket.rows
        of_sessions = batch.row_start, batch.pending_len, batch.write_state, batch.pending, batch.history
        of_rows = batch.pool_row, batch.depth, buffers.sampler.position
        self._firsts = np.array([part.storage_offset() for part in (*of_sessions, *of_rows)], np.int32)
        tokens = buffers.tokens.storage_offset()
        self._row_tokens: Ints = words[tokens : tokens + rows]
        self._token_view = self._row_tokens.view(np.uint32).data
        self._sampled: Ints = buffers.sampled.numpy()
        self._walked: Ints = np.empty(walk_words(rows), np.int32)
        self._worth = worth_waiting(serial=buffers.serial)
        self._lineup: Lineup | None = None
        self._adjusts = False
        self.slots: Ints = np.empty(0, np.int32)
        self._depths, self._lengths = self.slots, self.slots
        self._length_view = self._lengths.view(np.uint32).data
        # Over no session, so that both are compiled before a pass needs them.
        places = buffers.bucket.pending, self._worth
        _refill(words, self._firsts, *[self.slots] * 3, pools.words, pools.rows, pools.kept, *places)
        _take_walks(pools.words, self.slots, self._walked, pools.rows, pools.kept)

    def put(self, lineup: Lineup, row_tokens: Sequence[int], lengths: Sequence[int]) -> Changes | None:
        """The next pass's inputs; its sessions get free rows of their pools.

        Args:
            lineup: who runs, B sessions with R rows.
            row_tokens: [R], the rows' own tokens.
            lengths: [B], of the sessions' texts, their roots included.

        Returns:
            Which logits change before; None where nothing was done, as so many rows of a session are pending that its
            state must be written before.

        Raises:
            ValueError: a session of another vocabulary.
        """
        last = self._lineup
        if lineup is not last and not (last is not None and _alike(lineup, last)):
            return self._lay_out(lineup, row_tokens, lengths)
        buffers, pools = self._buffers, self._pools
        words = buffers.upload.words()  # waits
        self._token_view[: len(row_tokens)] = array("I", row_tokens)  # faster by far than any signed way from a list
        self._length_view[:] = array("I", lengths)
        done: int = _refill(
            words,
            self._firsts,
            self.slots,
            self._depths,
            self._lengths,
            pools.words,
            pools.rows,
            pools.kept,
            buffers.bucket.pending,
            self._worth,
        )
        assert done >= 0, "the pools have had rows for such a pass before"
        if not done:
            return None
        if not self._adjusts:
            return NO_CHANGES
        sampling = lineup.sampling(row_tokens, lengths)
        assert sampling is not None
        return buffers.entries.changes_of(sampling)

    def _lay_out(self, lineup: Lineup, row_tokens: Sequence[int], lengths: Sequence[int]) -> Changes | None:
        """All of it, whatever was there."""
        buffers, trees, self._lineup = self._buffers, lineup.batch.topologies, None
        self.slots = np.array(lineup.slots, np.int32)
        if not buffers.batch.put(trees, self.slots, self._pools, MOST_PENDING, self._worth):
            return None
        buffers.put_tokens(row_tokens)
        sampling = lineup.sampling(row_tokens, lengths)
        if sampling is None:
            return NO_CHANGES
        changes = buffers.put_sampling(sampling)
        self._adjusts = any([session.adjusts for session in sampling.sessions])
        self._depths = np.array([len(topology.levels) for topology in trees], np.int32)
        self._lengths = np.array(lengths, np.int32)
        self._length_view = self._lengths.view(np.uint32).data
        self._lineup = lineup
        return changes

    def walks(self, batch: TreeBatch) -> Walks:
        """The ways down the trees of the pass that has ended."""
        return walk(batch, self._row_tokens, self._sampled, self._walked)

    def take_walks(self, cut: Mapping[int, int]) -> None:
        """The pool rows of these walks are pending from now on: all, or the first few where `cut` says how many."""
        for index, count in cut.items():
            self._walked[len(self.slots) + 1 + index] = count
        _take_walks(self._pools.words, self.slots, self._walked, self._pools.rows, self._pools.kept)


def _alike(lineup: Lineup, other: Lineup) -> bool:
    """Whether both are of the same sessions with the same trees."""
    return lineup.batch is other.batch and lineup.slots == other.slots and lineup.states == other.states


@compiled
def _take_walks(table: Any, slots: Any, walked: Any, rows: int, kept: int) -> None:
    """As `PoolTable.accept` of the walks' rows."""
    sessions = len(slots)
    for b in range(sessions):
        own, first, count = table[slots[b]], 2 * sessions + 1 + walked[b], walked[sessions + 1 + b]
        history, taken, pending = 1 + rows, 1 + rows + kept, own[0]
        for i in range(count):
            own[1 + pending + i] = own[taken + walked[first + i]]
        own[0] = pending + count
        for i in range(kept):
            old = i + count
            own[history + i] = own[history + old] if old < kept else own[1 + pending + old - kept]


@compiled
def _refill(
    words: Any,
    firsts: Any,
    slots: Any,
    depths: Any,
    lengths: Any,
    table: Any,
    rows: int,
    kept: int,
    places: int,
    worth: int,
) -> int:
    """Of what `PassBatch.put` writes, all that changes from pass to pass, and the rows' positions; as `put_pools`."""
    done: int = put_pools(words, firsts, slots, depths, table, rows, kept, places, MOST_PENDING, worth)
    if done > 0:
        row_start, depth, position = firsts[0], firsts[6], firsts[7]
        for b in range(len(slots)):
            for row in range(words[row_start + b], words[row_start + b + 1]):
                words[position + row] = words[depth + row] + lengths[b]
    return done
