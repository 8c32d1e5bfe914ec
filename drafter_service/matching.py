"""The state that `lookup` and `suffix` share: an indexed text, guesses for its next token, what they were worth."""

from collections.abc import Callable, Sequence

from specla.drafter_service.continuations import Continuations
from specla.drafter_service.occurrences import Occurrence, OccurrenceIndex
from specla.drafter_service.tree import DraftTree

STUDY = 8  # tokens at the end of the prompt from which the chances are learnt before the first draft
REVIEW = 4  # of those that came while no draft was wanted


class MatchState:
    """One session of a drafter that guesses from places where the end of the text has stood before.

    Args:
        tokens: committed so far, at least one; read when the first draft is wanted.
        index: empty; the state fills it.
        find: the places to guess from where the text in `index` ended, or ends, at a position.
        continuations: makes guesses and trees of places.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        index: OccurrenceIndex,
        find: Callable[[int], list[Occurrence]],
        continuations: Continuations,
    ) -> None:
        self._index = index
        self._find = find
        self._continuations = continuations
        self._unread = list(tokens)  # until the first draft is wanted

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn what the last draft was worth, and from the last few tokens that it says nothing of."""
        if self._unread:
            self._unread += tokens
            return
        begin = len(self._index) + self._continuations.settle(tokens)
        self._index.extend(tokens)
        self._study(max(len(self._index) - REVIEW, begin))

    def draft(self, budget: int) -> DraftTree:
        """The likeliest continuations; empty where the end of the text has stood nowhere before."""
        if self._unread:
            self._index.extend(self._unread)
            self._study(max(len(self._unread) - STUDY, 0))
            self._unread = []
        return self._continuations.grow(self._find(len(self._index)), budget)

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """Does nothing."""

    @property
    def text(self) -> list[int]:
        """All that is known of the text."""
        return self._unread or self._index.text

    def _study(self, begin: int) -> None:
        """Learn from each token of the text from `begin` on whether it would have been guessed."""
        for position in range(begin, len(self._index)):
            self._continuations.look(self._find(position), 1)
            self._continuations.settle((self._index.text[position],))
