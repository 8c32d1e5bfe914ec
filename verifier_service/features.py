"""The target's hidden states at a session's last positions, kept for the drafters that want them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specla.rpc.errors import InvalidRequestError

FINAL_NORM = -1
"""The layer number that stands for the final norm's output."""


@dataclass(frozen=True)
class FeatureWindow:
    """Which hidden states a session keeps.

    Attributes:
        layers: outputs of these layers, 0-based; -1 is the output of the final norm.
        window: how many of the last positions.
    """

    layers: tuple[int, ...]
    window: int

    def validate(self, num_layers: int) -> None:
        """Refuse layers that the target does not have.

        Raises:
            InvalidRequestError: a layer out of range or twice, or a negative window.
        """
        for layer in self.layers:
            if not FINAL_NORM <= layer < num_layers:
                raise InvalidRequestError(
                    "keep.layers", f"layer {layer} does not exist", hint=f"Give -1 to {num_layers - 1}"
                )
        if len(set(self.layers)) != len(self.layers):
            raise InvalidRequestError("keep.layers", "a layer is given twice", hint="Give each layer once")
        if self.window < 0:
            raise InvalidRequestError("keep.window", f"window is {self.window}", hint="Give 0 or more positions")


class FeatureSlice(NamedTuple):
    """Hidden states of consecutive positions: float32 [positions, layers, hidden], the first at `from_position`."""

    from_position: int
    values: Tensor


class FeatureRing:
    """The last `window` positions' hidden states of one session, overwritten in turn.

    It grows with the positions recorded: a wide window costs a short text nothing.
    """

    def __init__(self, spec: FeatureWindow, hidden_size: int) -> None:
        self.spec = spec
        self.end = 0  # positions below it have been recorded, or passed over
        self._begin = 0  # positions below it were passed over
        self._values = torch.zeros(0, len(spec.layers), hidden_size)

    @property
    def nbytes(self) -> int:
        """Bytes the ring takes now."""
        return self._values.nbytes

    def record(self, hidden: Sequence[Tensor]) -> None:
        """Append consecutive positions' states.

        Args:
            hidden: one float32 [positions, hidden] a layer of the spec, in its order.
        """
        count, window = hidden[0].shape[0], self.spec.window
        self._grow(min(self.end + count, window))
        kept = min(count, window)
        start = self.end + count - kept
        first = start % window
        head = min(kept, window - first)
        for i, states in enumerate(hidden):
            states = states[count - kept :]
            self._values[first : first + head, i] = states[:head]
            self._values[: kept - head, i] = states[head:]
        self.end += count

    def skip(self, positions: int) -> None:
        """Pass over consecutive positions, which nobody will ask for, and forget those before them."""
        self.end += positions
        self._begin = self.end

    def read(self, from_position: int, to_position: int) -> FeatureSlice:
        """What is kept of the positions in [from_position, to_position), a copy; possibly less, possibly nothing."""
        window = self.spec.window
        start = max(from_position, self.end - window, self._begin)
        stop = max(start, min(to_position, self.end))
        index = torch.arange(start, stop) % max(window, 1)
        return FeatureSlice(start, self._values.index_select(0, index))

    def _grow(self, positions: int) -> None:
        """Make room for so many, at most the window. Until the window is full each lies at its own position."""
        room = self._values.shape[0]
        if positions > room:
            grown = self._values.new_zeros(min(self.spec.window, max(positions, 2 * room)), *self._values.shape[1:])
            grown[:room] = self._values
            self._values = grown
