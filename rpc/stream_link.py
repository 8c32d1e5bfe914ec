"""A link over one bidirectional gRPC stream: the client's end.

One task writes (two writes at once kill a call), one task reads (a read that times out cancels the
call); both live on the event loop, while `send`, `take` and `close` may be called from any thread.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from specla.rpc.channel import from_rpc_error
from specla.rpc.errors import ServiceUnavailableError, SpeclaError
from specla.rpc.faults import internal_error
from specla.rpc.links import Wake
from specla.rpc.waker import LoopWaker

Out = TypeVar("Out")
In = TypeVar("In")


class StreamLink(Generic[Out, In]):
    """See `specla.rpc.links.Link`.

    Args:
        waker: hops to the event loop that owns the channel.
        wake: called on that loop when something arrived, or the link was lost.
        open_call: opens the stream; awaited first, so that it may look the server up.
        request: wraps items into one message.
        items: unwraps a message.
    """

    def __init__(
        self,
        waker: LoopWaker,
        wake: Wake,
        open_call: Callable[[], Awaitable[Any]],
        request: Callable[[list[Out]], Any],
        items: Callable[[Any], Iterable[In]],
    ):
        self._waker = waker
        self._wake = wake
        self._open_call = open_call
        self._request = request
        self._items = items
        self._lock = threading.Lock()
        self._outgoing: list[Out] = []
        self._arrived: list[In] = []
        self._lost: SpeclaError | None = None
        self._closed = False
        self._has_outgoing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        waker.call(self._start)

    def send(self, items: Sequence[Out]) -> None:
        """Hand over items; they leave in one message with whatever else waits."""
        with self._lock:
            if self._closed or self._lost is not None:
                return
            self._outgoing.extend(items)
        self._waker.call(self._has_outgoing.set)

    def take(self) -> list[In]:
        """What has arrived since the last call, oldest first."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Cancel the call; the server sees its loss."""
        with self._lock:
            self._closed = True
        self._waker.call(self._cancel)

    @property
    def lost(self) -> SpeclaError | None:
        """Why the stream ended without `close`."""
        return self._lost

    async def wait_closed(self) -> None:
        """Return when the stream's tasks have ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        if self._closed:
            self._task.cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        writer: asyncio.Task[None] | None = None
        call = None
        lost: SpeclaError = ServiceUnavailableError("the other side ended the stream")
        try:
            call = await self._open_call()
            writer = asyncio.create_task(self._write(call))
            async for response in call:
                with self._lock:
                    self._arrived.extend(self._items(response))
                self._wake()
        except asyncio.CancelledError:
            lost = ServiceUnavailableError("the stream was cancelled on this side")
        except SpeclaError as error:
            lost = error
        except grpc.RpcError as error:
            lost = from_rpc_error(error)
        except Exception as error:  # a fault in `wake`: the link is useless, the loop is not
            lost = internal_error("stream link", error)
        finally:
            if call is not None:
                call.cancel()
            if writer is not None:
                writer.cancel()
            with self._lock:
                self._outgoing.clear()
                if not self._closed:
                    self._lost = lost
            if self._lost is not None:
                self._wake()

    async def _write(self, call: Any) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            with self._lock:
                outgoing, self._outgoing = self._outgoing, []
            if outgoing:
                try:
                    await call.write(self._request(outgoing))
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the reader sees why
