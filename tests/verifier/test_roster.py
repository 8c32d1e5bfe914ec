"""For how long a verifier remembers sessions that have ended, or were refused."""

from typing import Any, cast

import pytest
from verifier_harness import HandClock

from specla.rpc.errors import UnknownSessionError
from specla.v1 import verifier_pb2
from specla.verifier_service.roster import REMEMBERED_S, Roster


def test_refused_sessions_are_forgotten_in_the_order_in_which_they_were_last_refused() -> None:
    clock = HandClock()
    roster, first, second = Roster(cast(Any, None), clock, 60.0), b"a" * 16, b"b" * 16
    begin = clock.now
    for at, session in ((0.0, first), (0.5, second), (0.6, first)):
        clock.now = begin + at * REMEMBERED_S
        roster.refuse(session)
    for at, known in ((1.4, {first, second}), (1.55, {first}), (1.7, set[bytes]())):
        clock.now = begin + at * REMEMBERED_S
        roster.expire()
        for session in (first, second):
            if session in known:
                assert roster.find(session) == verifier_pb2.CLOSED_REASON_FAILED
            else:
                with pytest.raises(UnknownSessionError):
                    roster.find(session)


def test_what_has_ended_long_ago_costs_nothing() -> None:
    """A pass looks at the oldest that is remembered, not at all of them."""

    class Counted(dict[bytes, float]):
        looked_at = 0

        def values(self) -> Any:
            for value in super().values():
                Counted.looked_at += 1
                yield value

    clock = HandClock()
    roster = Roster(cast(Any, None), clock, 60.0)
    roster._refused = Counted()
    for number in range(1000):
        roster.refuse(number.to_bytes(16, "big"))
    roster.expire()
    assert Counted.looked_at == 1
    assert len(roster._refused) == 1000
    clock.now += REMEMBERED_S
    roster.expire()
    assert not roster._refused
