"""What a coordinator asks for, done: sessions opened, credited, stopped, cancelled; attach tokens minted."""

from collections.abc import Callable, Sequence

from specla.rpc.errors import InvalidRequestError, ServiceUnavailableError, SpeclaError
from specla.rpc.faults import internal_error
from specla.rpc.status import to_status
from specla.v1 import verifier_pb2
from specla.v1.verifier_pb2 import SessionCommand, SessionEvent
from specla.verifier_service.drafting import DraftDesk
from specla.verifier_service.engine import Engine
from specla.verifier_service.intake import Limits, check_session_id, check_start
from specla.verifier_service.issuer import Issuer
from specla.verifier_service.publish import CoordinatorEnd, too_many_items
from specla.verifier_service.roster import LiveSession, Roster


class CommandDesk:
    """Runs the commands of all coordinators, one by one; a faulty one is answered and changes nothing.

    Args:
        engine: opens sessions.
        roster: where they are entered.
        drafts: detaches drafters.
        issuer: mints attach tokens.
        limits: what is accepted.
        clock: seconds.
    """

    def __init__(
        self,
        engine: Engine,
        roster: Roster,
        drafts: DraftDesk,
        issuer: Issuer,
        limits: Limits,
        clock: Callable[[], float],
    ):
        self._engine = engine
        self._roster = roster
        self._drafts = drafts
        self._issuer = issuer
        self._limits = limits
        self._clock = clock
        self.draining = False  # no new sessions

    def handle_all(self, end: CoordinatorEnd, commands: Sequence[SessionCommand]) -> None:
        """Run the commands of one message; what is left of it once the link has ended is dropped."""
        if too_many := too_many_items(commands):
            end.end(too_many)
        for command in commands:
            if end.ended:
                return
            self.handle(end, command)

    def handle(self, end: CoordinatorEnd, command: SessionCommand) -> None:
        """Run one command; whatever is wrong with it is answered on the same link."""
        error: SpeclaError
        try:
            check_session_id(command.session_id)
            self._dispatch(end, command)
            return
        except SpeclaError as refused:
            error = refused
        except Exception as fault:
            error = internal_error("session command", fault)
        end.put(SessionEvent(session_id=command.session_id[:64], failed=to_status(error)))

    def _dispatch(self, end: CoordinatorEnd, command: SessionCommand) -> None:
        kind = command.WhichOneof("command")
        if kind is None:
            raise InvalidRequestError("command", "the command says nothing", hint="Set one of the oneof's fields")
        if kind == "start":
            self._start(end, command.session_id, command.start)
            return
        live = self._roster.find(command.session_id)
        if not isinstance(live, LiveSession):
            return  # it ended while the command was on its way
        if live.owner is not end:
            raise InvalidRequestError(
                "session_id", "the session belongs to another stream", hint="Send commands where it was opened"
            )
        if kind == "credit":
            live.credit = max(live.credit, command.credit.up_to_len)
            live.moved_at = self._clock()
        elif kind == "stop":
            self._stop(live, command.stop.at_len)
        elif kind == "cancel":
            self._roster.cancel(live)
        elif kind == "issue_attach":
            self._issuer.invite(live, command.issue_attach.drafter_id)
        else:
            live.invite(None)
            self._drafts.detach(live, verifier_pb2.CLOSED_REASON_REVOKED)

    def _start(self, end: CoordinatorEnd, session_id: bytes, start: verifier_pb2.Start) -> None:
        if self.draining:
            self._roster.refuse(session_id)
            raise ServiceUnavailableError("the verifier is shutting down", hint="Open the session elsewhere")
        if self._roster.knows(session_id):
            raise InvalidRequestError("session_id", "the session id has been used", hint="Draw 16 bytes at random")
        try:
            request = check_start(session_id, start, self._limits)
            session = self._engine.open(
                session_id, request.prompt_ids, request.resumed_ids, request.sampling, request.stopping, request.keep
            )
        except Exception:
            self._roster.refuse(session_id)
            raise
        now = self._clock()
        self._roster.add(
            LiveSession(
                session=session,
                owner=end,
                sampling=start.sampling,
                deadline=None if request.time_left_s is None else now + request.time_left_s,
                opened_at=now,
                may_stop=start.may_stop,
                moved_at=now,
            )
        )
        end.put(SessionEvent(session_id=session_id, opened=verifier_pb2.Opened()))

    def _stop(self, live: LiveSession, at_len: int) -> None:
        session = live.session
        if not session.prompt_len <= at_len <= session.committed_len:
            raise InvalidRequestError(
                "stop.at_len",
                f"the text cannot have ended at length {at_len}",
                hint=f"Give {session.prompt_len} to {session.committed_len}",
            )
        self._roster.stop(live, at_len)
