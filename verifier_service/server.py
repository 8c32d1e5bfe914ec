"""The verifier behind gRPC: a servicer that parses, hands over and serialises, and the way to start and stop it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import structlog

from specla.rpc.serving import GrpcServer
from specla.rpc.waker import LoopWaker
from specla.v1 import verifier_pb2, verifier_pb2_grpc
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.publish import In, LinkEnd, Out
from specla.verifier_service.scheduler import Scheduler

log = structlog.get_logger("specla.verifier")

SERVICE = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name

_MAX_BACKLOG = 256  # messages that wait for the scheduler
_LARGE = 64  # items; a message of more is done before the next is read
_STREAM_GRACE_S = 5.0  # for streams to end after their sessions did; they take milliseconds unless the machine is busy

Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """VerifierService over a scheduler; made on the event loop that serves."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._waker = LoopWaker(asyncio.get_running_loop())

    async def GetTarget(  # noqa: N802
        self, request: verifier_pb2.GetTargetRequest, context: Context
    ) -> verifier_pb2.GetTargetResponse:
        """Who it is and what it runs."""
        return self._scheduler.target()

    async def Sessions(  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.SessionsRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.SessionsResponse]:
        """Commands in, events out; the stream's loss cancels its sessions."""
        news = asyncio.Event()
        link = self._scheduler.connect_coordinator(partial(self._waker.call, news.set))
        async with self._reading(link, request_iterator, lambda request: request.commands, news) as reader:
            async for events in _unread(link, news, reader):
                yield verifier_pb2.SessionsResponse(events=events)

    async def Verify(  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        """Drafts in, verdicts out; the stream's loss detaches the drafter."""
        news = asyncio.Event()
        link = self._scheduler.connect_drafter(partial(self._waker.call, news.set))
        async with self._reading(link, request_iterator, lambda request: request.items, news) as reader:
            async for items in _unread(link, news, reader):
                yield verifier_pb2.VerifyResponse(items=items)

    async def ReadFeatures(  # noqa: N802
        self, request: verifier_pb2.ReadFeaturesRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.ReadFeaturesResponse]:
        """Features that a verdict had no room for, in slabs."""
        for slab in await asyncio.wrap_future(self._scheduler.ask_features(request)):
            yield verifier_pb2.ReadFeaturesResponse(features=slab)

    async def ListSessions(  # noqa: N802
        self, request: verifier_pb2.ListSessionsRequest, context: Context
    ) -> verifier_pb2.ListSessionsResponse:
        """The sessions that live now."""
        sessions = await asyncio.wrap_future(self._scheduler.ask_sessions())
        return verifier_pb2.ListSessionsResponse(sessions=sessions)

    @asynccontextmanager
    async def _reading(
        self,
        link: LinkEnd[In, Out],
        requests: AsyncIterator[Any],
        items: Callable[[Any], Sequence[In]],
        news: asyncio.Event,
    ) -> AsyncIterator["asyncio.Task[None]"]:
        """Carry requests to the link meanwhile, ring `news` when there are no more; closes the link at the end."""

        async def read() -> None:
            async for request in requests:
                batch = items(request)
                link.send(batch)
                # Read on when it is done; HTTP/2 holds the sender back.
                if len(batch) > _LARGE or self._scheduler.backlog > _MAX_BACKLOG:
                    await asyncio.wrap_future(self._scheduler.ask(lambda: None))
            self._scheduler.finish_link(link)

        reader = asyncio.create_task(read())
        reader.add_done_callback(lambda _: news.set())
        try:
            yield reader
        finally:
            reader.cancel()
            link.close()


async def _unread(
    link: LinkEnd[In, Out], news: asyncio.Event, reader: "asyncio.Task[None]"
) -> AsyncIterator[list[Out]]:
    """What the link has to say, a batch a wake, until it ends; raises why if the verifier or the reader ended it."""
    while True:
        await news.wait()
        news.clear()
        ended, lost = link.ended, link.lost  # looked at before the items, so that none comes after them
        if items := link.take():
            yield items
        if lost is not None:
            raise lost
        if ended:
            return
        if reader.done() and not reader.cancelled() and (broken := reader.exception()) is not None:
            if isinstance(broken, grpc.aio.BaseError):
                return  # the other side is gone
            raise broken


class VerifierServer:
    """A verifier that listens: engine, scheduler and gRPC server. Made by `serve_verifier`."""

    def __init__(self, scheduler: Scheduler, server: GrpcServer):
        self.scheduler = scheduler
        self._server = server

    @property
    def port(self) -> int:
        """As bound."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return self._server.address

    async def stop(self) -> None:
        """Take no new sessions, let the living ones end for `drain_s`, then end everything. Harmless twice."""
        drain_s = self.scheduler.config.drain_s
        draining = asyncio.to_thread(self.scheduler.stop, drain_s)
        await asyncio.gather(draining, self._server.stop(grace_s=drain_s + _STREAM_GRACE_S))

    async def wait_stopped(self) -> None:
        """Return once the server has stopped."""
        await self._server.wait_stopped()


async def serve_verifier(config: VerifierConfig) -> VerifierServer:
    """Bind the port, so that a busy one is known before the target is loaded; load; serve.

    Raises:
        ServiceUnavailableError: the port is taken.
        UnsupportedModelError, InvalidRequestError: from the engine.
    """
    server = GrpcServer(
        config,
        [SERVICE],
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(scheduler), server),
        lambda: scheduler.health(),
    )
    server.bind()
    try:
        scheduler = await asyncio.to_thread(Scheduler.load, config)
    except BaseException:
        await server.stop(grace_s=0)
        raise
    try:
        scheduler.advertised_address = scheduler.advertised_address or reachable_address(server.address)
        await server.start()
    except BaseException:
        await server.stop(grace_s=0)
        await asyncio.to_thread(scheduler.stop)
        raise
    log.info("verifier serves", address=server.address, advertised=scheduler.advertised_address)
    return VerifierServer(scheduler, server)


def reachable_address(bound: str) -> str:
    """Where others reach a bound address: a wildcard host becomes this machine's name."""
    host, _, port = bound.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else bound
