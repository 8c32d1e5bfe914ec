"""Bias, penalties and bans on a GPU: single logits of single rows, changed in place before `sample`.

A row that asks for nothing costs nothing. Presence and frequency penalties make an entry for every distinct id of the
output, a repetition penalty for those of the prompt, too, in each row: capacity is rows x distinct ids at most.
The order for one logit is that of `sampling.adjusted_logits`: bias, repetition, presence and frequency, ban.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu.upload import Upload
from specla.kernels.sampling import RowSampling, SessionSampling

_FIELDS = 6  # row, id, bias, repetition, subtracted, banned
_HEADER = 8  # words before the first entry; the first holds how many there are
_BLOCK = 1024
_NONE = np.empty((0, _FIELDS), np.int32)


class LogitEntries:
    """Changes of single logits, on the device at fixed addresses; `fill` replaces them with one copy.

    Attributes:
        buffer: int32, the number of entries, 7 unused words, then for each entry (row, id, bias, repetition,
            subtracted, banned), the middle three being float32 bits. A (row, id) stands there once.
    """

    def __init__(self, rows: int, vocab_size: int, capacity: int, device: torch.device | str) -> None:
        """No entries, and room for `capacity` of them."""
        self.shape = (rows, vocab_size)
        self.capacity = capacity
        self._upload = Upload(self.words(capacity), device)
        self.buffer = self._upload.buffer

    @staticmethod
    def words(capacity: int) -> int:
        """int32 words of room for so many entries."""
        return _HEADER + _FIELDS * capacity

    def of(self, rows: int) -> LogitEntries:
        """The same entries for logits of fewer or more rows: the memory is shared, and whoever puts last counts."""
        alike = copy.copy(self)
        alike.shape = (rows, self.shape[1])
        return alike

    def fill(self, rows: RowSampling) -> None:
        """Puts in what these rows' sessions ask for, penalties counting each row's own path.

        Raises:
            ValueError: more rows than logits, a session of another vocabulary, or more entries than there is room for.
        """
        self.put(self.entries_of(rows))

    def entries_of(self, rows: RowSampling) -> NDArray[np.int32]:
        """int32 [n, 6], what these rows' sessions ask for, however much that is.

        Raises:
            ValueError: more rows than logits, or a session of another vocabulary.
        """
        places, vocab_size = self.shape
        if len(rows.row_session) > places:
            raise ValueError(f"{len(rows.row_session)} rows of at most {places}: give fewer")
        for session in rows.sessions:
            if session.vocab_size != vocab_size:
                raise ValueError(f"a session samples of {session.vocab_size} ids: give sessions of {vocab_size}")
        if not any(session.params.adjusts for session in rows.sessions):
            return _NONE
        found = []
        for row, index in enumerate(rows.row_session):
            session = rows.sessions[index]
            if session.params.adjusts:
                found.append(_entries_of(row, session, rows.path(row) if session.params.penalizes else []))
        return np.concatenate(found) if found else _NONE

    def clear(self) -> None:
        """No entries: what another pass has left may name rows that the next one's logits do not have."""
        self.put(_NONE)

    def put(self, entries: NDArray[np.int32]) -> None:
        """Replaces the contents by `entries`, rows of `entries_of`.

        Raises:
            ValueError: more than there is room for.
        """
        count = len(entries)
        if count > self.capacity:
            raise ValueError(f"{count} logits change, with room for {self.capacity}: give a larger capacity")
        used = _HEADER + _FIELDS * count
        host = self._upload.words()
        if not count and not host[0]:
            return
        host[0] = count
        host[_HEADER:used] = entries.reshape(-1)
        self._upload.send(used)


@triton.jit
def _adjust(
    p_logits,
    p_entries,
    o_stride,
    FIELDS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_first = tl.program_id(0) * BLOCK
    b_count = tl.load(p_entries)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if o_first >= b_count:
        return
    i_entry = o_first + tl.arange(0, BLOCK)
    mask = i_entry < b_count
    p_entry = p_entries + HEADER + i_entry.to(tl.int64) * FIELDS
    i_row, i_id = tl.load(p_entry, mask=mask, other=0), tl.load(p_entry + 1, mask=mask, other=0)
    b_bias = tl.load(p_entry + 2, mask=mask, other=0).to(tl.float32, bitcast=True)
    b_repetition = tl.load(p_entry + 3, mask=mask, other=0x3F800000).to(tl.float32, bitcast=True)
    b_subtracted = tl.load(p_entry + 4, mask=mask, other=0).to(tl.float32, bitcast=True)
    banned = tl.load(p_entry + 5, mask=mask, other=0) != 0
    p_logit = p_logits + i_row.to(tl.int64) * o_stride + i_id
    x = tl.load(p_logit, mask=mask, other=0.0) + b_bias
    x = tl.where(x > 0, tl.div_rn(x, b_repetition), x * b_repetition) - b_subtracted
    is_fault = (x != x) | (x == float("inf"))  # a ban must not hide what `sample` has to report
    x = tl.where(banned & (is_fault == 0), float("-inf"), x)
    tl.store(p_logit, x, mask=mask)


def adjust_logits(logits: Tensor, entries: LogitEntries, *, overlap: bool = False) -> None:
    """Applies the entries, in place.

    Args:
        logits: float32 [R, vocab_size]; rows may stand apart, ids side by side.
        entries: of R rows and that vocabulary.
        overlap: whether to begin while the kernel before, which must not write entries, still runs. The next launch may
            begin once this one has waited.

    Raises:
        ValueError: shapes, dtype, layout or device do not belong together.
    """
    if logits.dtype != torch.float32 or tuple(logits.shape) != entries.shape:
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}: give float32 {list(entries.shape)}")
    if logits.stride(1) != 1 or logits.device != entries.buffer.device:
        raise ValueError(
            f"logits on {logits.device} with strides {logits.stride()}: give a tensor on {entries.buffer.device} "
            "whose last dimension is contiguous"
        )
    if entries.capacity:
        overlap = overlap and not triton.knobs.runtime.interpret
        _adjust[(triton.cdiv(entries.capacity, _BLOCK),)](
            logits, entries.buffer, logits.stride(0), FIELDS=_FIELDS, HEADER=_HEADER, BLOCK=_BLOCK, OVERLAP=overlap,
            launch_pdl=overlap,
        )  # fmt: skip


def _entries_of(row: int, session: SessionSampling, path: list[int]) -> NDArray[np.int32]:
    """int32 [n, _FIELDS], the entries of one row."""
    params = session.params
    seen: NDArray[Any] = session.seen_ids(path) if params.repetition_penalty != 1 else np.empty(0, np.int64)
    output: NDArray[Any] = np.empty(0, np.int64)
    penalties: NDArray[Any] = np.empty(0, np.float32)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        output, penalties = session.output_penalties(path)
    ids = np.unique(np.concatenate([session.bias_ids, seen, output, session.banned_ids]))
    entries = np.zeros((len(ids), _FIELDS), dtype=np.int32)
    values = entries.view(np.float32)
    entries[:, 0], entries[:, 1], values[:, 3] = row, ids, 1.0
    values[np.searchsorted(ids, session.bias_ids), 2] = session.bias
    values[np.searchsorted(ids, seen), 3] = params.repetition_penalty
    values[np.searchsorted(ids, output), 4] = penalties
    entries[np.searchsorted(ids, session.banned_ids), 5] = 1
    return entries
