"""Slots: where the sessions' recurrent states and convolution windows lie, and which are free."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specla.rpc.errors import CapacityError
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import PassFactors

RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class PendingPath:
    """An accepted path that the stored state does not hold yet: rows of the pass that made `factors`, root first."""

    factors: PassFactors
    rows: tuple[int, ...]


class Slots:
    """Which places for sessions are free; the only owner of the list."""

    def __init__(self, count: int) -> None:
        """All of them."""
        self._free = list(range(count - 1, -1, -1))  # the lowest is taken first

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        """The lowest that is free.

        Raises:
            CapacityError: there is none.
        """
        if not self._free:
            raise CapacityError(
                "all slots are taken", retry_after_s=RETRY_AFTER_S, hint="Try again, or raise max_sessions"
            )
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """It is free again."""
        assert slot not in self._free, f"slot {slot} freed twice"
        self._free.append(slot)
        self._free.sort(reverse=True)


class StateStore:
    """The states of all slots.

    Attributes:
        recurrent_state: float32 [slots, L, HV, K, V].
        conv_state: float32 [slots, W - 1, L, D], the last raw inputs, oldest first.
    """

    def __init__(self, config: GatedDeltaNetConfig, slots: int) -> None:
        """Allocate `slots` slots."""
        layers = config.num_hidden_layers
        self.recurrent_state = torch.zeros(
            slots, layers, config.value_heads, config.head_dim, config.head_v_dim, dtype=torch.float32
        )
        self.conv_state = torch.zeros(slots, config.conv_size - 1, layers, config.conv_dim, dtype=torch.float32)
        self._slots = Slots(slots)

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return self._slots.free

    def acquire(self) -> int:
        """Take a slot; its state is that of an empty text.

        Raises:
            CapacityError: no slot is free.
        """
        slot = self._slots.take()
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Set a slot's state to that of an empty text."""
        self.recurrent_state[slot].zero_()
        self.conv_state[slot].zero_()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._slots.give_back(slot)

    def apply(self, slots: Sequence[int], pending: Sequence[PendingPath]) -> None:
        """Bring slots up to date with accepted paths of one pass."""
        factors = pending[0].factors
        assert all(path.factors is factors for path in pending)
        factors.apply(self.recurrent_state, self.conv_state, slots, [path.rows for path in pending])
