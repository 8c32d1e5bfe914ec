"""When a text counts as repeating itself."""

import random

from specla.verifier_service.repetition import LEAST, MOST_DOUBLINGS, Repetition


def told_at(text: list[int], failures: int = 0, prompt: int = 1) -> list[int]:
    """The lengths at which a text that grows token by token is said to have begun to repeat itself."""
    watch = Repetition()
    watch.begins(text[:prompt], failures)
    return [length for length in range(prompt + 1, len(text) + 1) if watch.begins(text[:length], failures)]


def test_a_text_without_repetition_is_never_said_to_repeat() -> None:
    assert told_at(list(range(500))) == []
    drawn = random.Random(3)
    assert told_at([drawn.randrange(50) for _ in range(2000)]) == []


def test_it_is_said_once_when_enough_tokens_have_come_again() -> None:
    assert told_at([*range(30)] * 3) == [30 + LEAST]
    assert told_at([7] * 100) == [1 + LEAST]


def test_a_repetition_that_broke_off_may_begin_again() -> None:
    first, second = [*range(30)], [*range(100, 130)]
    assert told_at([*first * 2, *second * 2]) == [30 + LEAST, 90 + LEAST]


def test_failures_double_what_is_long_enough() -> None:
    text = [*range(40)] * 3
    assert told_at(text, failures=1) == [40 + 2 * LEAST]
    assert told_at(text, failures=5) == []
    assert told_at([7] * 4000, failures=100) == [1 + (LEAST << MOST_DOUBLINGS)]


def test_a_try_in_vain_is_not_followed_by_another_in_the_same_repetition() -> None:
    watch, told = Repetition(), list[int]()
    text = [*[7] * 100, *range(50), *[8] * 100]
    for length in range(1, len(text)):
        if watch.begins(text[:length], len(told)):
            told.append(length)
    assert told == [1 + LEAST, 151 + 2 * LEAST]


def test_several_tokens_may_come_at_once_and_the_prompt_counts() -> None:
    text = [*range(30)] * 2
    watch = Repetition()
    assert not watch.begins(text[:32], 0)
    assert watch.begins(text, 0)
    assert not watch.begins(text, 0)


def test_a_long_prompt_is_looked_at_from_near_its_end() -> None:
    watch = Repetition()
    assert not watch.begins([*range(100_000)], 0)
    assert len(watch._text) <= 4 * 4096
    assert told_at([*range(5000), *range(4900, 4950)], prompt=5000) == [5000 + LEAST]


def test_what_came_while_nobody_asked_is_looked_at_from_near_its_end() -> None:
    """As long as the drafter was asked: the thread would stand still over it."""
    watch, text = Repetition(), [*range(100_000)]
    assert not watch.begins(text[:1000], 0)
    assert not watch.begins(text, 0)
    assert len(watch._text) <= 2 * 4 * 4096
    assert watch.begins(text + text[-100:], 0), "and it goes on from there"


def test_what_is_remembered_of_a_long_text_is_bounded() -> None:
    watch, text = Repetition(), [*range(60_000)]
    most = 0
    for length in range(500, 60_001, 500):
        assert not watch.begins(text[:length], 0)
        most = max(most, len(watch._text))
    assert most <= 2 * 4 * 4096 + 4 * 500
    assert watch.begins(text + text[-100:], 0)


def test_numbers_that_only_look_alike_as_bytes_are_no_repetition() -> None:
    """The same bytes, begun in the middle of a number."""
    shifted = [(1 << 8) | 2] * 40
    assert told_at([*shifted[:1], *range(1000, 1030), *[(2 << 16) | (1 << 8)] * 11]) == []
