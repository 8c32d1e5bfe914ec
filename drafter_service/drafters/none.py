"""`none`: proposes nothing, so that plain decoding can take the same road as every drafter."""

from collections.abc import Sequence

from specla.drafter_service.tree import EMPTY, DraftTree
from specla.v1 import common_pb2


class NoneState:
    """Keeps nothing."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Does nothing."""

    def draft(self, budget: int) -> DraftTree:
        """The empty tree."""
        return EMPTY

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """Does nothing."""


class NoneDrafter:
    """Drafts nothing."""

    name = "none"

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> NoneState:
        """Begin a session."""
        return NoneState()
