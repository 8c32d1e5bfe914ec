"""When coordinators are told of passes while passes run."""

from typing import cast

import pytest
from verifier_harness import HandClock

from specla.verifier_service.news import TELL_EACH_S, TELL_EVERY_S, TELL_WITHIN_S, News
from specla.verifier_service.roster import LiveSession, Roster

CREDIT = 1000


class Told:
    """A session that counts how often it is told."""

    lives = True

    def __init__(self, *, may_stop: bool = False) -> None:
        self.may_stop, self.has_begun = may_stop, False
        self.times = 0

    def tell(self) -> None:
        self.times += 1


class FaultyTold(Told):
    def tell(self) -> None:
        raise ValueError


class Failing:
    """A roster that remembers what failed."""

    def __init__(self) -> None:
        self.failed: list[object] = []

    def fail(self, live: object, error: object) -> None:
        self.failed.append(live)


def news_of(clock: HandClock, *lives: Told, sessions: int = 1, credit: float = CREDIT) -> tuple[News, Failing]:
    """News that have been told of a first pass long ago, of a second one now, and of a third one not yet."""
    roster = Failing()
    found = News(cast(Roster, roster), clock)
    for told in (True, True, False):
        clock.now += 1.0 if told else 0.0
        for live in lives:
            found.add(cast(LiveSession, live))
        found.pass_ended(sessions, credit)
        if told:
            found.tell(at_once=False)
    for live in lives:
        live.times -= 2
    return found, roster


@pytest.mark.parametrize(
    ("sessions", "credit", "after_s"),
    [
        (1, CREDIT, TELL_EVERY_S),
        (4, CREDIT, TELL_EVERY_S + 3 * TELL_EACH_S),
        (200, CREDIT, TELL_WITHIN_S),
        (200, 64, TELL_EVERY_S),
        (200, 65, TELL_WITHIN_S),
    ],
)
def test_many_sessions_are_told_less_often_unless_one_may_have_to_stop(
    sessions: int, credit: float, after_s: float
) -> None:
    clock, live = HandClock(), Told()
    news, _ = news_of(clock, live, sessions=sessions, credit=credit)
    clock.now += after_s * 0.999
    news.tell(at_once=False)
    assert live.times == 0
    clock.now += after_s * 0.002
    news.tell(at_once=False)
    assert live.times == 1
    news.tell(at_once=True)
    assert live.times == 1, "there is no more"


def test_somebodys_credit_runs_short_until_he_is_told() -> None:
    """Once it is used up he takes part in no pass any more."""
    clock, stuck, other = HandClock(), Told(), Told()
    news, _ = news_of(clock, stuck, other, sessions=200, credit=0)
    news.add(cast(LiveSession, other))
    news.pass_ended(199, CREDIT)
    clock.now += TELL_EVERY_S * 1.001
    news.tell(at_once=False)
    assert stuck.times == 1
    news.add(cast(LiveSession, other))
    news.pass_ended(199, CREDIT)
    clock.now += TELL_EVERY_S * 1.001
    news.tell(at_once=False)
    assert other.times == 1


def test_who_looks_for_the_end_of_a_text_is_told_as_if_it_were_alone() -> None:
    clock, watched, other = HandClock(), Told(may_stop=True), Told()
    news, _ = news_of(clock, watched, other, sessions=200)
    assert (watched.times, other.times) == (0, 0)
    clock.now += TELL_EVERY_S * 1.001
    news.tell(at_once=False)
    assert (watched.times, other.times) == (1, 0)
    clock.now += TELL_WITHIN_S
    news.tell(at_once=False)
    assert (watched.times, other.times) == (1, 1)


def test_the_first_tokens_of_a_text_wait_for_nothing() -> None:
    old, new = Told(), Told()
    news, _ = news_of(HandClock(), old, sessions=200)
    news.add(cast(LiveSession, new))
    news.tell(at_once=False)
    assert (old.times, new.times) == (0, 1)
    news.add(cast(LiveSession, new))
    news.tell(at_once=False)
    assert (old.times, new.times) == (0, 1)


@pytest.mark.parametrize("may_stop", [True, False])
def test_who_begins_alone_is_not_told_again_before_it_is_due(may_stop: bool) -> None:
    clock, live = HandClock(), Told(may_stop=may_stop)
    news = News(cast(Roster, Failing()), clock)
    for _ in range(3):
        news.add(cast(LiveSession, live))
        news.pass_ended(1, CREDIT)
        news.tell(at_once=False)
    assert live.times == 1
    clock.now += TELL_EVERY_S * 1.001
    news.tell(at_once=False)
    assert live.times == 2


def test_who_looks_for_the_end_of_a_text_is_told_with_all_others() -> None:
    """One wake for all: whoever looks for the end of a text is told with the others, before it is due."""
    clock, watched, other = HandClock(), Told(may_stop=True), Told()
    news, _ = news_of(clock, watched, other, sessions=2)
    clock.now += TELL_EVERY_S * 1.001
    news.tell(at_once=False)
    news.add(cast(LiveSession, watched))
    clock.now += TELL_EACH_S
    news.tell(at_once=False)
    assert (watched.times, other.times) == (2, 1)


def test_what_is_told_at_once_waits_for_nothing_and_is_told_once() -> None:
    live, other = Told(), Told()
    news, _ = news_of(HandClock(), live, other)
    news.add(cast(LiveSession, live))
    news.tell(at_once=True)
    assert (live.times, other.times) == (1, 1)


def test_a_session_that_cannot_be_told_fails_alone() -> None:
    live, faulty = Told(), FaultyTold()
    news, roster = news_of(HandClock(), live, faulty)
    news.tell(at_once=True)
    assert live.times == 1
    assert roster.failed == [faulty] * 3
