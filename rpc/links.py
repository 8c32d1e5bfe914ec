"""How the parts are joined: the same two shapes in one process and over sockets.

A link carries items one way and answers the other. Whoever has something to say calls the other
side's `wake`, which must return at once; the other side then calls `take` when it is ready. So a
slow reader finds the newest state, not a queue, and the thread that owns the device never waits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from specla.rpc.errors import SpeclaError
from specla.v1 import drafter_pb2, verifier_pb2

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In")
Wake = Callable[[], None]

IN_PROCESS = "this process"
"""The `address` of a part without a socket."""


class Link(Protocol[Out, In]):
    """One side's end of a stream. All methods are thread-safe and never block."""

    def send(self, items: Sequence[Out]) -> None:
        """Hand over items; after the loss of the link they are dropped."""

    def take(self) -> list[In]:
        """What has arrived since the last call, oldest first; empty if nothing has."""

    def close(self) -> None:
        """End the link; what hangs on it is cancelled (sessions) or detached (drafts). Harmless twice."""

    @property
    def lost(self) -> SpeclaError | None:
        """Why the link ended without `close`, or None while it lives."""


CoordinatorLink = Link[verifier_pb2.SessionCommand, verifier_pb2.SessionEvent]
DrafterLink = Link[verifier_pb2.DraftItem, verifier_pb2.VerdictItem]


class VerifierPort(Protocol):
    """A verifier, in this process or behind a socket.

    `wake` is called from any thread (in one process: from the thread that owns the device).
    """

    @property
    def address(self) -> str:
        """Where it is reached, for logs: HOST:PORT, or IN_PROCESS."""

    def target(self) -> verifier_pb2.GetTargetResponse:
        """Who it is and what it runs; known since connecting, never blocks."""

    def connect_coordinator(self, wake: Wake) -> CoordinatorLink:
        """Open a link for sessions; its loss cancels them."""

    def connect_drafter(self, wake: Wake) -> DrafterLink:
        """Open a link for drafts; its loss detaches the drafter from its sessions."""


class Attachment(Protocol):
    """One session a drafter drafts for."""

    def take(self) -> list[drafter_pb2.DraftSessionResponse]:
        """Events since the last call."""

    def cancel(self) -> None:
        """Detach. Harmless twice."""

    @property
    def lost(self) -> SpeclaError | None:
        """Why the attachment ended without `cancel`, or None while it lives."""


class DrafterPort(Protocol):
    """A drafter, in this process or behind a socket."""

    @property
    def address(self) -> str:
        """Where it is reached, for logs: HOST:PORT, or IN_PROCESS."""

    def info(self) -> drafter_pb2.GetDrafterResponse:
        """Who it is and what it wants; known since connecting, never blocks."""

    def draft_session(self, request: drafter_pb2.DraftSessionRequest, wake: Wake) -> Attachment:
        """Begin to draft for a session; `wake` announces events."""


FeatureReader = Callable[[verifier_pb2.ReadFeaturesRequest], Iterator[verifier_pb2.Features]]
