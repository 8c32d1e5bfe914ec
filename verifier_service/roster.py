"""The sessions that live in a verifier, and those that have just ended: the one place where slots are freed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from specla.rpc.errors import DeadlineError, SessionCancelledError, SpeclaError, UnknownSessionError
from specla.rpc.faults import fault_of, internal_error
from specla.rpc.status import to_status
from specla.v1 import common_pb2, verifier_pb2
from specla.verifier_service.acceptance import Finish, FinishReason
from specla.verifier_service.attachment import Attachment
from specla.verifier_service.engine import Engine
from specla.verifier_service.invitation import Invitation
from specla.verifier_service.passes import PassResult
from specla.verifier_service.publish import CoordinatorEnd, committed_event
from specla.verifier_service.session import Session

log = structlog.get_logger("specla.verifier")

_EXPIRE_EVERY_S = 5e-3
REMEMBERED_S = 60.0  # late items of a session that has ended get Closed for so long

_REASONS = {
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_ID: common_pb2.FINISH_REASON_STOP_ID,
}


@dataclass(eq=False, kw_only=True)
class LiveSession:
    """A session as the scheduler sees it.

    Attributes:
        session: the engine's part.
        owner: link of the coordinator that opened it.
        sampling: as the coordinator sent it; drafters are told.
        deadline: when the caller's time is over, None for never.
        opened_at: time of its opening.
        may_stop: whether its coordinator may find that the text has ended.
        has_begun: whether a pass has moved it.
        credit: length up to which it may commit tokens.
        moved_at: when it last committed tokens or was allowed to.
        prefill_s: time spent on its prefill so far.
        epoch: of the last attach token minted.
        attach_token: the one that counts, None if none does.
        invitation: the drafter that its coordinator asked a token for.
        attachment: the drafter, if one is attached.
        untold: what its owner has yet to hear: results of passes, and how many candidates each verified.
    """

    session: Session
    owner: CoordinatorEnd
    sampling: common_pb2.Sampling
    deadline: float | None
    opened_at: float
    may_stop: bool = False
    has_begun: bool = False
    credit: int = 0
    moved_at: float = 0.0
    prefill_s: float = 0.0
    epoch: int = 0
    attach_token: bytes | None = None
    invitation: Invitation | None = None
    attachment: Attachment | None = field(default=None)
    untold: list[tuple[PassResult, int]] = field(default_factory=list)

    def invite(self, invitation: Invitation | None) -> None:
        """Ask for another drafter than before, or for none: a token that was minted before counts no more."""
        if self.invitation is not None:
            self.invitation.drop()
        self.invitation, self.attach_token = invitation, None

    @property
    def session_id(self) -> bytes:
        """As the coordinator chose it."""
        return self.session.session_id

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.session.slot is not None

    @property
    def may_run(self) -> bool:
        """Whether it is prefilled and has credit for a token."""
        return self.session.ready and len(self.session.tokens) < self.credit

    def put(self, event: verifier_pb2.SessionEvent) -> None:
        """Tell the owner, behind all that it has yet to hear."""
        self.tell()
        self.owner.put(event)

    def tell(self) -> None:
        """Tell the owner what it has yet to hear."""
        untold, self.untold = self.untold, []
        if untold:
            self.owner.put(committed_event(self.session_id, untold))


class Roster:
    """Living sessions by id, and why recent ones ended. The scheduler's thread alone touches it.

    Args:
        engine: frees the slots.
        clock: seconds.
        idle_timeout_s: a session that stands still for so long is ended.

    Attributes:
        newcomers: sessions that were entered since somebody took them from here.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float], idle_timeout_s: float):
        self._engine = engine
        self._clock = clock
        self._idle_timeout_s = idle_timeout_s
        self.newcomers: list[LiveSession] = []
        self._live: dict[bytes, LiveSession] = {}
        self._ended: dict[bytes, tuple[verifier_pb2.ClosedReason, float]] = {}
        self._refused: dict[bytes, float] = {}
        self._looked_at = -math.inf

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def knows(self, session_id: bytes) -> bool:
        """Whether the id is taken: alive, or ended a short while ago."""
        return session_id in self._live or session_id in self._ended

    def get(self, session_id: bytes) -> LiveSession | None:
        """The living session of that id."""
        return self._live.get(session_id)

    def find(self, session_id: bytes) -> "LiveSession | verifier_pb2.ClosedReason":
        """The living session of that id, or why it ended.

        Raises:
            UnknownSessionError: it never lived here, or ended long ago.
        """
        live = self._live.get(session_id)
        if live is not None:
            return live
        if session_id in self._ended:
            return self._ended[session_id][0]
        if session_id in self._refused:
            return verifier_pb2.CLOSED_REASON_FAILED
        raise UnknownSessionError("no session of that id lives here", hint="Open it with Start on a Sessions stream")

    def add(self, live: LiveSession) -> None:
        """Enter a session that has just been opened."""
        self._live[live.session_id] = live
        self.newcomers.append(live)
        live.owner.session_ids.add(live.session_id)

    def refuse(self, session_id: bytes) -> None:
        """Remember that a session could not be opened: what was sent behind its Start needs no answer of its own."""
        self._refused.pop(session_id, None)  # an id that comes again is the newest
        self._refused[session_id] = self._clock() + REMEMBERED_S

    def finish(self, live: LiveSession, finish: Finish) -> None:
        """End a session whose text is complete."""
        event = verifier_pb2.SessionFinished(
            reason=_REASONS[finish.reason],
            matched_stop_id=finish.matched_stop_id or 0,
            committed_len=live.session.committed_len,
        )
        self._end_finished(live, event)

    def stop(self, live: LiveSession, at_len: int) -> None:
        """End a session because the coordinator found a stop string at this length."""
        reason = common_pb2.FINISH_REASON_STOP_STRING
        self._end_finished(live, verifier_pb2.SessionFinished(reason=reason, committed_len=at_len))

    def fail(self, live: LiveSession, error: SpeclaError) -> None:
        """End a session with an error."""
        failed = verifier_pb2.SessionEvent(session_id=live.session_id, failed=to_status(error))
        self._end(live, failed, verifier_pb2.CLOSED_REASON_FAILED)
        log.info("session failed", session=live.session_id.hex(), reason=error.reason)

    def cancel(self, live: LiveSession) -> None:
        """End a session because its coordinator wants that, or is gone."""
        error = SessionCancelledError("the session was cancelled")
        cancelled = verifier_pb2.SessionEvent(session_id=live.session_id, failed=to_status(error))
        self._end(live, cancelled, verifier_pb2.CLOSED_REASON_CANCELLED)

    def expire(self, *, at_once: bool = True) -> None:
        """End sessions whose deadline has passed or that stood still too long; forget those that ended long ago. Unless
        at once, all but deadlines is looked after every few milliseconds only."""
        now = self._clock()
        for live in list(self._live.values()):
            if live.deadline is not None and live.deadline <= now:
                self.fail(live, DeadlineError("the caller's deadline has passed", hint="Allow more time"))
        if not at_once and self._looked_at <= now < self._looked_at + _EXPIRE_EVERY_S:
            return
        self._looked_at = now
        for live in list(self._live.values()):
            if not live.may_run and live.session.ready and live.moved_at + self._idle_timeout_s <= now:
                self.fail(live, SessionCancelledError("the session stood still", hint="Grant credit, or stop it"))
        while self._ended and next(iter(self._ended.values()))[1] <= now:  # the oldest is the first
            del self._ended[next(iter(self._ended))]
        while self._refused and next(iter(self._refused.values())) <= now:
            del self._refused[next(iter(self._refused))]

    def next_expiry(self) -> float | None:
        """When `expire` has something to do at the earliest."""
        times = [live.deadline for live in self._live.values() if live.deadline is not None]
        times += [
            live.moved_at + self._idle_timeout_s
            for live in self._live.values()
            if live.session.ready and not live.may_run
        ]
        return min(times, default=None)

    def infos(self) -> list[verifier_pb2.SessionInfo]:
        """What ListSessions says."""
        now = self._clock()
        return [
            verifier_pb2.SessionInfo(
                session_id=live.session_id,
                prompt_len=live.session.prompt_len,
                committed_len=live.session.committed_len,
                drafter_attached=live.attachment is not None,
                age_s=now - live.opened_at,
            )
            for live in self
        ]

    def _end_finished(self, live: LiveSession, event: verifier_pb2.SessionFinished) -> None:
        finished = verifier_pb2.SessionEvent(session_id=live.session_id, finished=event)
        self._end(live, finished, verifier_pb2.CLOSED_REASON_FINISHED)

    def _end(self, live: LiveSession, event: verifier_pb2.SessionEvent, reason: verifier_pb2.ClosedReason) -> None:
        """Tell the owner what it has yet to hear, then this; that it failed, where nothing can be told of it."""
        fault = fault_of(live.tell)
        if fault is not None:
            event.failed.CopyFrom(to_status(internal_error("news of a session", fault)))
            reason = verifier_pb2.CLOSED_REASON_FAILED
        live.owner.put(event)
        self._close(live, reason)

    def _close(self, live: LiveSession, reason: verifier_pb2.ClosedReason) -> None:
        """Everything that must be undone when a session ends, once."""
        if self._live.pop(live.session_id, None) is None:
            return
        self._ended[live.session_id] = (reason, self._clock() + REMEMBERED_S)
        live.owner.session_ids.discard(live.session_id)
        live.invite(None)
        if live.attachment is not None:
            live.attachment.end.session_ids.discard(live.session_id)
            live.attachment.end.put(closed_item(live.session_id, reason))
            live.attachment.guard.end()
            live.attachment = None
        self._engine.release(live.session)


def closed_item(session_id: bytes, reason: verifier_pb2.ClosedReason, seq: int = 0) -> verifier_pb2.VerdictItem:
    """What a drafter is told when it has no more to do with a session."""
    return verifier_pb2.VerdictItem(session_id=session_id, seq=seq, closed=verifier_pb2.Closed(reason=reason))
