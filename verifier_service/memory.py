"""How many bytes a verifier takes, and how many slots a limit allows."""

from dataclasses import dataclass
from typing import Protocol

from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.targets.config import GatedDeltaNetConfig

FLOAT32 = 4
MIB = 1 << 20


class Memory(Protocol):
    """What sessions take on a target's device."""

    def slots(self, max_sessions: int, max_rows: int, limit_mib: int) -> int:
        """How many sessions fit, at most max_sessions; a limit of 0 leaves it to the device.

        Raises:
            InvalidRequestError: not even one fits the limit.
        """

    def beyond(self, sessions: int, max_rows: int) -> int:
        """Bytes that a backend has taken beyond what was counted, once its passes are ready; 0 or less for none."""


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes by purpose, on CPUs.

    Attributes:
        state_per_session: recurrent state and convolution windows of one slot, whatever the length of its text.
        factors_per_row: what one row of a pass leaves behind until it is committed or dropped.
    """

    state_per_session: int
    factors_per_row: int

    @classmethod
    def of(cls, config: GatedDeltaNetConfig) -> "MemoryAccount":
        """The account of a target."""
        heads, layers = config.value_heads, config.num_hidden_layers
        recurrent = heads * config.head_dim * config.head_v_dim
        window = (config.conv_size - 1) * config.conv_dim
        factors = config.key_dim + config.value_dim + heads + config.conv_dim
        return cls(FLOAT32 * layers * (recurrent + window), FLOAT32 * layers * factors)

    def beyond(self, sessions: int, max_rows: int) -> int:
        """None: pages come as they are written, and the limit is on sessions alone."""
        return 0

    def session_bytes(self, max_rows: int) -> int:
        """Bytes of one session: its slot, and two passes' factors at the most."""
        return self.state_per_session + 2 * max_rows * self.factors_per_row

    def slots(self, max_sessions: int, max_rows: int, limit_mib: int) -> int:
        """How many sessions fit, at most max_sessions; the limit is on the sessions alone, 0 is none.

        Raises:
            InvalidRequestError: not even one fits the limit.
        """
        if limit_mib == 0:
            return max_sessions
        needed = self.session_bytes(max_rows)
        fitting = limit_mib * MIB // needed
        if fitting < 1:
            raise InvalidRequestError(
                "memory_mib",
                f"{limit_mib} MiB hold no session",
                hint=f"Give at least {-(-needed // MIB)} MiB, or 0 for no limit",
            )
        return min(max_sessions, fitting)
