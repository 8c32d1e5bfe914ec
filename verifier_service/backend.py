"""What an engine asks of a device: slots, passes over rows, and which of a pass's rows became text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.sampling import RowSampling, Sampled
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch


class PassRows(Protocol):
    """What one pass gave, by rows of its batch; valid until the backend's next pass."""

    @property
    def sampled(self) -> Sampled:
        """The tokens that the rows sampled; waits for them."""

    def logits(self, row: int) -> NDArray[np.float32]:
        """A row's own logits [vocab], before penalties and bans."""

    def hidden(self, layer: int, rows: Sequence[int]) -> Tensor:
        """The stream after a layer, float32 [n, hidden] on the CPU; layer -1 is the final norm's output."""

    def take(self, index: int, rows: Sequence[int]) -> None:
        """These rows of the index-th session's tree, a path from its root, are part of its text now."""


class Backend(Protocol):
    """A target on one device, and the sessions' memory there. One thread at a time.

    Attributes:
        scratch_slot: a slot that no caller ever gets.
        chain_rows: up to so many known tokens run as one chain of accepted rows.
        overlaps: whether `run` returns while the rows still run, so that the host can do other things meanwhile.
    """

    scratch_slot: int
    chain_rows: int
    overlaps: bool

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""

    def acquire(self) -> int:
        """Take a slot; its state is that of an empty text.

        Raises:
            CapacityError: no slot is free.
        """

    def clear(self, slot: int) -> None:
        """Set a slot to an empty text."""

    def release(self, slot: int) -> None:
        """Give a slot back."""

    def usual_batches(self) -> list[list[Topology]]:
        """Trees, one a session, of passes that are worth preparing before anybody waits for them; maybe none."""

    def prepare(self, topologies: Sequence[Topology]) -> None:
        """Make what passes of such trees need, one a session, before the first comes; nothing where it is made."""

    def run(
        self,
        slots: Sequence[int],
        batch: TreeBatch,
        row_tokens: Sequence[int],
        sampling: RowSampling | None,
        layers: Sequence[int] = (),
    ) -> PassRows:
        """Run all rows of a batch through the model, or start them. Stored texts stay as they are until `take`.

        Until then slots may be taken, cleared and given back, the batch's own ones too, and nothing else may be run.

        Args:
            slots: [B], all different.
            batch: which row follows which.
            row_tokens: [R].
            sampling: how the rows sample; None if nobody wants their tokens or logits.
            layers: whose streams `hidden` will be asked for.
        """

    def run_chunk(self, slot: int, tokens: Sequence[int], layers: Sequence[int]) -> list[Tensor] | None:
        """Append consecutive tokens of a prompt to a slot's text, in a form made for many.

        Returns:
            The streams of these layers, float32 [T, hidden] each; or None, with nothing done, where there is no such
            form: then the tokens run as chains.
        """
