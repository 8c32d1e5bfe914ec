"""The index of n-grams against a search of the whole text."""

import random

from hypothesis import given
from hypothesis import strategies as st

from specla.drafter_service.occurrences import MAX_MATCH, OccurrenceIndex

ORDERS = (1, 2, 3, 5)


def plain_matches(text: list[int], context: list[int]) -> dict[int, int]:
    """Every place with a next token, and how much of its left context agrees: the slow plain version."""
    found = {}
    for position in range(1, len(text)):
        length = 0
        while length < min(position, len(context), MAX_MATCH) and text[position - 1 - length] == context[-1 - length]:
            length += 1
        if length:
            found[position] = length
    return found


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 7), max_size=10))
def test_finds_every_place_with_its_length(text: list[int], cuts: list[int]) -> None:
    index = OccurrenceIndex(ORDERS)
    rest = list(text)
    for cut in cuts:
        index.extend(rest[:cut])
        del rest[:cut]
    index.extend(rest)
    assert index.text == text
    places = index.find(index.text, limit=1000, enough=MAX_MATCH)
    assert {place.position: place.length for place in places} == plain_matches(text, text)
    assert all(place.text is index.text for place in places)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_longest_alone_keeps_the_longest_order(text: list[int]) -> None:
    index = OccurrenceIndex(ORDERS)
    index.extend(text)
    every = plain_matches(text, text)
    longest = max(every.values(), default=0)
    order = max((n for n in ORDERS if n <= longest), default=0)
    places = index.find(index.text, limit=1000, enough=1)
    assert {p.position: p.length for p in places} == {p: n for p, n in every.items() if n >= order}


def test_newest_first_and_limited() -> None:
    index = OccurrenceIndex((2,))
    index.extend([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2])
    assert [p.position for p in index.find(index.text, limit=2, enough=1)] == [8, 5]


def test_a_context_of_another_text_and_documents_that_do_not_touch() -> None:
    index = OccurrenceIndex((2, 3))
    index.begin_document()
    index.extend([1, 2])
    index.begin_document()
    index.extend([3, 4, 5])
    assert index.find([1, 2], limit=8, enough=MAX_MATCH) == []  # 3 follows in another document
    assert [(p.position, p.length) for p in index.find([9, 3, 4], limit=8, enough=MAX_MATCH)] == [(4, 2)]


def test_long_matches_are_capped() -> None:
    half = [random.Random(0).randrange(1000) for _ in range(MAX_MATCH + 20)]
    index = OccurrenceIndex((2, 8))
    index.extend(half + half)
    assert index.find(index.text, limit=4, enough=1)[0].length == MAX_MATCH
