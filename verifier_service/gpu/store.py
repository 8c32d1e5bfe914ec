"""The sessions' memory on a GPU: states, pools of factor rows, and which rows of each pool are in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specla.kernels.gpu.between_mixers import MeetingPlace
from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.factor_pool import FactorPool, PoolRows, PoolTable
from specla.verifier_service.state import Slots
from specla.verifier_service.targets.config import GatedDeltaNetConfig

_ALIGNED = 4  # rows of a pool, so that every layer's begin at a multiple of 16 bytes; places of a flush likewise


def pool_rows(max_rows: int, most_pending: int, taps: int) -> int:
    """F, rows of one session's pool: those of a pass and those in use meanwhile.

    The last W - 1 committed rows, which the convolution reads, are among the pending ones where these are as many.
    """
    return -(-(max_rows + max(most_pending, taps - 1)) // _ALIGNED) * _ALIGNED


class GpuStore:
    """States and factor pools of all slots.

    A slot's text so far is its state with the pending rows of its pool applied; the last rows of the convolution's
    inputs are named by its history. A pass writes rows that are free, `accept` then says which of them count.

    Attributes:
        states: float32 [L, slots, HV, K, V].
        pools: of all layers, [L, slots, F, ...].
        in_use: the host's side of all pools.
        meeting: where passes of one row meet; None where they take separate launches.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        slots: int,
        max_rows: int,
        most_pending: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Room for `slots` sessions.

        Args:
            config: the model's shape.
            slots: sessions at once.
            max_rows: rows of one session in one pass.
            most_pending: accepted rows that may wait for the state to be written while the session's next pass runs.
            dtype: the model's.
            device: where.
        """
        layers, taps = config.num_hidden_layers, config.conv_size
        sizes = (config.value_heads, config.head_dim, config.head_v_dim)
        self.states = torch.zeros(layers, slots, *sizes, device=device)
        factors = pool_rows(max_rows, most_pending, taps)
        flat = FactorPool.empty(layers * slots, factors, config.num_heads, *sizes, dtype, device)
        self.pools = FactorPool(*(x.view(layers, slots, *x.shape[1:]) for x in flat))
        self.most_pending = most_pending
        self.in_use = PoolTable(slots, factors, taps)
        self.meeting = MeetingPlace.of(torch.device(device))
        self._slots = Slots(slots)
        self._is_ready = False

    @property
    def rows(self) -> list[PoolRows]:
        """The host's side of each slot's pool."""
        return self.in_use.slots

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return self._slots.free

    def layer(self, index: int) -> tuple[Tensor, FactorPool]:
        """One layer's states [slots, HV, K, V] and pools [slots, F, ...]."""
        return self.states[index], FactorPool(*(x[index] for x in self.pools))

    def acquire(self) -> int:
        """Take a slot; its state is that of an empty text.

        Raises:
            CapacityError: no slot is free.
        """
        slot = self._slots.take()
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Set a slot to an empty text."""
        self.states[:, slot].zero_()
        self.rows[slot].clear()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._slots.give_back(slot)

    def write_states(self, slots: Sequence[int]) -> None:
        """Apply what is pending to the stored states, all layers at once: where more is pending than may be."""
        due = [slot for slot in slots if self.in_use.words[slot, 0]]
        if due:
            self._flush(due)
            self.in_use.words[due, 0] = 0

    def prepare(self) -> None:
        """Compile what `write_states` runs, before a session waits for it. Done once."""
        if not self._is_ready:
            self._flush([])
            self._is_ready = True

    def _flush(self, slots: Sequence[int]) -> None:
        """One copy and one launch, always of the same kernel: it is compiled for the rows of a pool and for addresses
        that are multiples of 16."""
        places = max(-(-len(slots) // _ALIGNED) * _ALIGNED, _ALIGNED)
        told = np.zeros((2 + self.in_use.rows) * places, np.int32)
        slot, count, pending = np.split(told, [places, 2 * places])
        words = self.in_use.words[list(slots)]
        slot[: len(slots)], slot[len(slots) :] = slots, -1
        count[: len(slots)] = words[:, 0]
        pending.reshape(places, -1)[: len(slots)] = words[:, 1 : 1 + self.in_use.rows]
        parts = torch.from_numpy(told).to(self.states.device).split([len(slot), len(count), len(pending)])
        flush(self.states, self.pools, parts[0], parts[2].view(places, -1), parts[1])
