"""The layer shapes that the kernels are timed at, and the bytes that one layer must move."""

from __future__ import annotations

from dataclasses import dataclass

STATE_BYTES = 4  # float32
MODEL_BYTES = 2  # bfloat16
FACTOR_BYTES = 4  # float32 u, g and beta


@dataclass(frozen=True)
class Shape:
    """One layer: H key heads of width K, HV value heads of width V."""

    name: str
    heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def state_elements(self) -> int:
        """Elements of one session's state."""
        return self.value_heads * self.key_width * self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of one session's state."""
        return self.state_elements * STATE_BYTES


PAPER = Shape("8 heads of 256", 8, 8, 256, 256)
NARROW = Shape("16 heads of 128", 16, 16, 128, 128)
WIDE = Shape("48 heads of 128", 16, 48, 128, 128)
"""48 value heads on 16 key heads, the grouping that large hybrid models have."""

SHAPES = (PAPER, NARROW, WIDE)


def bytes_apart(shape: Shape, *, sessions: int, rows: int, pending: int) -> int:
    """Bytes that no two layers share: states, pending factors and the factors that the rows write."""
    keys, values = shape.heads * shape.key_width, shape.value_heads * shape.value_width
    factor = keys * MODEL_BYTES + (values + shape.value_heads) * FACTOR_BYTES
    return sessions * (shape.state_bytes + pending * factor) + rows * values * FACTOR_BYTES


def bytes_once(shape: Shape, *, sessions: int, rows: int, pending: int, state_written: bool = True) -> int:
    """The least bytes of one layer's pass: every input read once, every output written once.

    States read and (if `state_written`) written; pending factors k, u, g read; q, k, v, g, beta of the rows read; their
    u and their outputs written.

    Args:
        shape: the layer.
        sessions: sessions of the pass.
        rows: rows of all sessions together.
        pending: pending factors of one session.
        state_written: whether the pass stores the states.
    """
    keys, values = shape.heads * shape.key_width, shape.value_heads * shape.value_width
    states = sessions * shape.state_bytes * (2 if state_written else 1)
    factors = sessions * pending * (keys * MODEL_BYTES + (values + shape.value_heads) * FACTOR_BYTES)
    inputs = rows * ((2 * keys + values) * MODEL_BYTES + 2 * shape.value_heads * FACTOR_BYTES)
    return states + factors + inputs + rows * values * (FACTOR_BYTES + MODEL_BYTES)
