"""The links that hang on a scheduler: woken when there is something to read, and what goes with one that is lost."""

from collections.abc import Callable, Sequence

from specla.rpc.errors import SpeclaError
from specla.v1.verifier_pb2 import DraftItem
from specla.verifier_service.drafting import DraftDesk
from specla.verifier_service.publish import CoordinatorEnd, DrafterEnd
from specla.verifier_service.roster import Roster


class LinkEnds:
    """The ends of all links of one verifier. The scheduler's thread alone touches it.

    Args:
        roster: the sessions.
        drafts: detaches drafters, and is told what their drafting took of the thread.
        clock: seconds.
    """

    def __init__(self, roster: Roster, drafts: DraftDesk, clock: Callable[[], float]) -> None:
        self._roster, self._drafts, self._clock = roster, drafts, clock
        self.coordinators: list[CoordinatorEnd] = []
        self.drafters: list[DrafterEnd] = []

    def flush_drafters(self) -> None:
        """Wake drafters that have something to read: the next pass may wait for what they make of it."""
        if not self.drafters:
            return
        for drafter in self.drafters:
            if drafter.finishing:
                self._drafts.lose(drafter)
                drafter.end(None)
            started = self._clock()
            if drafter.flush():
                self._drafts.charge(drafter, self._clock() - started, woken=True)
        self.drafters = [end for end in self.drafters if not (end.finishing and end.ended)]

    def take_drafts(self, end: DrafterEnd, items: Sequence[DraftItem]) -> None:
        """What a drafter has sent."""
        started = self._clock()
        self._drafts.handle_all(end, items)
        self._drafts.charge(end, self._clock() - started)

    def flush_coordinators(self) -> bool:
        """Wake coordinators that have something to read; whether there were any."""
        told = False
        for coordinator in self.coordinators:
            if coordinator.finishing and not coordinator.session_ids:
                coordinator.end(None)
            told |= coordinator.flush()
        self.coordinators = [end for end in self.coordinators if not (end.finishing and end.ended)]
        return told

    def lose_coordinator(self, end: CoordinatorEnd) -> None:
        """Cancel the sessions of a link whose other side is gone."""
        for session_id in list(end.session_ids):
            live = self._roster.get(session_id)
            if live is not None:
                self._roster.cancel(live)
        if end in self.coordinators:
            self.coordinators.remove(end)

    def lose_drafter(self, end: DrafterEnd) -> None:
        """Let the sessions of a link go whose other side is gone."""
        self._drafts.lose(end)
        if end in self.drafters:
            self.drafters.remove(end)

    def end_all(self, why: SpeclaError) -> None:
        """Nothing more will come; what is unread stays readable."""
        for drafter in self.drafters:
            drafter.end(why)
            drafter.flush()
        for coordinator in self.coordinators:
            coordinator.end(why)
            coordinator.flush()
