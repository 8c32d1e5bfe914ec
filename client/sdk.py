"""Client and AsyncClient: generation by a coordinator behind a socket."""

import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

import grpc

from specla.client.blocking import BlockingGenerator, LoopThread
from specla.client.options import Options, build_request, timeout_of
from specla.client.results import Collector, Event, GenerateResult, ModelInfo, event_of, model_info
from specla.rpc.channel import UNARY_DEADLINE_S, ClientTls, from_rpc_error, open_channel
from specla.rpc.errors import InternalError
from specla.rpc.settings import check_address
from specla.v1 import generation_pb2, generation_pb2_grpc

DEFAULT_SERVER = "127.0.0.1:50051"


class AsyncClient:
    """For callers on an event loop; make it there. Close it, or use `async with`."""

    def __init__(self, server: str = DEFAULT_SERVER, *, tls: ClientTls | None = None) -> None:
        """`server`: HOST:PORT of a coordinator; connects when first used.

        Raises:
            InvalidRequestError: `server` is not HOST:PORT.
        """
        check_address("server", server)
        self._channel = open_channel(server, tls)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> GenerateResult:
        """Generate a completion of a text, or of token ids, and wait for all of it.

        Args:
            prompt: text, or token ids.
            options: see `Options`.

        Raises:
            SpeclaError: what went wrong, and how to mend it; its class says what kind.
        """
        collector = Collector()
        async with aclosing(self.stream(prompt, **options)) as events:
            async for event in events:
                collector.add(event)
        return collector.result()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The same as it comes: Started, Deltas, Finished. Closing the iterator cancels the generation."""
        timeout = timeout_of(options)
        return self.events(build_request(prompt, options), timeout)

    async def events(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """The events of a ready-made request; `timeout_s` in seconds.

        Raises:
            SpeclaError: as `generate`.
        """
        call = self._stub.Generate(request, timeout=timeout_s)
        finished = False
        try:
            async for response in call:
                event = event_of(response)
                if event is not None:
                    yield event
                finished = response.HasField("finished")
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
        if not finished:
            raise InternalError("the server ended the stream without Finished")

    async def model(self) -> ModelInfo:
        """What the server can generate with.

        Raises:
            SpeclaError: as `generate`.
        """
        try:
            answer = await self._stub.GetModel(generation_pb2.GetModelRequest(), timeout=UNARY_DEADLINE_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return model_info(answer)

    async def close(self) -> None:
        """Close the channel; generations of this client are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client(BlockingGenerator):
    """For everybody else. Usable from several threads; close it, or use `with`."""

    def __init__(self, server: str = DEFAULT_SERVER, *, tls: ClientTls | None = None) -> None:
        """`server`: HOST:PORT of a coordinator; connects when first used.

        Raises:
            InvalidRequestError: `server` is not HOST:PORT.
        """
        check_address("server", server)  # before there is a thread that would have to be closed
        super().__init__("specla-client")
        self._client = self._thread.run(_on_loop(server, tls))
        self._shut = weakref.finalize(self, _shut, self._thread, self._client)

    def model(self) -> ModelInfo:
        """What the server can generate with.

        Raises:
            SpeclaError: as `generate`.
        """
        return self._thread.run(self._client.model())

    def close(self) -> None:
        """Close the channel; generations of this client are cancelled. Harmless twice."""
        self._shut()

    def _events(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        return self._client.events(request, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _on_loop(server: str, tls: ClientTls | None) -> AsyncClient:
    return AsyncClient(server, tls=tls)


def _shut(thread: LoopThread, client: AsyncClient) -> None:
    thread.run(client.close())
    thread.close()
