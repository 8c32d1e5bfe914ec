"""The drafters a coordinator knows, and how one session gets a drafter, loses it and gets another."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from specla.rpc.errors import DeadlineError, InvalidRequestError, ServiceUnavailableError, SpeclaError
from specla.rpc.links import Attachment, DrafterPort, Wake
from specla.v1 import common_pb2, drafter_pb2, verifier_pb2

log = structlog.get_logger(__name__)

NONE = "none"
_MAX_DOUBLINGS = 4

_ENDED_WELL = (verifier_pb2.CLOSED_REASON_FINISHED, verifier_pb2.CLOSED_REASON_CANCELLED)
_LOST_ITS_DRAFTER = (
    verifier_pb2.CLOSED_REASON_LOST,
    verifier_pb2.CLOSED_REASON_DETACHED,
    verifier_pb2.CLOSED_REASON_FAILED,
)


class DrafterMember:
    """One drafter, and when it may be tried again after it failed."""

    def __init__(self, port: DrafterPort, retry: float) -> None:
        self.port = port
        self._retry = retry
        self._failures = 0
        self.not_before = 0.0  # on the event loop's clock, seconds

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.port.info().name

    def failed(self, now: float) -> None:
        """Put it aside, longer each time, so that a dead drafter costs sessions little.

        All sessions of a drafter that dies say so; that is one failure.
        """
        if now < self.not_before:
            return
        self.not_before = now + self._retry * 2 ** min(self._failures, _MAX_DOUBLINGS)
        self._failures += 1

    def attached(self) -> None:
        """It works."""
        if self._failures:
            log.info("drafter back", drafter=self.name, address=self.port.address)
        self._failures = 0


class DrafterPool:
    """All drafters, the preferred one first."""

    def __init__(self) -> None:
        self._ranked: list[tuple[int, DrafterMember]] = []

    @property
    def members(self) -> list[DrafterMember]:
        """The preferred one first."""
        return [member for _, member in self._ranked]

    def add(self, member: DrafterMember, rank: int | None = None) -> None:
        """Keep it at its rank; None: behind all others."""
        if rank is None:
            rank = 1 + max((other for other, _ in self._ranked), default=-1)
        self._ranked.append((rank, member))
        self._ranked.sort(key=lambda entry: entry[0])

    def names(self) -> list[str]:
        """What a request may ask for."""
        return sorted({NONE, *(member.name for member in self.members)})

    def candidates(self, wanted: Sequence[str], tokenizer_hash: str) -> list[DrafterMember]:
        """The members a request may get, in its order of preference, or in the pool's if it has none.

        Raises:
            InvalidRequestError: a name that no drafter here has.
        """
        for name in wanted:
            if name not in self.names():
                raise InvalidRequestError("drafters", f"no drafter is called {name!r}"[:200], hint=self._known())
        if NONE in wanted:
            wanted = wanted[: list(wanted).index(NONE)]  # behind "none" comes nothing
            if not wanted:
                return []
        fitting = [m for m in self.members if m.port.info().tokenizer_hash in ("", tokenizer_hash)]
        if not wanted:
            return fitting
        return [member for name in wanted for member in fitting if member.name == name]

    def _known(self) -> str:
        return "Known here: " + ", ".join(self.names())


def union_of_features(members: Sequence[DrafterMember]) -> common_pb2.FeatureSpec:
    """What the verifier must keep so that any of these may attach later."""
    wants = [member.port.info().want for member in members]
    return common_pb2.FeatureSpec(
        layers=sorted({layer for want in wants for layer in want.layers}),
        window=max((want.window for want in wants), default=0),
    )


class Attaching:
    """One session's way to a drafter: ask the verifier for a token, hand it to a drafter, watch, begin again.

    Driven by the generation on the event loop: `begin`, then `on_issued` and `on_changed` for the verifier's
    events and `step` after every ring of the bell. A session without a drafter decodes plainly; nothing here
    can fail it.

    Attributes:
        wait_until: when `step` wants to be called at the latest (the event loop's clock), or None.
    """

    def __init__(
        self,
        candidates: Sequence[DrafterMember],
        session_id: bytes,
        send: Callable[[verifier_pb2.SessionCommand], None],
        wake: Wake,
        *,
        timeout: float,
    ) -> None:
        """`wake` rings the generation's bell, from any thread; `timeout` in seconds."""
        self.wait_until: float | None = None
        self._candidates = candidates
        self._session_id = session_id
        self._send = send
        self._wake = wake
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._member: DrafterMember | None = None
        self._attachment: Attachment | None = None
        self._epoch = 0

    def begin(self) -> None:
        """Ask for a token for the first candidate that may be tried now; if there is none yet, wait for one."""
        now = self._loop.time()
        self._member = next((m for m in self._candidates if m.not_before <= now), None)
        if self._member is None:
            self.wait_until = min((m.not_before for m in self._candidates), default=None)
            return
        self.wait_until = None
        issue = verifier_pb2.IssueAttach(drafter_id=self._member.port.info().drafter_id)
        self._send(verifier_pb2.SessionCommand(session_id=self._session_id, issue_attach=issue))

    def on_issued(self, issued: verifier_pb2.AttachIssued) -> None:
        """The verifier minted a token: hand it to the drafter."""
        if self._member is None:
            return
        self._epoch = issued.epoch
        request = drafter_pb2.DraftSessionRequest(
            session_id=self._session_id,
            verifier_id=issued.verifier_id,
            verifier_address=issued.verifier_address,
            attach_token=issued.attach_token,
        )
        self.wait_until = self._loop.time() + self._timeout
        try:
            self._attachment = self._member.port.draft_session(request, self._wake)
        except SpeclaError as error:
            self._next(error)

    def on_changed(self, changed: verifier_pb2.DrafterChanged) -> None:
        """The verifier says that the drafter has gone."""
        if not changed.attached and changed.epoch == self._epoch and changed.reason in _LOST_ITS_DRAFTER:
            self._next(ServiceUnavailableError("the verifier lost the drafter"))

    def step(self) -> None:
        """Look at the drafter's events and at the clock."""
        if self._attachment is not None:
            self._read(self._attachment)
        if self.wait_until is not None and self._loop.time() >= self.wait_until:
            if self._member is None:
                self.begin()
            else:
                self._next(DeadlineError("the drafter did not attach in time"))

    def end(self) -> None:
        """Detach. Harmless twice."""
        self.wait_until = None
        self._member = None
        self._epoch = 0  # what the verifier may still say of this drafter is not about the next one
        if self._attachment is not None:
            self._attachment.cancel()
            self._attachment = None

    def _read(self, attachment: Attachment) -> None:
        for event in attachment.take():
            if event.HasField("attached") and self._member is not None:
                self._member.attached()
                self.wait_until = None
            elif event.HasField("detached"):
                if event.detached.reason in _ENDED_WELL:
                    self.end()
                else:
                    self._next(ServiceUnavailableError("the drafter detached"))
                return
        if attachment.lost is not None:
            self._next(attachment.lost)

    def _next(self, why: SpeclaError) -> None:
        if self._member is not None:
            member = self._member
            log.warning(
                "drafter lost", drafter=member.name, address=member.port.address, why=why.message, reason=why.reason
            )
            member.failed(self._loop.time())
        self.end()
        self.begin()
