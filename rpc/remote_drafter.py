"""A drafter behind a socket, as a `DrafterPort`: what a coordinator hands its sessions to."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator

import grpc

from specla.rpc.channel import CONNECT_DEADLINE_S, UNARY_DEADLINE_S, ClientTls, from_rpc_error, open_channel
from specla.rpc.errors import DeadlineError, ServiceUnavailableError, SpeclaError
from specla.rpc.faults import internal_error
from specla.rpc.links import Wake
from specla.v1 import drafter_pb2, drafter_pb2_grpc

DraftCall = AsyncIterator[drafter_pb2.DraftSessionResponse]


class RemoteAttachment:
    """One `DraftSession` call, read by a task of its own on the event loop of its drafter."""

    def __init__(self, drafter: "RemoteDrafter", request: drafter_pb2.DraftSessionRequest, wake: Wake) -> None:
        self._drafter = drafter
        self._request = request
        self._wake = wake
        self._events: deque[drafter_pb2.DraftSessionResponse] = deque()
        self._lost: SpeclaError | None = None
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None

    def take(self) -> list[drafter_pb2.DraftSessionResponse]:
        """Events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def cancel(self) -> None:
        """Detach: cancel the call. Harmless twice; callable from any thread."""
        self._cancelled = True
        self._drafter.on_loop(self._cancel_task)

    @property
    def lost(self) -> SpeclaError | None:
        """Why the call ended without `cancel` and without `detached`, or None."""
        return self._lost

    def start(self) -> None:
        """Begin to read (RemoteDrafter calls this on its event loop)."""
        if not self._cancelled:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        ended = False
        lost: SpeclaError = ServiceUnavailableError("the drafter ended the call")
        try:
            async for event in await self._drafter.call(self._request):
                self._events.append(event)
                ended = event.HasField("detached")
                self._wake()
        except asyncio.CancelledError:
            lost = ServiceUnavailableError("the call was cancelled on this side")
        except SpeclaError as error:
            lost = error
        except grpc.RpcError as error:
            lost = from_rpc_error(error)
        except Exception as error:
            lost = internal_error("remote drafter", error)
        if not ended and not self._cancelled:
            self._lost = lost
            self._drafter.doubt()
            self._wake()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()


class RemoteDrafter:
    """One channel to a drafter; made by `connect`, on the event loop that will own it."""

    def __init__(self, address: str, channel: grpc.aio.Channel, info: drafter_pb2.GetDrafterResponse) -> None:
        self.address = address
        self._channel = channel
        self._stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        self._info = info
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._doubted = False

    @classmethod
    async def connect(
        cls, address: str, *, tls: ClientTls | None = None, deadline_s: float = CONNECT_DEADLINE_S
    ) -> "RemoteDrafter":
        """Reach the drafter at `host:port` and learn who it is; waits for one that is still starting.

        Raises:
            ServiceUnavailableError: nothing answered within `deadline_s`.
        """
        channel = open_channel(address, tls)
        try:
            info = await _get_drafter(drafter_pb2_grpc.DrafterServiceStub(channel), deadline_s, wait=True)
        except DeadlineError:
            await channel.close()
            raise ServiceUnavailableError(
                f"no drafter answers at {address}", hint="Start one there, or mend the address"
            ) from None
        except BaseException:
            await channel.close()
            raise
        return cls(address, channel, info)

    def info(self) -> drafter_pb2.GetDrafterResponse:
        """Who it is and what it wants, as last heard."""
        return self._info

    def draft_session(self, request: drafter_pb2.DraftSessionRequest, wake: Wake) -> RemoteAttachment:
        """Begin to draft for a session; callable from any thread, `wake` is called on the event loop."""
        attachment = RemoteAttachment(self, request, wake)
        self.on_loop(attachment.start)
        return attachment

    async def close(self) -> None:
        """Close the channel; calls in hand end."""
        await self._channel.close()

    def doubt(self) -> None:
        """A call was lost: whoever answers here next may be another drafter."""
        self._doubted = True

    async def call(self, request: drafter_pb2.DraftSessionRequest) -> DraftCall:
        """Open a `DraftSession` call; after a loss it asks first who the drafter is now.

        Raises:
            SpeclaError: the drafter does not answer.
        """
        if self._doubted:
            self._info = await _get_drafter(self._stub, UNARY_DEADLINE_S, wait=False)
            self._doubted = False
        call: DraftCall = self._stub.DraftSession(request)
        return call

    def on_loop(self, callback: Wake) -> None:
        """Run a callback on the event loop: now if this is its thread."""
        if threading.get_ident() == self._loop_thread:
            callback()
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the loop is closed, and the call with it


async def _get_drafter(
    stub: drafter_pb2_grpc.DrafterServiceStub, deadline_s: float, *, wait: bool
) -> drafter_pb2.GetDrafterResponse:
    try:
        info: drafter_pb2.GetDrafterResponse = await stub.GetDrafter(
            drafter_pb2.GetDrafterRequest(), timeout=deadline_s, wait_for_ready=wait
        )
        return info
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
