"""The drafter's engine: verdicts in, drafts out, for the sessions of one verifier. No sockets, no threads."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafter import Drafter, DraftState
from specla.drafter_service.pruning import prune
from specla.rpc.errors import CapacityError, InternalError, InvalidRequestError, SpeclaError
from specla.rpc.status import from_status
from specla.v1 import drafter_pb2, verifier_pb2

log = structlog.get_logger(__name__)

SESSION_ID_BYTES = 16
ENDING = ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED")  # errors after which a session is not ours any more

Event = drafter_pb2.DraftSessionResponse | SpeclaError


class Handled(NamedTuple):
    """What handling some verdicts led to."""

    items: list[verifier_pb2.DraftItem]  # for the verifier, in order
    events: list[tuple[bytes, Event]]  # for whoever began the session; an error or `detached` is the last one


@dataclass
class _Session:
    """One session: between begin and attached it has no state yet."""

    state: DraftState | None = None
    committed_len: int = 0
    root_token: int = 0  # at committed_len - 1
    node_budget: int = 0
    drafted_len: int = -1  # the committed length that the last draft was made for
    untold: list[int] = field(default_factory=list)  # the last committed tokens, which the state does not know yet


class DraftEngine:
    """Drafts for the sessions of one verifier. Not thread-safe.

    A session is drafted for once at each committed length, as soon as the verifier's budget allows. A draft
    without candidates is sent, too: it says that there is nothing to wait for. What was committed is learnt when a
    draft is wanted, not before: while none is, and at the end of a text, a drafter costs nothing.
    """

    def __init__(self, drafter: Drafter, config: DrafterConfig) -> None:
        self._drafter = drafter
        self._config = config
        self._sessions: dict[bytes, _Session] = {}
        self._seq = itertools.count(1)  # one for all sessions: it rises over re-attachments, too

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, request: drafter_pb2.DraftSessionRequest) -> verifier_pb2.DraftItem:
        """Take a session on; returns the item that attaches to it. An id that is known begins anew.

        Raises:
            InvalidRequestError: session_id or attach_token is not one.
            CapacityError: `max_sessions` are drafted for.
        """
        session_id = request.session_id
        if len(session_id) != SESSION_ID_BYTES:
            raise InvalidRequestError(
                "session_id", f"session_id has {len(session_id)} bytes", hint=f"It has {SESSION_ID_BYTES}"
            )
        if not request.attach_token:
            raise InvalidRequestError("attach_token", "attach_token is empty", hint="The verifier issues it")
        if session_id not in self._sessions and len(self._sessions) >= self._config.max_sessions:
            raise CapacityError(f"{len(self._sessions)} sessions are drafted for, the most allowed", retry_after_s=1.0)
        self._forget(session_id)
        self._sessions[session_id] = _Session()
        attach = verifier_pb2.Attach(attach_token=request.attach_token, have_len=0)
        return verifier_pb2.DraftItem(session_id=session_id, seq=next(self._seq), attach=attach)

    def end(self, session_id: bytes) -> list[verifier_pb2.DraftItem]:
        """Give a session up; returns the item that detaches from it, none for a session that is not held."""
        if session_id not in self._sessions:
            return []
        self._forget(session_id)
        return [self._detach(session_id)]

    def end_all(self) -> None:
        """The verifier is lost: forget its sessions."""
        for session_id in list(self._sessions):
            self._forget(session_id)

    def handle(self, items: Sequence[verifier_pb2.VerdictItem]) -> Handled:
        """Take in what the verifier says and draft for the sessions that moved. Sessions not held are ignored.

        A session that fails, by the verifier's word or by a fault here, ends alone.
        """
        handled = Handled([], [])
        moved: dict[bytes, _Session] = {}
        for item in items:
            session = self._sessions.get(item.session_id)
            if session is None:
                continue
            try:
                self._take_in(item, session, handled)
            except Exception as error:
                self._fail(item.session_id, error, handled)
            moved[item.session_id] = session
        for session_id, session in moved.items():
            if self._sessions.get(session_id) is not session:
                continue  # ended meanwhile
            try:
                handled.items.extend(self._draft(session_id, session))
            except Exception as error:
                self._fail(session_id, error, handled)
        return handled

    def _take_in(self, item: verifier_pb2.VerdictItem, session: _Session, handled: Handled) -> None:
        match item.WhichOneof("item"):
            case "attached":
                self._attached(item.attached, session)
                attached = drafter_pb2.DraftSessionResponse(attached=drafter_pb2.DrafterAttached())
                handled.events.append((item.session_id, attached))
            case "verdict":
                self._verdict(item.verdict, session)
            case "closed":
                self._forget(item.session_id)
                detached = drafter_pb2.DrafterDetached(reason=item.closed.reason)
                handled.events.append((item.session_id, drafter_pb2.DraftSessionResponse(detached=detached)))
            case "error":
                error = from_status(item.error)
                if session.state is None or error.code in ENDING:
                    self._forget(item.session_id)
                    handled.events.append((item.session_id, error))
                else:
                    # The verifier dropped one draft; the next committed token brings the next one.
                    log.error("draft_refused", drafter=self._drafter.name, reason=error.reason, error=error.message)

    def _attached(self, attached: verifier_pb2.Attached, session: _Session) -> None:
        if session.state is not None:
            raise InternalError("the verifier attached a session twice")
        if not attached.tokens or len(attached.tokens) != attached.committed_len:
            raise InternalError(
                f"the verifier attached with {len(attached.tokens)} tokens at length {attached.committed_len}"
            )
        session.state = self._drafter.start(attached.tokens, attached.sampling)
        session.committed_len = attached.committed_len
        session.root_token = attached.tokens[-1]
        session.node_budget = attached.node_budget

    def _verdict(self, verdict: verifier_pb2.Verdict, session: _Session) -> None:
        if session.state is None:
            raise InternalError("the verifier sent a verdict for a session before it was attached")
        session.node_budget = verdict.node_budget
        new = verdict.committed_len - session.committed_len
        if new <= 0:
            return  # a STALE or SUPERSEDED that tells nothing new
        if new > len(verdict.tokens):
            raise InternalError(f"the verifier committed {new} tokens and told {len(verdict.tokens)}")
        session.untold += verdict.tokens[-new:]
        session.committed_len = verdict.committed_len
        session.root_token = verdict.tokens[-1]

    def _draft(self, session_id: bytes, session: _Session) -> list[verifier_pb2.DraftItem]:
        if session.state is None or session.node_budget == 0 or session.drafted_len == session.committed_len:
            return []
        if session.untold:
            session.state.extend(session.untold)
            session.untold = []
        budget = min(session.node_budget, self._config.max_nodes)
        tree = prune(session.state.draft(budget), tau=self._config.tau, max_nodes=budget)
        session.drafted_len = session.committed_len
        topology = verifier_pb2.Topology(
            base_len=session.committed_len,
            root_token=session.root_token,
            tokens=tree.tokens,
            parents=tree.parents,
            log_probs=tree.log_probs,
        )
        return [verifier_pb2.DraftItem(session_id=session_id, seq=next(self._seq), topology=topology)]

    def _fail(self, session_id: bytes, error: Exception, handled: Handled) -> None:
        """End one session after a fault; the verifier decodes on without it."""
        log.error("session_failed", drafter=self._drafter.name, session=session_id.hex(), exc_info=error)
        self._sessions.pop(session_id, None)
        handled.items.append(self._detach(session_id))
        known = error if isinstance(error, SpeclaError) else InternalError(f"the drafter {self._drafter.name} failed")
        handled.events.append((session_id, known))

    def _detach(self, session_id: bytes) -> verifier_pb2.DraftItem:
        return verifier_pb2.DraftItem(session_id=session_id, seq=next(self._seq), detach=verifier_pb2.Detach())

    def _forget(self, session_id: bytes) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None and session.state is not None:
            session.state.finish(session.untold)
