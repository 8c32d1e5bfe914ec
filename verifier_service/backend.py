"""What an engine asks of a device: slots, passes over rows, and which of a pass's rows became text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.sampling import RowLogprobs
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Walks
from specla.verifier_service.lineup import Lineup


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
    def tokens(self) -> NDArray[np.integer[Any]]:
        """[R], what the rows sampled, FAILED_TOKEN where a row's logits cannot be used; waits for it."""

    @property
    def walks(self) -> Walks:
        """The way down each session's tree; waits for the tokens."""

    def error(self, row: int) -> str:
        """What was wrong with the logits of a row that failed."""

    def logprobs(self, row: int) -> RowLogprobs:
        """Of the token that a row sampled, for a session that asks for them."""

    def logits(self, row: int) -> NDArray[np.float32]:
        """A row's own logits [vocab], before penalties and bans."""

    def hidden(self, layer: int, rows: Sequence[int]) -> Tensor:
        """The stream after a layer, float32 [n, hidden] on the CPU; layer -1 is the final norm's output."""

    def take(self, index: int, rows: Sequence[int]) -> None:
        """These rows of the index-th session's tree, a path from its root, are part of its text now."""

    def take_walks(self, cut: Mapping[int, int]) -> None:
        """`take` for every session of the pass: all rows of its walk, or the first few where `cut` says how many. With
        none a session stays as it was."""


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

    def run(self, lineup: Lineup, row_tokens: Sequence[int], lengths: Sequence[int]) -> PassRows:
        """Run all rows of a pass through the model, or start them. Stored texts stay as they are until `take`.

        Until then slots may be taken, cleared and given back, the batch's own ones too, and nothing else may be run.

        Args:
            lineup: who runs.
            row_tokens: [R], the rows' own tokens.
            lengths: [B], of the sessions' texts, their roots included; any if nobody samples.
        """

    def usual_chunks(self) -> list[int]:
        """Tokens of chunks of prompts that are worth preparing before anybody waits for them; maybe none."""

    def prepare_chunk(self, tokens: int) -> None:
        """Make what a chunk of so many tokens needs, before the first comes; nothing where it is made."""

    def goes_together(self, tokens: Sequence[int]) -> bool:
        """Whether chunks of so many tokens may run in one call, each with the bits that it has alone."""

    def run_chunks(self, chunks: Sequence[Chunk]) -> RunningChunks:
        """Append chunks to their slots' texts, in a form made for many tokens: one, or several that go together."""
