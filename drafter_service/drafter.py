"""What a drafter is: it starts a state for a session, is told the committed tokens, and yields trees."""

from collections.abc import Sequence
from typing import Protocol

from specla.drafter_service.tree import DraftTree
from specla.v1 import common_pb2


class DraftState(Protocol):
    """One session's share of a drafter."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The session has committed these tokens behind those it had; drafters learn from them, too."""

    def draft(self, budget: int) -> DraftTree:
        """Candidates for what follows the last committed token, at most `budget` (>= 1); may be empty.

        Asking twice gives the same tree.
        """

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """The session has ended, with these tokens behind those it had; the state is not used again."""


class Drafter(Protocol):
    """One of the ways to guess. Not thread-safe: its owner calls it, and its states, from one thread at a time."""

    name: str

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> DraftState:
        """Begin a session that has committed `tokens` (prompt, and output if it is under way; never empty)."""
