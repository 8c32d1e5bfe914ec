"""GenerationService over gRPC: a thin shell over a Coordinator, and the coordinator as a service of its own."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.connections import Connections
from specla.client.coordinator.coordinator import Coordinator
from specla.client.default_target import default_target
from specla.client.tokenizer import Tokenizer
from specla.rpc.serving import GrpcServer
from specla.rpc.settings import ServingConfig
from specla.v1 import generation_pb2, generation_pb2_grpc

log = structlog.get_logger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Parses, calls, serialises; errors become statuses in the server's interceptor."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """See generation.proto. The end of the call, however it comes, cancels the session."""
        answers = self._coordinator.generate(request, time_left=context.time_remaining())
        async with aclosing(answers) as responses:
            async for response in responses:
                yield response

    async def GetModel(  # noqa: N802
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        """What requests can get now."""
        return self._coordinator.model()


def generation_server(config: ServingConfig, coordinator: Coordinator) -> GrpcServer:
    """A server of GenerationService, not started yet; its health follows `coordinator.ready`."""
    servicer = GenerationServicer(coordinator)
    return GrpcServer(
        config,
        [SERVICE],
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server),
        is_live=lambda: coordinator.ready,
        resume_hint="Try again, or go on elsewhere with resumed_ids, the seed and the numerics_id",
    )


class CoordinatorServer:
    """The coordinator as a service, with verifiers and drafters behind sockets.

    Raises:
        InvalidRequestError: there is no tokenizer where the config says.
        UnsupportedModelError: the tokenizer is not supported.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        tokenizer = Tokenizer.load(config.tokenizer if config.tokenizer is not None else default_target())
        self._coordinator = Coordinator([], [], tokenizer, config, on_verifier_lost=self._on_verifier_lost)
        self._connections = Connections(config, self._coordinator)
        self._server = generation_server(config, self._coordinator)

    @property
    def address(self) -> str:
        """`host:port` as bound; known once started."""
        return self._server.address

    @property
    def ready(self) -> bool:
        """Whether a request could run now."""
        return self._coordinator.ready

    async def start(self) -> None:
        """Bind at once, and return when a verifier is connected; until then the health is NOT_SERVING.

        Raises:
            ServiceUnavailableError: the port is taken.
        """
        await self._server.start()
        log.info("listening", address=self._server.address)
        await self._connections.start()

    async def stop(self) -> None:
        """Let running generations end for `drain_s`, then cancel the rest. Harmless twice."""
        await self._server.stop()
        self._coordinator.close()
        await self._connections.close()

    async def wait_stopped(self) -> None:
        """Return once the server has stopped."""
        await self._server.wait_stopped()

    def _on_verifier_lost(self, port: Any) -> None:
        self._connections.on_verifier_lost(port)
