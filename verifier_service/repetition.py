"""Whether a text has begun to repeat itself: then a drafter that rests is worth another try at once.

Whatever drafts finds such a text easy, and to look for it takes a search of bytes, where a try takes whole passes.
"""

from array import array
from collections.abc import Sequence

LEAST = 12  # tokens that have stood there before, one after the other
MOST_DOUBLINGS = 8
LOOK_EVERY = 4  # tokens: to look costs more than a token's share of what is looked at
_LOOKED_BACK = 4096  # tokens
_BYTES = array("i").itemsize


class Repetition:
    """Watches the end of one growing text."""

    def __init__(self) -> None:
        self._text = bytearray()  # of its last tokens, as numbers of _BYTES each
        self._seen = 0
        self._is_told = False

    def begins(self, tokens: Sequence[int], failures: int) -> bool:
        """Whether the end of the text repeats what stood there before, unless it has been said of this repetition.

        Args:
            tokens: the whole text; it only grows.
            failures: earlier tries that brought nothing: each doubles what is long enough.
        """
        self._text += array("i", tokens[max(self._seen, len(tokens) - _LOOKED_BACK) :]).tobytes()
        self._seen = len(tokens)
        if len(self._text) > 2 * _LOOKED_BACK * _BYTES:
            del self._text[: -_LOOKED_BACK * _BYTES]
        if not self._repeats(LEAST):
            self._is_told = False
        elif not self._is_told:
            self._is_told = self._repeats(LEAST << min(failures, MOST_DOUBLINGS))
            return self._is_told
        return False

    def _repeats(self, count: int) -> bool:
        """Whether the last `count` tokens stood there before."""
        end = self._text[-count * _BYTES :]
        place = self._text.find(end, 0, -_BYTES) if len(self._text) > count * _BYTES else -1
        return place >= 0 and place % _BYTES == 0
