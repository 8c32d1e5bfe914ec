import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.client.stop_strings import StopMatcher

# Two letters make overlaps and self-repeating stop strings common.
TEXTS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None, int | None]:
    """The shown pieces, the stop string, and the index of the piece that completed it."""
    matcher = StopMatcher(stops)
    shown = []
    for i, piece in enumerate(pieces):
        match = matcher.feed(piece)
        shown.append(match.text)
        if match.stop is not None:
            return shown, match.stop, i
    return [*shown, matcher.flush()], None, None


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The plain version: the end of the first complete stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(st.lists(st.text(alphabet="ab", max_size=5), max_size=12), STOPS)
def test_the_same_end_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, stop, piece = run(pieces, stops)
    expected = first_stop(text, stops)
    if expected is None:
        assert ("".join(shown), stop) == (text, None)
        return
    end, want = expected
    assert ("".join(shown), stop) == (text[: end - len(want)], want)
    assert piece is not None
    assert len("".join(pieces[:piece])) < end <= len("".join(pieces[: piece + 1]))


@given(TEXTS, STOPS)
def test_held_back_is_exactly_what_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        match = matcher.feed(character)
        if match.stop is not None:
            return
        shown += match.text
        beginnings = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert end - len(shown) == max(beginnings, default=0)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["Hello\n", "\nQ", ": next"], ["\n\nQ:"], "Hello", "\n\nQ:"),
        (["one two"], ["two", "one two"], "", "one two"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
        (["nothing here"], [], "nothing here", None),
        (["half a st"], ["stop"], "half a st", None),
        (["aab", "aaab"], ["aaab"], "aab", "aaab"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, stop: str | None) -> None:
    shown, found, _ = run(pieces, stops)
    assert ("".join(shown), found) == (text, stop)


def test_nothing_is_delayed_without_need() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.feed("a line\n").text == "a line"
    assert matcher.feed("another").text == "\nanother"
