"""A verifier behind a socket, as a `VerifierPort`: what a coordinator and a drafter service talk to."""

import asyncio
from collections.abc import Iterator

import grpc

from specla.rpc.channel import CONNECT_DEADLINE_S, UNARY_DEADLINE_S, ClientTls, from_rpc_error, open_channel
from specla.rpc.errors import DeadlineError, ServiceUnavailableError
from specla.rpc.links import CoordinatorLink, DrafterLink, Wake
from specla.rpc.stream_link import StreamLink
from specla.rpc.waker import LoopWaker, speed_up_hops
from specla.v1 import verifier_pb2, verifier_pb2_grpc

_FEATURES_DEADLINE_S = 30.0

CoordinatorStream = StreamLink[verifier_pb2.SessionCommand, verifier_pb2.SessionEvent]
DrafterStream = StreamLink[verifier_pb2.DraftItem, verifier_pb2.VerdictItem]


class RemoteVerifier:
    """One channel to a verifier; made by `connect`, on the event loop that will own it."""

    def __init__(self, address: str, channel: grpc.aio.Channel, target: verifier_pb2.GetTargetResponse):
        self.address = address
        self._channel = channel
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._waker = LoopWaker(self._loop)
        self._links: list[CoordinatorStream | DrafterStream] = []
        speed_up_hops()

    @classmethod
    async def connect(
        cls, address: str, *, tls: ClientTls | None = None, deadline_s: float = CONNECT_DEADLINE_S
    ) -> "RemoteVerifier":
        """Reach the verifier at `host:port` and learn what it runs; waits for one that is still starting.

        Raises:
            ServiceUnavailableError: nothing answered within `deadline_s`.
        """
        channel = open_channel(address, tls)
        try:
            target = await _get_target(verifier_pb2_grpc.VerifierServiceStub(channel), deadline_s, wait=True)
        except DeadlineError:
            await channel.close()
            raise ServiceUnavailableError(
                f"no verifier answers at {address}", hint="Start one there, or mend the address"
            ) from None
        except BaseException:
            await channel.close()
            raise
        return cls(address, channel, target)

    def target(self) -> verifier_pb2.GetTargetResponse:
        """Who it is and what it runs, as last heard."""
        return self._target

    def connect_coordinator(self, wake: Wake) -> CoordinatorLink:
        """Open a `Sessions` stream; callable from any thread, `wake` is called on the event loop."""

        async def open_call() -> object:
            await self._refresh_after_loss()
            return self._stub.Sessions()

        link = CoordinatorStream(
            self._waker,
            wake,
            open_call,
            lambda commands: verifier_pb2.SessionsRequest(commands=commands),
            lambda response: response.events,
        )
        self._links.append(link)
        return link

    def connect_drafter(self, wake: Wake) -> DrafterLink:
        """Open a `Verify` stream; callable from any thread, `wake` is called on the event loop."""

        async def open_call() -> object:
            await self._refresh_after_loss()
            return self._stub.Verify()

        link = DrafterStream(
            self._waker,
            wake,
            open_call,
            lambda items: verifier_pb2.VerifyRequest(items=items),
            lambda response: response.items,
        )
        self._links.append(link)
        return link

    async def list_sessions(self) -> list[verifier_pb2.SessionInfo]:
        """The sessions that live there now."""
        try:
            response = await self._stub.ListSessions(verifier_pb2.ListSessionsRequest(), timeout=UNARY_DEADLINE_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return list(response.sessions)

    def read_features(self, request: verifier_pb2.ReadFeaturesRequest) -> Iterator[verifier_pb2.Features]:
        """Features that a verdict had no room for, in slabs. Blocks: never call it on the event loop."""
        return iter(asyncio.run_coroutine_threadsafe(self._read_features(request), self._loop).result())

    async def _read_features(self, request: verifier_pb2.ReadFeaturesRequest) -> list[verifier_pb2.Features]:
        try:
            call = self._stub.ReadFeatures(request, timeout=_FEATURES_DEADLINE_S)
            return [response.features async for response in call]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def _refresh_after_loss(self) -> None:
        """A verifier that came back may be another one: ask before the next stream is opened."""
        lost = [link for link in self._links if link.lost is not None]
        if lost:
            self._links = [link for link in self._links if link.lost is None]
            self._target = await _get_target(self._stub, UNARY_DEADLINE_S, wait=False)

    async def close(self) -> None:
        """Close the links and the channel."""
        for link in self._links:
            link.close()
        await asyncio.gather(*(link.wait_closed() for link in self._links))
        await self._channel.close()


async def _get_target(
    stub: verifier_pb2_grpc.VerifierServiceStub, deadline_s: float, *, wait: bool
) -> verifier_pb2.GetTargetResponse:
    try:
        target: verifier_pb2.GetTargetResponse = await stub.GetTarget(
            verifier_pb2.GetTargetRequest(), timeout=deadline_s, wait_for_ready=wait
        )
        return target
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
