"""Where a session's factors lie: rows of a pool, written by one pass and read by later ones until S holds them.

A row of the pool belongs to one token and layer: the key k, the factor u, the log decay g and the raw inputs of the
convolution. A pass writes its rows' factors into free pool rows. Accepted rows stay where they are, as *pending*, until
a pass stores the state with them applied; all others are free again as soon as the verdict is known, and nobody ever
reads them. The convolution's window is the raw inputs of the last W - 1 committed tokens, wherever they lie: it needs
no copy and advances by naming other rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.jit import compiled

Ints = NDArray[np.int32]


class FactorPool(NamedTuple):
    """One layer's pools of all slots; `[L, ...]` stacks of them hold a model's."""

    k: Tensor
    """model dtype [slots, F, H, K], normalised."""
    u: Tensor
    """float32 [slots, F, HV, V]."""
    g: Tensor
    """float32 [slots, F, HV], log decay."""
    x: Tensor
    """model dtype [slots, F, D], D = 2 H K + HV V raw channels."""

    @classmethod
    def empty(
        cls,
        slots: int,
        rows: int,
        heads: int,
        value_heads: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FactorPool:
        """Uninitialised pools of F = `rows` rows: no row is read before it was written."""
        channels = 2 * heads * key_width + value_heads * value_width
        return cls(
            torch.empty(slots, rows, heads, key_width, dtype=dtype, device=device),
            torch.empty(slots, rows, value_heads, value_width, device=device),
            torch.empty(slots, rows, value_heads, device=device),
            torch.empty(slots, rows, channels, dtype=dtype, device=device),
        )


class PoolTable:
    """Which rows of every slot's pool are in use: the host's side of the pools.

    The rows that a state lacks (`pending`) and the last W - 1 (`history`) are in use, the others free.

    Attributes:
        rows: F, of one pool.
        kept: W - 1.
        words: int32 [slots, 1 + F + W - 1 + F], of each slot how many are pending, these, oldest first, the history,
            and the rows that its last pass was given.
    """

    def __init__(self, slots: int, rows: int, taps: int) -> None:
        """Pools of `rows` rows for a convolution of `taps` taps: nothing pending, zeros before the first tokens."""
        self.rows, self.kept = rows, taps - 1
        self.words: Ints = np.zeros((slots, 1 + 2 * rows + self.kept), np.int32)
        self.slots = [PoolRows(rows, taps, within=words) for words in self.words]
        none: Ints = np.empty(0, np.int32)
        _accept_taken(self.words, none, none, none, self.rows, self.kept)  # compiled before a pass needs it

    def accept(self, slots: Ints, paths: Sequence[Sequence[int]]) -> None:
        """After a pass: rows of it that were accepted, each slot's root first, none where nothing moves on."""
        told = np.frombuffer(array("i", [*map(len, paths), *chain.from_iterable(paths)]), np.int32)
        _accept_taken(self.words, slots, told[len(slots) :], told, self.rows, self.kept)


class PoolRows:
    """One slot's part of a `PoolTable`, or one that stands alone."""

    def __init__(self, rows: int, taps: int, *, within: Ints | None = None) -> None:
        """A pool of `rows` rows for a convolution of `taps` taps; nothing pending, zeros before the first token."""
        self._rows, self._kept = rows, taps - 1
        self._words: Ints = np.zeros(1 + 2 * rows + taps - 1, np.int32) if within is None else within
        self.clear()

    @property
    def pending(self) -> list[int]:
        """Rows that the state lacks, oldest first."""
        return [int(row) for row in self._words[1 : 1 + self._words[0]]]

    @property
    def history(self) -> list[int]:
        """The last W - 1 rows, oldest first; -1 before the first token."""
        return [int(row) for row in self._words[1 + self._rows : 1 + self._rows + self._kept]]

    def clear(self) -> None:
        """As a pool of an empty text."""
        self._words[0] = 0
        self._words[1 + self._rows : 1 + self._rows + self._kept] = -1

    def take(self, count: int) -> list[int]:
        """Free rows for a pass. They stay free until `accept` names them.

        Raises:
            ValueError: fewer are free: the state must be written first.
        """
        free = take_rows(self._words, self._rows, self._kept, count)
        if free < count:
            raise ValueError(f"{count} rows of the pool are wanted, {free} of {self._rows} are free: write S first")
        first = 1 + self._rows + self._kept
        return [int(row) for row in self._words[first : first + count]]

    def accept(self, rows: Sequence[int], *, state_written: bool) -> None:
        """After a pass: the accepted path's pool rows, root first, and whether the pass stored the state."""
        if state_written:
            self.flushed()
        _append(self._words, np.array(rows, np.int32), self._rows, self._kept)

    def flushed(self) -> None:
        """After a flush: nothing is pending."""
        self._words[0] = 0


@compiled
def take_rows(words: Any, rows: int, kept: int, count: int) -> int:
    """Notes the first `count` free rows of one slot as those of its pass; returns how many are free."""
    in_use = np.zeros(rows, np.bool_)
    for i in range(words[0]):
        in_use[words[1 + i]] = True
    for i in range(kept):
        if words[1 + rows + i] >= 0:
            in_use[words[1 + rows + i]] = True
    free = 0
    for row in range(rows):
        if not in_use[row]:
            if free < count:
                words[1 + rows + kept + free] = row
            free += 1
    return free


@compiled
def _append(words: Any, added: Any, rows: int, kept: int) -> None:
    """Pool rows behind one slot's pending ones and its history."""
    count, pending = len(added), words[0]
    for i in range(count):
        words[1 + pending + i] = added[i]
    words[0] = pending + count
    for i in range(kept):
        old = i + count
        words[1 + rows + i] = words[1 + rows + old] if old < kept else added[old - kept]


@compiled
def _accept_taken(words: Any, slots: Any, paths: Any, lengths: Any, rows: int, kept: int) -> None:
    at = 0
    for b in range(len(slots)):
        own = words[slots[b]]
        taken = own[1 + rows + kept :]
        added = np.empty(lengths[b], np.int32)
        for i in range(lengths[b]):
            added[i] = taken[paths[at + i]]
        _append(own, added, rows, kept)
        at += lengths[b]
