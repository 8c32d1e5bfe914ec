"""Where a session's factors lie: rows of a pool, written by one pass and read by later ones until S holds them.

A row of the pool belongs to one token and layer: the key k, the factor u, the log decay g and the raw inputs of the
convolution. A pass writes its rows' factors into free pool rows. Accepted rows stay where they are, as *pending*, until
a pass stores the state with them applied; all others are free again as soon as the verdict is known, and nobody ever
reads them. The convolution's window is the raw inputs of the last W - 1 committed tokens, wherever they lie: it needs
no copy and advances by naming other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


class PoolRows:
    """Which rows of one session's pool are in use: the host's side of the pool.

    The rows that a state lacks (`pending`) and the last W - 1 (`history`) are in use, the others free.
    """

    def __init__(self, rows: int, taps: int) -> None:
        """A pool of `rows` rows for a convolution of `taps` taps; nothing pending, zeros before the first token."""
        self._rows = rows
        self.pending: list[int] = []
        self.history: list[int] = [-1] * (taps - 1)

    def take(self, count: int) -> list[int]:
        """Free rows for a pass. They stay free until `accept` names them.

        Raises:
            ValueError: fewer are free: the state must be written first.
        """
        in_use = {*self.pending, *self.history}
        free = [row for row in range(self._rows) if row not in in_use]
        if len(free) < count:
            raise ValueError(
                f"{count} rows of the pool are wanted, {len(free)} of {self._rows} are free: write S first"
            )
        return free[:count]

    def accept(self, rows: list[int], *, state_written: bool) -> None:
        """After a pass: the accepted path's pool rows, root first, and whether the pass stored the state."""
        self.pending = [*([] if state_written else self.pending), *rows]
        kept = len(self.history)
        self.history = [*self.history, *rows][len(rows) :] if kept else []

    def flushed(self) -> None:
        """After a flush: nothing is pending."""
        self.pending = []
