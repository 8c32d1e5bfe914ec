"""The drafter as a service: a thin gRPC shell. Each verifier it is sent to has one join, one stream for all sessions.

Drafting happens in one worker thread, never on the event loop; so the drafter itself needs no locks.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import structlog

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafters.make import make_drafter
from specla.drafter_service.local import Job, LocalDrafter
from specla.rpc.channel import ClientTls
from specla.rpc.errors import InvalidRequestError
from specla.rpc.remote_verifier import RemoteVerifier
from specla.rpc.serving import GrpcServer
from specla.rpc.settings import check_file
from specla.rpc.waker import LoopWaker
from specla.v1 import drafter_pb2, drafter_pb2_grpc

log = structlog.get_logger(__name__)

SERVICE = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name
CONNECT_S = 2.0  # to reach a verifier; a coordinator gives up on the attachment after about as long
STALLED_S = 10.0  # a draft that takes longer never ends: the health service says so

Context = grpc.aio.ServicerContext[Any, Any]


class Worker:
    """One thread that does jobs in order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        self._busy_since: float | None = None

    def run(self, job: Job) -> None:
        """Do a job soon; after `close` it is dropped."""
        try:
            self._pool.submit(self._do, job)
        except RuntimeError:
            log.debug("job_dropped")

    def is_live(self) -> bool:
        """Whether the job in hand, if any, was begun lately."""
        since = self._busy_since
        return since is None or time.monotonic() - since < STALLED_S

    def close(self) -> None:
        """Let the job in hand end; start no other."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _do(self, job: Job) -> None:
        self._busy_since = time.monotonic()
        try:
            job()
        finally:
            self._busy_since = None


class Joins:
    """The drafter's joins to verifiers, by address; made when first asked for, and anew once lost.

    Args:
        config: allow-list and limits.
        run: where joins work.
    """

    def __init__(self, config: DrafterConfig, run: Callable[[Job], None]) -> None:
        check_file("connect_ca", config.connect_ca)
        self._config = config
        self._run = run
        self._drafter = make_drafter(config)
        self._made: dict[str, asyncio.Task[tuple[RemoteVerifier, LocalDrafter]]] = {}

    @property
    def drafter_name(self) -> str:
        """What the drafter is called."""
        return self._drafter.name

    async def to(self, address: str) -> LocalDrafter:
        """The join to the verifier at `address`.

        Raises:
            InvalidRequestError: the address is not allowed.
            ServiceUnavailableError: no verifier answers there.
        """
        if not self._config.allows(address):
            raise InvalidRequestError(
                "verifier_address",
                "this drafter may not be sent to that verifier",
                hint="allow_verifiers of the drafter lists HOST:PORT of those it may",
            )
        making = self._made.get(address)
        if making is not None and making.done():
            failed = making.cancelled() or making.exception() is not None
            if failed or making.result()[1].lost is not None:
                del self._made[address]
                if not failed:
                    await making.result()[0].close()
                making = self._made.get(address)  # another call may have been quicker
        if making is None:
            making = self._made[address] = asyncio.create_task(self._make(address))
        _, join = await asyncio.shield(making)
        return join

    async def close(self) -> None:
        """End all streams; the verifiers see the drafter's loss."""
        made, self._made = self._made, {}
        for making in made.values():
            making.cancel()
        for result in await asyncio.gather(*made.values(), return_exceptions=True):
            if not isinstance(result, BaseException):
                verifier, join = result
                join.close()
                await verifier.close()

    async def _make(self, address: str) -> tuple[RemoteVerifier, LocalDrafter]:
        root_ca = self._config.connect_ca
        tls = ClientTls(root_ca=root_ca) if root_ca is not None else None
        verifier = await RemoteVerifier.connect(address, tls=tls, deadline_s=CONNECT_S)
        log.info("verifier_joined", address=address, verifier=verifier.target().verifier_id)
        return verifier, LocalDrafter(self._drafter, self._config, verifier, run=self._run)


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Parses, calls, serialises; made on the event loop that serves."""

    def __init__(self, config: DrafterConfig, joins: Joins) -> None:
        self._joins = joins
        self._waker = LoopWaker(asyncio.get_running_loop())
        self._info = drafter_pb2.GetDrafterResponse(
            drafter_id=uuid.uuid4().hex, name=joins.drafter_name, max_sessions=config.max_sessions
        )

    async def GetDrafter(  # noqa: N802
        self, request: drafter_pb2.GetDrafterRequest, context: Context
    ) -> drafter_pb2.GetDrafterResponse:
        """Who this drafter is and what it wants."""
        return self._info

    async def DraftSession(  # noqa: N802
        self, request: drafter_pb2.DraftSessionRequest, context: Context
    ) -> AsyncIterator[drafter_pb2.DraftSessionResponse]:
        """Draft for one session until it ends, the call is cancelled, or the verifier is lost (UNAVAILABLE)."""
        join = await self._joins.to(request.verifier_address)
        bell = asyncio.Event()
        attachment = join.draft_session(request, partial(self._waker.call, bell.set))
        try:
            while True:
                await bell.wait()
                bell.clear()
                lost = attachment.lost  # read first: what was told before the loss is sent before it
                for event in attachment.take():
                    yield event
                    if event.HasField("detached"):
                        return
                if lost is not None:
                    raise lost
        finally:
            attachment.cancel()


class DrafterServer:
    """A drafter service that can be started and stopped; made on the event loop that serves.

    Raises:
        InvalidRequestError: the config cannot be served, or the drafter cannot be made.
    """

    def __init__(self, config: DrafterConfig) -> None:
        self._worker = Worker()
        self._joins = Joins(config, self._worker.run)
        servicer = DrafterServicer(config, self._joins)
        self._server = GrpcServer(
            config,
            [SERVICE],
            lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server),
            self._worker.is_live,
        )

    @property
    def port(self) -> int:
        """As bound; known once started."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port` as bound; known once started."""
        return self._server.address

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ServiceUnavailableError: the port is taken.
        """
        await self._server.start()

    async def stop(self) -> None:
        """Take no new sessions, let those in hand end for `drain_s`, then detach from all of them."""
        await self._server.stop()
        await self._joins.close()
        self._worker.close()

    async def wait_stopped(self) -> None:
        """Return once the server has stopped."""
        await self._server.wait_stopped()


async def serve_drafter(config: DrafterConfig) -> DrafterServer:
    """Start a drafter service; returns it listening.

    Raises:
        InvalidRequestError: the config cannot be served.
        ServiceUnavailableError: the port is taken.
    """
    server = DrafterServer(config)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server
