"""Bias, penalties and bans on a GPU: single logits, changed in place before `sample`.

What a session asks of its logits is one list of (id, change), which all its rows share: its bias and bans, and
penalties as its committed text earns them. A row adds changes of its own for the few ids on its path: there penalties
count the path, too, and they take the place of the shared ones. A row that asks for nothing costs nothing.
The order for one logit is that of `sampling.adjusted_logits`: bias, repetition, presence and frequency, ban.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.gpu.overlap import overlapping, wait_for_previous
from specla.kernels.gpu.upload import Upload
from specla.kernels.sampling import RowSampling, SessionSampling

Ints = NDArray[np.int32]

_FIELDS = 5  # id, bias, repetition, subtracted, banned
_HEADER = 4  # rows, where the shared lists begin, whether own changes are made, unused
_BLOCK = 256
_PROGRAMS = 128  # about so many share the rows
_MOST_PATH = 64  # ids on a row's path, of all rows on average: a chain of 129 rows has as many


class Changes(NamedTuple):
    """What the rows of a pass ask of their logits."""

    row_session: Ints
    """int32 [rows], whose list a row shares."""
    shared_first: Ints
    """int32 [sessions + 1], where each session's list begins."""
    shared: Ints
    """int32 [n, 5], the lists: (id, bias, repetition, subtracted, banned), the middle three being float32 bits. An id
    stands in a list once."""
    own_first: Ints
    """int32 [rows + 1], where each row's own changes begin."""
    own: Ints
    """int32 [m, 5], changes of single rows, in place of the shared ones of the same ids."""
    makes_own: bool = True
    """Whether `own` is applied, or only keeps the shared ones away."""

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return len(self.shared) + len(self.own) > 0

    def parts(self, room: int) -> Iterator[Changes]:
        """The same in parts of at most `room` shared changes; each changes other logits."""
        for first in range(0, max(1, len(self.shared)), room):
            yield self._replace(
                shared_first=np.clip(self.shared_first, first, first + room) - first,
                shared=self.shared[first : first + room],
                makes_own=first == 0,
            )


_NO_INTS = np.zeros(0, np.int32)
_NONE = np.zeros((0, _FIELDS), np.int32)
NO_CHANGES = Changes(_NO_INTS, np.zeros(1, np.int32), _NONE, np.zeros(1, np.int32), _NONE)


class LogitEntries:
    """Changes of logits, on the device at fixed addresses; `fill` replaces them with one copy.

    Attributes:
        shape: rows and ids of the logits.
        capacity: room for so many shared changes.
        buffer: int32, a header; for each of P row places whose list it shares; where its own changes begin, P + 1;
            where each of P lists begins, P + 1; then own changes, and behind the last of them the lists.
    """

    def __init__(self, rows: int, vocab_size: int, capacity: int, device: torch.device | str) -> None:
        """No changes; room for `capacity` shared ones, and own ones of all paths that a pass can have."""
        self.shape = (rows, vocab_size)
        self.capacity, self.places = capacity, rows
        fixed = Upload.room(_HEADER + 3 * rows + 2)
        self._upload = Upload(fixed + _FIELDS * (rows * _MOST_PATH + capacity), device)
        self.buffer = self._upload.buffer

    def of(self, rows: int) -> LogitEntries:
        """The same changes for logits of fewer or more rows: the memory is shared, and whoever puts last counts."""
        alike = copy.copy(self)
        alike.shape = (rows, self.shape[1])
        return alike

    def fill(self, rows: RowSampling) -> None:
        """Puts in what these rows' sessions ask for, penalties counting each row's own path.

        Raises:
            ValueError: more rows than logits, a session of another vocabulary, or more changes than there is room for.
        """
        self.put(self.changes_of(rows))

    def changes_of(self, rows: RowSampling) -> Changes:
        """What these rows' sessions ask for, however much that is.

        Raises:
            ValueError: more rows than logits, or a session of another vocabulary.
        """
        places, vocab_size = self.shape
        count = len(rows.row_session)
        if count > places:
            raise ValueError(f"{count} rows of at most {places}: give fewer")
        if not any([session.adjusts for session in rows.sessions]):
            return NO_CHANGES
        for session in rows.sessions:
            if session.vocab_size != vocab_size:
                raise ValueError(f"a session samples of {session.vocab_size} ids: give sessions of {vocab_size}")
        lists = [_shared(session) if session.adjusts else _NONE for session in rows.sessions]
        row, own = _own(rows)
        return Changes(
            row_session=np.array(rows.row_session, np.int32),
            shared_first=np.cumsum([0, *map(len, lists)], dtype=np.int32),
            shared=np.concatenate(lists),
            own_first=np.searchsorted(row, np.arange(count + 1)).astype(np.int32),
            own=own,
        )

    def clear(self) -> None:
        """No changes: what another pass has left may name rows that the next one's logits do not have."""
        self.put(NO_CHANGES)

    def put(self, changes: Changes) -> None:
        """Replaces the contents.

        Raises:
            ValueError: more than there is room for.
        """
        rows, places = len(changes.row_session), self.places
        if not rows and not self._upload.words()[0]:
            return
        if len(changes.shared) > self.capacity:
            raise ValueError(f"{len(changes.shared)} logits change, with room for {self.capacity}: give more capacity")
        if rows > places or len(changes.own) > places * _MOST_PATH:
            raise ValueError(f"{rows} rows with {len(changes.own)} changes of their own, with {places} row places")
        host = self._upload.words()
        own = Upload.room(_HEADER + 3 * places + 2)
        shared = own + changes.own.size
        end = shared + changes.shared.size
        host[:3] = rows, shared, changes.makes_own
        host[_HEADER:][:rows] = changes.row_session
        host[_HEADER + places :][: rows + 1] = changes.own_first
        host[_HEADER + 2 * places + 1 :][: len(changes.shared_first)] = changes.shared_first
        host[own:shared] = changes.own.reshape(-1)
        host[shared:end] = changes.shared.reshape(-1)
        self._upload.send(end)


@triton.jit
def _change(p_row, p_change, mask):
    """Changes a row's logits as the entries at `p_change` say."""
    i_id = tl.load(p_change, mask=mask, other=0)
    b_bias = tl.load(p_change + 1, mask=mask, other=0).to(tl.float32, bitcast=True)
    b_repetition = tl.load(p_change + 2, mask=mask, other=0x3F800000).to(tl.float32, bitcast=True)
    b_subtracted = tl.load(p_change + 3, mask=mask, other=0).to(tl.float32, bitcast=True)
    banned = tl.load(p_change + 4, mask=mask, other=0) != 0
    x = tl.load(p_row + i_id, mask=mask, other=0.0) + b_bias
    x = tl.where(x > 0, tl.div_rn(x, b_repetition), x * b_repetition) - b_subtracted
    is_fault = (x != x) | (x == float("inf"))  # a ban must not hide what `sample` has to report
    x = tl.where(banned & (is_fault == 0), float("-inf"), x)
    tl.store(p_row + i_id, x, mask=mask)


@triton.jit
def _adjust(
    p_logits, p_entries, o_stride, FIRST, PLACES,
    O_OWN: tl.constexpr, FIELDS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs that share a row's list); the first row of the logits is row FIRST of the entries."""
    i_row, i_program, b_programs = FIRST + tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b_rows = tl.load(p_entries)
    wait_for_previous(OVERLAP)
    if i_row >= b_rows:
        return
    p_shared, p_own = p_entries + tl.load(p_entries + 1), p_entries + O_OWN
    i_session = tl.load(p_entries + HEADER + i_row)
    p_first = p_entries + HEADER + PLACES + i_row
    i_own, i_own_end = tl.load(p_first), tl.load(p_first + 1)
    p_first = p_entries + HEADER + 2 * PLACES + 1 + i_session
    i_first, i_end = tl.load(p_first), tl.load(p_first + 1)
    p_row = p_logits + tl.program_id(0).to(tl.int64) * o_stride
    for i_block in range(i_first + i_program * BLOCK, i_end, b_programs * BLOCK):
        i_change = i_block + tl.arange(0, BLOCK)
        mask = i_change < i_end
        i_id = tl.load(p_shared + i_change * FIELDS, mask=mask, other=-1)
        for i in range(i_own, i_own_end):
            mask = mask & (i_id != tl.load(p_own + i * FIELDS))
        _change(p_row, p_shared + i_change * FIELDS, mask)
    if (i_program == 0) & (tl.load(p_entries + 2) != 0):
        for i_block in range(i_own, i_own_end, BLOCK):
            i_change = i_block + tl.arange(0, BLOCK)
            _change(p_row, p_own + i_change * FIELDS, i_change < i_own_end)


def adjust_logits(logits: Tensor, entries: LogitEntries, *, part: slice | None = None, overlap: bool = False) -> None:
    """Applies the changes, in place.

    Args:
        logits: float32 [R, vocab_size], or of the rows of `part`; rows may stand apart, ids side by side.
        entries: of R rows and that vocabulary.
        part: whose logits they are; None for all rows.
        overlap: whether to begin while the kernel before, which must not write entries, still runs. The next launch may
            begin once this one has waited.

    Raises:
        ValueError: shapes, dtype, layout or device do not belong together.
    """
    places, vocab_size = entries.shape
    changed = range(places)[part or slice(None)]
    if logits.dtype != torch.float32 or tuple(logits.shape) != (len(changed), vocab_size):
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}: give float32 {[len(changed), vocab_size]}")
    if logits.stride(1) != 1 or logits.device != entries.buffer.device:
        raise ValueError(
            f"logits on {logits.device} with strides {logits.stride()}: give a tensor on {entries.buffer.device} "
            "whose last dimension is contiguous"
        )
    overlaps = overlapping(overlap)
    rows = len(changed)
    _adjust[(rows, max(1, _PROGRAMS // rows))](
        logits, entries.buffer, logits.stride(0), changed.start, entries.places,
        O_OWN=Upload.room(_HEADER + 3 * entries.places + 2), FIELDS=_FIELDS, HEADER=_HEADER, BLOCK=_BLOCK,
        OVERLAP=overlaps, launch_pdl=overlaps > 0,
    )  # fmt: skip


def _shared(session: SessionSampling) -> Ints:
    """int32 [n, _FIELDS], a session's list, ids ascending."""
    params, changed = session.params, np.zeros(session.vocab_size, np.bool_)
    changed[session.bias_ids] = changed[session.banned_ids] = True
    if params.repetition_penalty != 1:
        changed |= session.seen
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        changed |= session.counts > 0
    ids = np.flatnonzero(changed)
    if not params.penalizes:
        return _changes(session, ids, False, np.zeros(len(ids), np.int64))
    return _changes(session, ids, session.seen[ids], session.counts[ids])


def _own(rows: RowSampling) -> tuple[NDArray[np.int64], Ints]:
    """int64 [m] and int32 [m, _FIELDS]: the rows that have changes of their own, ascending, and these."""
    paths: dict[int, dict[int, int]] = {}
    of_session: dict[int, list[tuple[int, int, int]]] = {}
    for row, index in enumerate(rows.row_session if rows.parent_row else ()):
        parent = rows.parent_row[row]
        if parent < 0 or not rows.sessions[index].params.penalizes:
            continue
        token, path = int(rows.row_tokens[row]), dict(paths.get(parent, {}))
        path[token] = path.get(token, 0) + 1
        paths[row] = path
        of_session.setdefault(index, []).extend((row, on_path, count) for on_path, count in path.items())
    if not of_session:
        return np.zeros(0, np.int64), _NONE
    places, found = [], []
    for index, triples in of_session.items():
        session, (of_rows, ids, counts) = rows.sessions[index], np.array(triples, np.int64).T
        places.append(of_rows)
        found.append(_changes(session, ids, True, session.counts[ids] + counts))
    changed = np.concatenate(places)
    order = np.argsort(changed, kind="stable")
    return changed[order], np.concatenate(found)[order]


def _changes(session: SessionSampling, ids: NDArray[np.int64], seen: Any, counts: NDArray[Any]) -> Ints:
    """int32 [n, _FIELDS], what happens to the logits of `ids`.

    Args:
        session: who asks.
        ids: [n].
        seen: bool [n], or one for all: whether they stand in the text or on the path.
        counts: [n], how often they stand in the output or on the path.
    """
    params, changes = session.params, np.zeros((len(ids), _FIELDS), np.int32)
    values = changes.view(np.float32)
    changes[:, 0], values[:, 2] = ids, 1.0
    if len(session.bias_ids):
        bias = np.zeros(session.vocab_size, np.float32)
        bias[session.bias_ids] = session.bias
        values[:, 1] = bias[ids]
    if params.repetition_penalty != 1:
        values[:, 2] = np.where(seen, np.float32(params.repetition_penalty), np.float32(1))
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        penalties = np.float32(params.frequency_penalty) * counts.astype(np.float32)
        values[:, 3] = np.where(counts > 0, penalties + np.float32(params.presence_penalty), np.float32(0))
    if len(session.banned_ids):
        banned = np.zeros(session.vocab_size, np.int32)
        banned[session.banned_ids] = 1
        changes[:, 4] = banned[ids]
    return changes
