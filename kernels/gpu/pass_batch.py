"""One pass as the GPU kernels see it: which sessions, which rows, what to commit first, where factors go.

Every size is data: a bucket's arrays have fixed addresses and lengths, so that one captured CUDA graph serves every
batch that fits. They are views of one int32 buffer, filled on the host and copied at once.

Sessions, rows and pool rows. A pass holds B places for sessions and R for rows; place b's rows are row_start[b] to
row_start[b + 1], root first. Unused session places have slot -1 and no rows, unused row places session -1. What a row
does to the state goes to a row of its session's *pool* (factor_pool.py), named by `pool_row`; what earlier passes left
to be done is named by `pending`, and the convolution's inputs before the root by `history`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specla.kernels.gpu.factor_pool import Ints, PoolTable, take_rows
from specla.kernels.gpu.schedule import schedule
from specla.kernels.gpu.upload import Upload
from specla.kernels.jit import compiled
from specla.kernels.topology import MAX_ROWS, Topology

NO_SLOT = -1
ZEROS = -1
"""A pool row that is not there: the zeros before the prompt."""

ALIGNED = 4
"""Arrays begin at multiples of 16 bytes: kernels are compiled for that, and once only, whatever the bucket."""

_REMEMBERED = 16  # batches of trees, of a bucket
_REMEMBERED_BUCKETS = 256

_OF_SESSIONS = ("row_start", "pending_len", "write_state", "pending", "history", "pool_row")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The sizes that a captured graph is made for.

    Attributes:
        sessions: B, places for sessions.
        rows: R, places for rows of all sessions together.
        tree_rows: N, the most rows of one session, 1 to 129.
        pending: the most factors a session may have waiting.
        taps: W, taps of the convolution.
        groups: programs that share a session's tree in the chain-decomposed kernel (1: one program walks it all).
    """

    sessions: int
    rows: int
    tree_rows: int
    pending: int = 16
    taps: int = 4
    groups: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no pass can have."""
        if not (1 <= self.sessions <= self.rows and 1 <= self.tree_rows <= min(self.rows, MAX_ROWS)):
            raise ValueError(f"{self}: want 1 <= sessions <= rows and 1 <= tree_rows <= min(rows, {MAX_ROWS})")
        if self.pending < 0 or self.taps < 1 or self.groups < 1:
            raise ValueError(f"{self}: want pending >= 0, taps >= 1 and groups >= 1")

    @property
    def words(self) -> int:
        """32-bit words of one row's ancestor set."""
        return (self.tree_rows + 31) // 32

    @property
    def buffer_words(self) -> int:
        """32-bit words of all arrays."""
        return sum(-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every array, in the order in which they lie in the buffer."""
        B, R = self.sessions, self.rows
        return {
            "slot": (B,),
            "row_start": (B + 1,),
            "pending_len": (B,),
            "write_state": (B,),
            "groups": (B,),
            "pending": (B, self.pending),
            "history": (B, self.taps - 1),
            "row_session": (R,),
            "pool_row": (R,),
            "depth": (R,),
            "ancestors": (R, self.words),
            "tap": (R, self.taps - 1),
            "schedule_len": (B, self.groups),
            "schedule": (B, self.groups, self.tree_rows),
        }


@dataclass(frozen=True, kw_only=True)
class SessionPass:
    """One session's part in a pass.

    Attributes:
        slot: where its state and its pool lie.
        topology: its rows.
        pool_rows: [N], the pool row that each row's factors are written to; none of those that are pending or history.
        pending: pool rows of accepted tokens that the stored state lacks, oldest first.
        history: [W - 1], pool rows of the last committed tokens before the root, oldest first; ZEROS before the prompt.
        write_state: whether this pass stores the state with the pending factors applied.
    """

    slot: int
    topology: Topology
    pool_rows: Sequence[int]
    pending: Sequence[int] = ()
    history: Sequence[int] = ()
    write_state: bool = True


class PassBatch:
    """A bucket's arrays on the device, with fixed addresses; `fill` replaces their contents.

    Attributes:
        slot: int32 [B], the session's slot; NO_SLOT for an unused place.
        row_start: int32 [B + 1].
        pending_len: int32 [B].
        write_state: int32 [B], 0 or 1.
        groups: int32 [B], groups with rows; at most bucket.groups.
        pending: int32 [B, pending], pool rows.
        history: int32 [B, W - 1], pool rows or ZEROS.
        row_session: int32 [R], the row's place b; -1 for an unused row.
        pool_row: int32 [R].
        depth: int32 [R].
        ancestors: int32 [R, ceil(N / 32)], bit a of a row (in its session's numbering) set where a is it or above it.
        tap: int32 [R, W - 1], tap t - 1 is the row's t-th ancestor: a row of the pass, or -d for the d-th token before
            the root.
        schedule_len: int32 [B, groups].
        schedule: int32 [B, groups, N], steps of the serial kernels (see schedule.py).
    """

    slot: Tensor
    row_start: Tensor
    pending_len: Tensor
    write_state: Tensor
    groups: Tensor
    pending: Tensor
    history: Tensor
    row_session: Tensor
    pool_row: Tensor
    depth: Tensor
    ancestors: Tensor
    tap: Tensor
    schedule_len: Tensor
    schedule: Tensor

    def __init__(self, bucket: Bucket, device: torch.device | str, *, within: Upload | None = None) -> None:
        """Arrays of an empty pass: all places unused. They may be part of what another upload sends."""
        self.bucket = bucket
        self._bounds: tuple[int, int] | None = None
        self._largest = (NO_SLOT, ZEROS)
        self._upload = Upload(bucket.buffer_words, device, within=within)
        self.buffer = self._upload.buffer
        for name, view in _views(self.buffer, bucket).items():
            setattr(self, name, view)
        self._arrays = _views(self._upload.words(), bucket)
        first = dict(zip(bucket.shapes(), _firsts(bucket), strict=True))
        self._first = np.array([first[name] for name in _OF_SESSIONS], np.int32)
        self._laid_out = lru_cache(maxsize=_REMEMBERED)(self._lay_out)
        self.fill(())

    def fill(self, sessions: Sequence[SessionPass]) -> None:
        """Puts these sessions into the first places and leaves the others unused; one copy to the device.

        Raises:
            ValueError: more sessions, rows or pending factors than the bucket holds, slots or pool rows that are below
                0, named twice or beyond the store that the batch is bound to, a history of another length; the batch
                keeps its former contents.
        """
        _check(sessions, self.bucket)
        largest = _largest(sessions)
        self._refuse_outside(largest)
        self._largest = largest
        self._upload.words()[:], _ = self._laid_out(tuple(session.topology for session in sessions))
        arrays, at = self._arrays, 0
        for b, session in enumerate(sessions):
            arrays["slot"][b], arrays["write_state"][b] = session.slot, session.write_state
            arrays["pending_len"][b] = len(session.pending)
            arrays["pending"][b, : len(session.pending)] = session.pending
            arrays["history"][b, : len(session.history)] = session.history
            arrays["pool_row"][at : at + len(session.pool_rows)] = session.pool_rows
            at += len(session.pool_rows)
        self._upload.send()

    def put(
        self, topologies: tuple[Topology, ...], slots: Ints, pools: PoolTable, most_pending: int, worth: int
    ) -> bool:
        """`fill` without its checks, for sessions whose pools a table knows: they get free rows there.

        Whose state is stored is for `stores` to say.

        Args:
            topologies: one a session.
            slots: int32 [sessions].
            pools: of all slots.
            most_pending: accepted rows of a session that may wait and leave its pool enough for any pass.
            worth: how many are worth waiting.

        Returns:
            Whether it was done: not where a session has more pending than the bucket has places, or so much that its
            pool has too few rows for this pass.

        Raises:
            ValueError: a pool has too few rows with only `most_pending` rows pending.
        """
        laid_out, depths = self._laid_out(topologies)
        words = self._upload.words()
        words[:] = laid_out
        self._arrays["slot"][: len(slots)] = slots
        done: int = put_pools(
            words,
            self._first,
            slots,
            depths,
            pools.words,
            pools.rows,
            pools.kept,
            self.bucket.pending,
            most_pending,
            worth,
        )
        if done < 0:
            raise ValueError("the pools have no rows left for this pass: give them more, or let fewer be pending")
        self._upload.send()
        return done > 0

    def stored(self, pools: PoolTable) -> None:
        """Notes in the table which states the pass that was put stores."""
        _note_stored(self._arrays["slot"], self._arrays["write_state"], pools.words)

    def _lay_out(self, topologies: tuple[Topology, ...]) -> tuple[Ints, Ints]:
        """int32 [words], what the trees alone decide, as the arrays lie, the rest as in an unused place; and int32
        [sessions], the rows of each tree's longest path."""
        bucket = self.bucket
        flat = np.zeros(self._upload.buffer.shape[0], np.int32)
        arrays = _views(flat, bucket)
        arrays["slot"].fill(NO_SLOT)
        arrays["row_session"].fill(-1)
        arrays["history"].fill(ZEROS)
        at = 0
        for b, topology in enumerate(topologies):
            n = len(topology)
            arrays["row_start"][b] = at
            arrays["row_session"][at : at + n] = b
            arrays["depth"][at : at + n] = topology.depth
            words = np.ascontiguousarray(topology.ancestors).view(np.int32)
            used = min(words.shape[1], bucket.words)
            arrays["ancestors"][at : at + n, :used] = words[:, :used]
            _put_taps(topology.parents, at, arrays["tap"][at : at + n])
            steps, lengths = schedule(topology, bucket.groups)
            groups, longest = steps.shape
            arrays["groups"][b] = groups
            arrays["schedule_len"][b, :groups] = lengths
            arrays["schedule"][b, :groups, :longest] = steps
            at += n
        arrays["row_start"][len(topologies) :] = at
        flat.setflags(write=False)
        return flat, np.array([len(topology.levels) for topology in topologies], np.int32)

    def bind(self, *, slots: int, pool_rows: int) -> None:
        """Holds this and all later contents to a store of so many slots and pool rows; a kernel's wrapper calls it.

        Raises:
            ValueError: the contents name a slot or a pool row beyond, or the batch is bound to another store.
        """
        if self._bounds not in (None, (slots, pool_rows)):
            raise ValueError(f"the batch is bound to {self._bounds} slots and pool rows, not {(slots, pool_rows)}")
        self._bounds = (slots, pool_rows)
        self._refuse_outside(self._largest)

    def _refuse_outside(self, largest: tuple[int, int]) -> None:
        if self._bounds is not None and any(x >= bound for x, bound in zip(largest, self._bounds, strict=True)):
            raise ValueError(f"slot and pool row {largest} lie beyond the store's {self._bounds}")

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.buffer.device


def _views(flat: Any, bucket: Bucket) -> dict[str, Any]:
    """The arrays within a buffer of theirs, on the host or the device."""
    return {name: flat[first:end].reshape(shape) for name, shape, first, end in _places(bucket)}


@lru_cache(maxsize=_REMEMBERED_BUCKETS)
def _places(bucket: Bucket) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
    """Of every array its name, its shape, where it begins and where it ends."""
    shapes = bucket.shapes()
    return tuple(
        (name, shape, first, first + math.prod(shape))
        for (name, shape), first in zip(shapes.items(), _firsts(bucket), strict=True)
    )


def _firsts(bucket: Bucket) -> list[int]:
    """Where each array begins."""
    sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in bucket.shapes().values()]
    return [0, *accumulate(sizes[:-1])]


def _largest(sessions: Sequence[SessionPass]) -> tuple[int, int]:
    """The largest slot and the largest pool row that are named."""
    rows = (max(named) for s in sessions for named in (s.pool_rows, s.pending, s.history) if len(named))
    return max((s.slot for s in sessions), default=NO_SLOT), max(rows, default=ZEROS)


def _check(sessions: Sequence[SessionPass], bucket: Bucket) -> None:
    if len(sessions) > bucket.sessions:
        raise ValueError(f"{len(sessions)} sessions do not fit a bucket of {bucket.sessions}")
    rows = sum(len(s.topology) for s in sessions)
    if rows > bucket.rows:
        raise ValueError(f"{rows} rows do not fit a bucket of {bucket.rows}")
    slots = [s.slot for s in sessions]
    if len(set(slots)) != len(slots) or any(slot < 0 for slot in slots):
        raise ValueError(f"slots {slots}: give every session its own, from 0 on")
    for session in sessions:
        n, pool = len(session.topology), session.pool_rows
        if n > bucket.tree_rows:
            raise ValueError(f"a tree of {n} rows does not fit a bucket of {bucket.tree_rows}")
        if len(session.pending) > bucket.pending:
            raise ValueError(f"{len(session.pending)} pending factors do not fit a bucket of {bucket.pending}")
        if session.history and len(session.history) != bucket.taps - 1:
            raise ValueError(f"history {list(session.history)}: give {bucket.taps - 1} pool rows, or none for zeros")
        if min(session.pending, default=0) < 0 or len(set(session.pending)) != len(session.pending):
            raise ValueError(f"pending {list(session.pending)}: give pool rows from 0 on, each once")
        if min(session.history, default=0) < ZEROS:
            raise ValueError(f"history {list(session.history)}: give pool rows from 0 on, or {ZEROS} for zeros")
        in_use, written = {*session.pending, *session.history} - {ZEROS}, set(pool)
        if not len(pool) == len(written) == n or not in_use.isdisjoint(written) or min(pool) < 0:
            raise ValueError(
                f"pool rows {list(pool)} for {n} rows: give each its own, none of {sorted(in_use)} still in use"
            )


@compiled
def stores(waiting: int, depth: int, count: int, rows: int, places: int, most_pending: int, worth: int) -> bool:
    """Whether a session's pass stores its state: so many rows wait, or there could be more behind it than there is room
    for, with another such tree.

    Args:
        waiting: rows that are pending.
        depth: rows of its tree's longest path.
        count: of its tree.
        rows: of its pool.
        places: for pending rows.
        most_pending: as many leave its pool enough for any tree.
        worth: as many are worth waiting.
    """
    return bool(waiting > worth or waiting + depth > min(places, max(most_pending, rows - count)))


@compiled
def put_pools(
    words: Any,
    first: Any,
    slots: Any,
    depths: Any,
    table: Any,
    rows: int,
    kept: int,
    places: int,
    most_pending: int,
    worth: int,
) -> int:
    """What a pass reads of its sessions' pools, and free rows of them for the pass; see `PassBatch.put`.

    Args:
        words: int32, where the batch's arrays lie; row_start is filled.
        first: int32, where row_start, pending_len, write_state, pending, history and pool_row begin.
        slots: int32 [B].
        depths: int32 [B], rows of each tree's longest path.
        table: `PoolTable.words`, with pools of `rows` rows, `kept` of which are read for a window.
        rows, kept: see there.
        places: a session's pending places.
        most_pending, worth: see `stores`.

    Returns:
        1; 0 where a session has more pending than there are places, or more than `most_pending` and too few rows free,
        and nothing was done; -1 where a pool has too few rows as it is.
    """
    row_start, pending_len, write_state = first[0], first[1], first[2]
    pending, history, pool_row = first[3], first[4], first[5]
    for b in range(len(slots)):
        own, waiting = table[slots[b]], table[slots[b], 0]
        count = words[row_start + b + 1] - words[row_start + b]
        if waiting > places or (waiting > most_pending and take_rows(own, rows, kept, count) < count):
            return 0
    for b in range(len(slots)):
        own, waiting, at = table[slots[b]], table[slots[b], 0], words[row_start + b]
        count = words[row_start + b + 1] - at
        words[pending_len + b] = waiting
        words[write_state + b] = stores(waiting, depths[b], count, rows, places, most_pending, worth)
        for i in range(places):
            words[pending + b * places + i] = own[1 + i] if i < waiting else 0
        for i in range(kept):
            words[history + b * kept + i] = own[1 + rows + i]
        if take_rows(own, rows, kept, count) < count:
            return -1
        for i in range(count):
            words[pool_row + at + i] = own[1 + rows + kept + i]
    return 1


@compiled
def _note_stored(slot: Any, write_state: Any, table: Any) -> None:
    for b in range(len(slot)):
        if slot[b] >= 0 and write_state[b]:
            table[slot[b], 0] = 0


@compiled
def _put_taps(parents: Any, first_row: int, taps: Any) -> None:
    """Fills taps [N, W - 1], the nearest first. Above the root, -1 stands for the last token before it, and so on."""
    for row in range(len(parents)):
        above = row
        for t in range(taps.shape[1]):
            above = parents[above] if above >= 0 else above - 1
            taps[row, t] = above + first_row if above >= 0 else above
