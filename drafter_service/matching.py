"""The state that `lookup` and `suffix` share: an indexed text, guesses for its next token, what they were worth."""

from collections.abc import Callable, Sequence

from specla.drafter_service.continuations import Continuations, Guess
from specla.drafter_service.occurrences import Occurrence, OccurrenceIndex, advance
from specla.drafter_service.tree import DraftTree

STUDY = 64  # tokens at the end of the prompt from which the chances are learnt before the first draft
REVIEW = 16  # of those that came while no draft was wanted
LONG = 8  # tokens of a match that says more than how often its like has been seen


class MatchState:
    """One session of a drafter that guesses from places where the end of the text has stood before.

    Args:
        tokens: committed so far.
        index: empty; the state fills it.
        find: the places to guess from, for the text as it stands in `index`.
        continuations: makes guesses and trees of places.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        index: OccurrenceIndex,
        find: Callable[[], list[Occurrence]],
        continuations: Continuations,
    ) -> None:
        self._index = index
        self._find = find
        self._continuations = continuations
        self._places: list[Occurrence] | None = None
        self._guesses: list[Guess] | None = None
        self._learn(tokens, STUDY)

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens what the last draft was worth, and from the last few whether they had been guessed."""
        self._continuations.settle_draft(tokens)
        self._learn(tokens, REVIEW)

    def _learn(self, tokens: Sequence[int], studied: int) -> None:
        """Index tokens, and learn from each of the last `studied` whether it had been guessed."""
        unstudied = max(len(tokens) - studied, 0)
        if unstudied:
            self._places = self._guesses = None
            self._index.extend(tokens[:unstudied])
        for token in tokens[unstudied:]:
            self._continuations.settle(self._next_guesses(), token)
            places, self._places, self._guesses = self._places, None, None
            self._index.extend((token,))
            # Long matches that all went on as the text did are still the ones to follow: no need to look again.
            if places and all(p.length >= LONG and p.text[p.position] == token for p in places):
                self._places = advance(places)

    def draft(self, budget: int) -> DraftTree:
        """The likeliest continuations; empty where the end of the text has stood nowhere before."""
        return self._continuations.grow(self._next_guesses(), budget)

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """Does nothing."""

    def _next_guesses(self) -> list[Guess]:
        if self._guesses is None:
            self._places = self._places or self._find()
            self._guesses = self._continuations.guesses(self._places)
        return self._guesses
