"""Whether a text has begun to repeat itself: then a drafter that rests is worth another try at once.

Whatever drafts finds such a text easy, and to look for it costs a dictionary's entry a token, where a try costs whole
passes.
"""

from collections.abc import Sequence

CONTEXT = 4  # tokens that must be the same for what followed them to be expected again
STREAK = 8  # tokens in a row that were expected
MOST_DOUBLINGS = 8
_LOOKED_BACK = 512  # tokens of what is there already, or came while nobody asked
_REMEMBERED = 1 << 14  # contexts, of some 130 bytes each; then all are forgotten


class Repetition:
    """Watches one growing text."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self._streak = 0
        self._is_told = False

    def begins(self, tokens: Sequence[int], failures: int) -> bool:
        """Whether a repetition has become long enough since the last call, for the first time.

        Args:
            tokens: the whole text; it only grows.
            failures: earlier tries that brought nothing: each doubles what is long enough.
        """
        begin = max(CONTEXT, len(tokens) - _LOOKED_BACK)
        if begin > self._seen:
            self._seen, self._streak, self._is_told = begin, 0, False
        if len(self._after) > _REMEMBERED:
            self._after = {}
        after = self._after
        for place in range(self._seen, len(tokens)):
            context, token = tuple(tokens[place - CONTEXT : place]), tokens[place]
            if after.get(context) == token:
                self._streak += 1
            else:
                self._streak, self._is_told, after[context] = 0, False, token
        self._seen = max(self._seen, len(tokens))
        begins = not self._is_told and self._streak >= STREAK << min(failures, MOST_DOUBLINGS)
        self._is_told |= begins
        return begins
