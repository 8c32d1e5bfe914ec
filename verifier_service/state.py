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


class StateStore:
    """The states of all slots; the only owner of the free list.

    Attributes:
        recurrent_state: float32 [slots, L, HV, K, V].
        conv_state: float32 [slots, W - 1, L, D], the last raw inputs, oldest first.
    """

    def __init__(self, config: GatedDeltaNetConfig, slots: int) -> None:
        """Allocate `slots` slots, and one more that belongs to the engine's own measurements."""
        layers = config.num_hidden_layers
        self.recurrent_state = torch.zeros(
            slots + 1, layers, config.value_heads, config.head_dim, config.head_v_dim, dtype=torch.float32
        )
        self.conv_state = torch.zeros(slots + 1, config.conv_size - 1, layers, config.conv_dim, dtype=torch.float32)
        self.scratch_slot = slots
        self._free = list(range(slots - 1, -1, -1))  # the lowest is taken first

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return len(self._free)

    def acquire(self) -> int:
        """Take a slot; its state is that of an empty text.

        Raises:
            CapacityError: no slot is free.
        """
        if not self._free:
            raise CapacityError(
                "all slots are taken", retry_after_s=RETRY_AFTER_S, hint="Try again, or raise max_sessions"
            )
        slot = self._free.pop()
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Set a slot's state to that of an empty text."""
        self.recurrent_state[slot].zero_()
        self.conv_state[slot].zero_()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free, f"slot {slot} freed twice"
        self._free.append(slot)
        self._free.sort(reverse=True)

    def apply(self, slots: Sequence[int], pending: Sequence[PendingPath]) -> None:
        """Bring slots up to date with accepted paths of one pass."""
        factors = pending[0].factors
        assert all(path.factors is factors for path in pending)
        factors.apply(self.recurrent_state, self.conv_state, slots, [path.rows for path in pending])
