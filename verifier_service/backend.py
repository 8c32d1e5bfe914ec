"""What an engine asks of a device: slots, passes over rows, and which of a pass's rows became text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.sampling import RowSampling, Sampled
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch


class Chunk(NamedTuple):
    """Consecutive tokens of one prompt, to be appended to a slot's text."""

    slot: int
    tokens: Sequence[int]
    layers: Sequence[int]
    """Whose streams are wanted; -1 is the final norm's output."""


class RunningChunks(Protocol):
    """Chunks that may still be running."""

    def wait(self) -> list[list[Tensor]]:
        """Until they have run: of each chunk its layers' streams, float32 [T, hidden] each on the CPU."""


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

    def take_all(self, paths: Sequence[Sequence[int]]) -> None:
        """`take` for every session of the pass, in their order; an empty path leaves a session as it was."""


class Backend(Protocol):
    """A target on one device, and the sessions' memory there. One thread at a time.

    Attributes:
        chain_rows: up to so many known tokens run as one chain of accepted rows.
        overlaps: whether `run` returns while the rows still run, so that the host can do other things meanwhile.
    """

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

    def usual_chunks(self) -> list[int]:
        """Tokens of chunks of prompts that are worth preparing before anybody waits for them; maybe none."""

    def prepare_chunk(self, tokens: int) -> None:
        """Make what a chunk of so many tokens needs, before the first comes; nothing where it is made."""

    def goes_together(self, tokens: Sequence[int]) -> bool:
        """Whether chunks of so many tokens may run in one call, each with the bits that it has alone."""

    def run_chunks(self, chunks: Sequence[Chunk]) -> RunningChunks:
        """Append chunks to their slots' texts, in a form made for many tokens: one, or several that go together."""
