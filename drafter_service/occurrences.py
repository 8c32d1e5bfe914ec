"""Where the n-grams of a growing text have stood before: the index beneath `lookup` and `suffix`."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCH = 32  # tokens; a longer match counts as this long


class Occurrence(NamedTuple):
    """A place whose left context equals the context asked for."""

    text: list[int]
    position: int  # of the token that followed there
    length: int  # tokens of context that agree, up to MAX_MATCH

    def continuation(self, reach: int) -> tuple[int, ...]:
        """The next `reach` tokens; where the text ends, as if what stands from here to there repeated itself."""
        tokens = self.text[self.position : self.position + reach]
        if len(tokens) < reach:
            tokens = (tokens * -(-reach // len(tokens)))[:reach]
        return tuple(tokens)


class OccurrenceIndex:
    """A text with, for each order n, a chain of the places behind equal n-grams, newest first.

    A token costs one dictionary and one list entry an order, whatever the text's length. Only places that
    have a next token are indexed, so the end of the text never finds itself. N-grams are looked up by their
    hash; whatever is found is compared with the context, so equal hashes of different n-grams do no harm.

    Args:
        orders: lengths of the n-grams, each >= 1.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        self.text: list[int] = []
        # For each order the newest place behind every n-gram, and for each place the one before it, -1 for none.
        self._chains: list[tuple[int, dict[int, int], list[int]]] = [(n, {}, []) for n in sorted(orders, reverse=True)]
        self._begin = 0  # n-grams do not reach back across it

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Put tokens behind the text."""
        text, first = self.text, len(self.text)
        text.extend(tokens)
        last = len(text)
        for n, heads, before in self._chains:
            begin = min(max(first, self._begin + n), last)  # the first place with n tokens of its document before it
            before.extend([-1] * (begin - first))
            for position in range(begin, last):
                key = hash(tuple(text[position - n : position]))
                before.append(heads.get(key, -1))
                heads[key] = position

    def begin_document(self) -> None:
        """What is put behind the text from now on has no context in what stands there."""
        self._begin = len(self.text)

    def find(self, context: Sequence[int], *, limit: int, enough: int) -> list[Occurrence]:
        """At most `limit` places that share an indexed n-gram with the end of `context`.

        Args:
            context: the tokens before the one wanted; may be this index's own text.
            limit: longer n-grams are served first, newer places before older ones.
            enough: no shorter n-grams are looked up once one of at least so many tokens occurs; 1: the longest only.
        """
        end = len(context)
        newest = [heads.get(hash(tuple(context[end - n :])), -1) if n <= end else -1 for n, heads, _ in self._chains]
        return self._follow(newest, context, end, limit, enough)

    def find_own(self, end: int, *, limit: int, enough: int) -> list[Occurrence]:
        """The same for this index's own text as it stood when it ended at `end`."""
        if end == len(self.text):
            return self.find(self.text, limit=limit, enough=enough)
        newest = [before[end] for _, _, before in self._chains]
        return self._follow(newest, self.text, end, limit, enough)

    def _follow(
        self, newest: Sequence[int], context: Sequence[int], end: int, limit: int, enough: int
    ) -> list[Occurrence]:
        """The places on the chains that begin at `newest`, compared with `context[:end]`."""
        found = dict[int, Occurrence]()
        for (n, _, before), position in zip(self._chains, newest, strict=True):
            while position >= 0:
                if position not in found:
                    length = self._match(context, end, position)
                    if length >= n:  # otherwise another n-gram has the same hash
                        found[position] = Occurrence(self.text, position, length)
                        if len(found) == limit:
                            return list(found.values())
                position = before[position]
            if found and n >= enough:
                break
        return list(found.values())

    def _match(self, context: Sequence[int], end: int, position: int) -> int:
        """How many tokens before `position` equal those before `end` of the context, up to MAX_MATCH."""
        text, most = self.text, min(MAX_MATCH, position, end)
        if text[position - most : position] == context[end - most : end]:
            return most
        length = 0
        while text[position - 1 - length] == context[end - 1 - length]:
            length += 1
        return length
