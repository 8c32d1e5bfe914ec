"""Where the n-grams of a growing text have stood before: the index beneath `lookup` and `suffix`."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCH = 32  # tokens; a longer match counts as this long


class Occurrence(NamedTuple):
    """A place whose left context equals the context asked for."""

    text: Sequence[int]
    position: int  # of the token that followed there
    length: int  # tokens of context that agree, up to MAX_MATCH


def advance(places: Sequence[Occurrence]) -> list[Occurrence]:
    """The places one token on, without those where the text ends."""
    return [
        Occurrence(text, position + 1, min(length + 1, MAX_MATCH))
        for text, position, length in places
        if position + 1 < len(text)
    ]


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
        self._orders = sorted(orders, reverse=True)
        self._heads: list[dict[int, int]] = [{} for _ in self._orders]
        self._before: list[list[int]] = [[] for _ in self._orders]
        self._begin = 0  # n-grams do not reach back across it

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Put tokens behind the text."""
        text, first = self.text, len(self.text)
        text.extend(tokens)
        last = len(text)
        for n, heads, before in zip(self._orders, self._heads, self._before, strict=True):
            begin = min(max(first, self._begin + n), last)  # the first place with n tokens of its document before it
            before.extend([-1] * (begin - first))
            grams = zip(*(text[begin - n + i : last - n + i] for i in range(n)), strict=True)
            for position, key in enumerate(map(hash, grams), start=begin):
                before.append(heads.get(key, -1))
                heads[key] = position

    def begin_document(self) -> None:
        """What is put behind the text from now on has no context in what stands there."""
        self._begin = len(self.text)

    def find(self, context: Sequence[int], *, limit: int, longest_only: bool) -> list[Occurrence]:
        """At most `limit` places that share an indexed n-gram with the end of `context`.

        Args:
            context: the tokens before the one wanted; may be this index's own text.
            limit: longer n-grams are served first, newer places before older ones.
            longest_only: stop at the longest order that occurs at all.
        """
        text, found = self.text, dict[int, int]()
        for n, heads, before in zip(self._orders, self._heads, self._before, strict=True):
            if n > len(context):
                continue
            tail = context[-n:]
            position = heads.get(hash(tuple(tail)), -1)
            while position >= 0 and len(found) < limit:
                if position not in found and text[position - n : position] == tail:
                    found[position] = self._match(context, position, n)
                position = before[position]
            if len(found) >= limit or (found and longest_only):
                break
        return [Occurrence(text, position, length) for position, length in found.items()]

    def _match(self, context: Sequence[int], position: int, known: int) -> int:
        """How many tokens before `position` equal the end of the context, of which `known` are known to."""
        text, end = self.text, len(context)
        most = min(MAX_MATCH, position, end)
        if text[position - most : position] == context[end - most :]:
            return most
        length = known
        while length < most and text[position - 1 - length] == context[end - 1 - length]:
            length += 1
        return length
