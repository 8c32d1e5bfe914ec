"""The standard health service, answered from the service's real state at the moment of asking."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_WATCH_EVERY_S = 0.25


class HealthServicer(health_pb2_grpc.HealthServicer):
    """SERVING while `is_live()` says so and the server is not draining.

    Args:
        services: full names that may be asked for; the empty name stands for the whole server.
        is_live: asked at every check; must return at once.
    """

    def __init__(self, services: Collection[str], is_live: Callable[[], bool]):
        self._services = {"", *services}
        self._is_live = is_live
        self._draining = False

    def drain(self) -> None:
        """From now on NOT_SERVING, so that balancers send new calls elsewhere."""
        self._draining = True

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """The state now; NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return self._state(request.service)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now and at each change, seen within a quarter of a second."""
        told: int | None = None
        while True:
            state = self._state(request.service)
            if state.status != told:
                told = state.status
                yield state
            await asyncio.sleep(_WATCH_EVERY_S)

    def _state(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if not self._draining and self._is_live():
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
