"""The verifiers a coordinator knows: one link each, shared by all sessions there, and who gets which event."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from specla.rpc.errors import ServiceUnavailableError, SpeclaError
from specla.rpc.links import VerifierPort
from specla.rpc.waker import LoopWaker
from specla.v1 import verifier_pb2


class Mailbox:
    """Events of one session, and the bell of the generation that reads them."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._events: list[verifier_pb2.SessionEvent] = []
        self.lost: SpeclaError | None = None

    def put(self, event: verifier_pb2.SessionEvent) -> None:
        """Called on the event loop only."""
        self._events.append(event)
        self._ring()

    def lose(self, why: SpeclaError) -> None:
        """The verifier is gone; what it sent before still counts."""
        self.lost = why
        self._ring()

    def take(self) -> list[verifier_pb2.SessionEvent]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


class VerifierMember:
    """One verifier and this coordinator's link to it. Everything but its waker runs on the event loop.

    Attributes:
        waker: calls that loop, from any thread, once for all that happened since: what the verifier says, and what
            drafters say while its thread leads to them.
    """

    def __init__(self, port: VerifierPort, on_lost: Callable[["VerifierMember"], None]) -> None:
        self.port = port
        self.target = port.target()
        self.waker = LoopWaker(asyncio.get_running_loop())
        self._on_lost = on_lost
        self._mailboxes: dict[bytes, Mailbox] = {}
        self._link = port.connect_coordinator(partial(self.waker.call, self._deliver))

    @property
    def sessions(self) -> int:
        """Sessions of this coordinator that live there."""
        return len(self._mailboxes)

    @property
    def lost(self) -> SpeclaError | None:
        """Why the link ended, or None while it lives."""
        return self._link.lost

    def open(self, session_id: bytes, ring: Callable[[], None]) -> Mailbox:
        """A mailbox for a session about to start there."""
        mailbox = self._mailboxes[session_id] = Mailbox(ring)
        return mailbox

    def leave(self, session_id: bytes) -> None:
        """Later events of the session are dropped. Harmless twice."""
        self._mailboxes.pop(session_id, None)

    def send(self, commands: Sequence[verifier_pb2.SessionCommand]) -> None:
        """Hand over commands; dropped if the link is lost."""
        self._link.send(commands)

    def close(self) -> None:
        """End the link: the verifier cancels what still runs."""
        self._link.close()
        for mailbox in self._mailboxes.values():
            mailbox.lose(ServiceUnavailableError("the coordinator is closing"))

    def _deliver(self) -> None:
        lost = self._link.lost  # before `take`: what arrived before the loss still counts
        for event in self._link.take():
            mailbox = self._mailboxes.get(event.session_id)
            if mailbox is not None:
                mailbox.put(event)
        if lost is not None:
            for mailbox in self._mailboxes.values():
                mailbox.lose(lost)
            self._on_lost(self)


class VerifierPool:
    """All living verifiers; chooses where a session goes."""

    def __init__(self) -> None:
        self.members: list[VerifierMember] = []

    def add(self, member: VerifierMember) -> None:
        """From now on sessions may go there."""
        self.members.append(member)

    def remove(self, member: VerifierMember) -> None:
        """No more sessions go there. Harmless twice."""
        if member in self.members:
            self.members.remove(member)

    def choose(self, *, numerics_id: str = "", avoid: Sequence[VerifierMember] = ()) -> VerifierMember | None:
        """The living member with the fewest sessions, of this numerics_id if one is given; None if there is none."""
        fitting = [
            member
            for member in self.members
            if member.lost is None
            and member not in avoid
            and (not numerics_id or member.target.numerics_id == numerics_id)
        ]
        return min(fitting, key=lambda member: member.sessions, default=None)
