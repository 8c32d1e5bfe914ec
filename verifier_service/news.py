"""What coordinators have yet to hear of passes, and when they are told.

Where a device runs passes by itself they are told while the next one runs, of short passes several at a time.
"""

import math
from collections.abc import Callable

from specla.rpc.faults import fault_of, internal_error
from specla.verifier_service.roster import LiveSession, Roster

TELL_EVERY_S = 4e-3
"""Coordinators hear of passes no more often, while passes run. To be told takes an event loop 0.1 to 0.2 ms, in one
process at the expense of the scheduler's thread: as long as a whole short pass."""
TELL_EACH_S = 1e-3
"""Longer for each further session of a pass: of many sessions telling would otherwise take most of the time. But not
where a coordinator looks for the end of the text, for what is decoded behind it is decoded in vain."""
TELL_WITHIN_S = 20e-3
"""No longer than this (or TELL_EVERY_S): texts are read as they come."""
_SHORT_CREDIT = 64  # tokens: a session that has no more is told, and so may be granted more, as if it were alone


class News:
    """What has not been told yet. The scheduler's thread alone touches it.

    Args:
        roster: fails a session that nothing can be told of.
        clock: seconds.
    """

    def __init__(self, roster: Roster, clock: Callable[[], float]) -> None:
        self._roster = roster
        self._clock = clock
        self._begun: list[LiveSession] = []
        self._may_stop: list[LiveSession] = []
        self._others: list[LiveSession] = []
        self._told_at = -math.inf
        self._told_others_at = -math.inf
        self._every_s = TELL_EVERY_S
        self._is_short = False  # the credit of somebody who waits for news

    def add(self, live: LiveSession) -> None:
        """A pass has moved the session."""
        if not live.has_begun:
            live.has_begun = True
            self._begun.append(live)
        elif live.may_stop:
            self._may_stop.append(live)
        else:
            self._others.append(live)

    def pass_ended(self, sessions: int, least_credit: float) -> None:
        """So many sessions took part in the pass before; the one that may go on the least by so many tokens."""
        self._is_short |= least_credit <= _SHORT_CREDIT
        self._every_s = TELL_EVERY_S
        if not self._is_short:
            self._every_s = min(TELL_EVERY_S + TELL_EACH_S * (sessions - 1), max(TELL_WITHIN_S, TELL_EVERY_S))

    def tell(self, *, at_once: bool) -> None:
        """Tell what is due: a text's first tokens always. A session of which nothing can be told fails alone."""
        now = self._clock()
        moved, self._begun = self._begun, []
        if moved and not self._others:  # who begins alone is not told again at once
            self._told_others_at = now
        if moved and not self._may_stop:
            self._told_at = now
        if self._others and (at_once or now >= self._told_others_at + self._every_s):
            moved += self._others
            self._others, self._told_others_at, self._is_short = [], now, False
        if self._may_stop and (moved or at_once or now >= self._told_at + TELL_EVERY_S):
            moved += self._may_stop
            self._may_stop, self._told_at = [], now
        for live in dict.fromkeys(moved):
            fault = fault_of(live.tell)
            if fault is not None and live.lives:
                self._roster.fail(live, internal_error("news of a session", fault))
