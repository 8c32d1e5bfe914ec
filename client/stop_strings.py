"""Finding stop strings in a text that arrives in pieces, and holding back no more than must be."""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """What a piece of text gave.

    Attributes:
        text: what may be shown now, a continuation of what was given before.
        stop: the stop string that ended the text, or None. Nothing of it is ever shown.
    """

    text: str
    stop: str | None


class StopMatcher:
    """Watches a text for several stop strings, in time linear in the text (Knuth, Morris, Pratt).

    The one that is complete first ends the text; of several complete at the same character, the longest:
    so the outcome does not depend on how the text is cut into tokens. Held back is the longest end of
    the text that some stop string begins with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings, in any order; none at all is allowed."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that end the text so far
        self._held = ""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look for."""
        return not self._stops

    def feed(self, piece: str) -> Match:
        """Take the next piece of the text. After a match, feed no more."""
        if not self._stops or not piece:
            return Match(piece, None)
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                self._held = ""
                return Match(text[: end - len(stop)], stop)
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return Match(text[:shown], None)

    def flush(self) -> str:
        """The end of the text: what was held back after all belongs to it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        found = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._matched[i]
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop) and found is None:
                found = stop  # sorted by length: the longest comes first
            self._matched[i] = length
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper end that is a beginning too."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
