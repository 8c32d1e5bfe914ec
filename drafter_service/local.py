"""A drafter joined to one verifier: the DrafterPort of a process that holds both, and the service's inner half.

The verifier's `wake` leads straight to the drafting and to `send`, in the same thread: no queue, no hop.
"""

import uuid
from collections import deque
from collections.abc import Callable
from threading import Lock

import structlog

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafter import Drafter
from specla.drafter_service.engine import DraftEngine, Event
from specla.rpc.errors import (
    InternalError,
    InvalidRequestError,
    ServiceUnavailableError,
    SessionCancelledError,
    SpeclaError,
)
from specla.rpc.links import IN_PROCESS, DrafterLink, VerifierPort, Wake
from specla.v1 import drafter_pb2

log = structlog.get_logger(__name__)

Job = Callable[[], None]


def _at_once(job: Job) -> None:
    job()


class LocalAttachment:
    """One session, as its coordinator sees it."""

    def __init__(self, drafter: "LocalDrafter", request: drafter_pb2.DraftSessionRequest, wake: Wake) -> None:
        self.request = request
        self._drafter = drafter
        self._wake = wake
        self._events: deque[drafter_pb2.DraftSessionResponse] = deque()
        self._lost: SpeclaError | None = None
        self.ended = False

    def take(self) -> list[drafter_pb2.DraftSessionResponse]:
        """Events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def cancel(self) -> None:
        """Detach. Harmless twice."""
        if not self.ended:
            self.ended = True
            self._drafter.cancel(self)

    @property
    def lost(self) -> SpeclaError | None:
        """Why the attachment ended without `cancel`, or None while it lives."""
        return self._lost

    def tell(self, event: Event) -> None:
        """Hand the coordinator an event; after the last one it hears nothing more."""
        if self.ended:
            return
        if isinstance(event, SpeclaError):
            self._lost = event
        else:
            self._events.append(event)
        if _is_last(event):
            self.ended = True
        self._wake()


def _is_last(event: Event) -> bool:
    return isinstance(event, SpeclaError) or event.HasField("detached")


class LocalDrafter:
    """A drafter joined to one verifier through one link, opened with the first session.

    Args:
        drafter: shared by several joins only if `run` brings them all to one thread.
        config: tau, max_nodes and max_sessions count here.
        verifier: in this process or behind a socket.
        run: where the work is done; at once, in the thread that woke the drafter, unless told otherwise.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: DrafterConfig,
        verifier: VerifierPort,
        *,
        run: Callable[[Job], object] = _at_once,
    ) -> None:
        self.address = IN_PROCESS
        self._drafter = drafter
        self._config = config
        self._verifier = verifier
        self._run = run
        self._engine = DraftEngine(drafter, config)
        self._id = uuid.uuid4().hex
        self._link: DrafterLink | None = None
        self._attachments: dict[bytes, LocalAttachment] = {}
        self._begun: deque[LocalAttachment] = deque()
        self._cancelled: deque[LocalAttachment] = deque()
        self._working = Lock()
        self._again = False
        self._lost: SpeclaError | None = None

    def info(self) -> drafter_pb2.GetDrafterResponse:
        """Who it is; it wants no features and drafts on the ids of any tokenizer."""
        return drafter_pb2.GetDrafterResponse(
            drafter_id=self._id, name=self._drafter.name, max_sessions=self._config.max_sessions
        )

    @property
    def lost(self) -> SpeclaError | None:
        """Why nothing can be drafted here any more, or None while it can."""
        return self._lost

    def draft_session(self, request: drafter_pb2.DraftSessionRequest, wake: Wake) -> LocalAttachment:
        """Begin to draft for a session. What is wrong with it is told through the attachment's `lost`."""
        attachment = LocalAttachment(self, request, wake)
        self._begun.append(attachment)
        self._run(self._work)
        return attachment

    def cancel(self, attachment: LocalAttachment) -> None:
        """Give a session up (LocalAttachment.cancel calls this)."""
        self._cancelled.append(attachment)
        self._run(self._work)

    def close(self) -> None:
        """Detach from every session and end the link."""
        if self._link is not None:
            self._link.close()

    def _on_wake(self) -> None:
        self._run(self._work)

    def _work(self) -> None:
        """Do whatever there is to do. Of several threads that come, one works, and looks again before it leaves."""
        self._again = True
        while self._again and self._working.acquire(blocking=False):
            try:
                self._again = False
                self._step()
            except Exception as error:
                # The verifier's thread may be the one that came here: it must live on.
                log.error("drafter_failed", drafter=self._drafter.name, exc_info=error)
                self._lose(InternalError(f"the drafter {self._drafter.name} failed"))
            finally:
                self._working.release()

    def _step(self) -> None:
        while self._begun:
            self._begin(self._begun.popleft())
        while self._cancelled:
            attachment = self._cancelled.popleft()
            if self._attachments.get(attachment.request.session_id) is attachment:
                del self._attachments[attachment.request.session_id]
                items = self._engine.end(attachment.request.session_id)
                if self._link is not None:
                    self._link.send(items)
        if self._link is None or self._lost is not None:
            return
        handled = self._engine.handle(self._link.take())
        if handled.items:
            self._link.send(handled.items)
        for session_id, event in handled.events:
            self._tell(session_id, event)
        if self._link.lost is not None:
            self._lose(ServiceUnavailableError(f"the drafter lost its verifier: {self._link.lost.message}"))

    def _begin(self, attachment: LocalAttachment) -> None:
        request = attachment.request
        if self._lost is not None:
            attachment.tell(self._lost)
            return
        try:
            known = self._verifier.target().verifier_id
            if request.verifier_id != known:
                hint = "It may have been started anew; ask it for a token again"
                raise InvalidRequestError(
                    "verifier_id", "the verifier is another one than the request names", hint=hint
                )
            item = self._engine.begin(request)
        except SpeclaError as error:
            attachment.tell(error)
            return
        former = self._attachments.get(request.session_id)
        if former is not None:
            former.tell(SessionCancelledError("the session was begun anew"))
        self._attachments[request.session_id] = attachment
        if self._link is None:
            self._link = self._verifier.connect_drafter(self._on_wake)
        self._link.send([item])

    def _tell(self, session_id: bytes, event: Event) -> None:
        attachment = self._attachments.get(session_id)
        if attachment is not None:
            attachment.tell(event)
            if _is_last(event):  # one cancelled just now is kept: its detaching is still to be done
                del self._attachments[session_id]

    def _lose(self, error: SpeclaError) -> None:
        """End every session; the link is of no more use, and later sessions end at once."""
        self._lost = self._lost or error
        if self._link is not None:
            self._link.close()
        self._engine.end_all()
        attachments, self._attachments = self._attachments, {}
        for attachment in attachments.values():
            attachment.tell(error)
