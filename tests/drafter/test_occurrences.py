"""The index of n-grams against a search of the whole text."""

import random

from hypothesis import given
from hypothesis import strategies as st

from specla.drafter_service.occurrences import MAX_MATCH, Occurrence, OccurrenceIndex

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


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40), st.sampled_from([1, 3, MAX_MATCH]))
def test_finds_what_an_earlier_end_of_the_text_would_have_found(text: list[int], end: int, enough: int) -> None:
    end = min(end, len(text))
    index, earlier = OccurrenceIndex(ORDERS), OccurrenceIndex(ORDERS)
    index.extend(text)
    earlier.extend(text[:end])
    then = earlier.find(earlier.text, limit=4, enough=enough)
    now = index.find_own(end, limit=4, enough=enough)
    assert [(p.position, p.length) for p in now] == [(p.position, p.length) for p in then]


def test_a_long_context_is_enough() -> None:
    index = OccurrenceIndex((1, 3))
    index.extend([1, 2, 3, 7, 3, 8, 1, 2, 3])
    assert [p.position for p in index.find(index.text, limit=9, enough=3)] == [3]
    assert [p.position for p in index.find(index.text, limit=9, enough=4)] == [3, 5]


def test_a_place_goes_on_to_the_texts_end_and_then_repeats_itself() -> None:
    text = [9, 1, 2, 3]
    assert Occurrence(text, 1, 1).continuation(2) == (1, 2)
    assert Occurrence(text, 1, 1).continuation(8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert Occurrence(text, 3, 1).continuation(3) == (3, 3, 3)


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
