"""The server shell that all services share: where it listens, how it is guarded, how it stops."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specla.rpc.channel import MAX_MESSAGE_BYTES
from specla.rpc.errors import InvalidRequestError, ServiceUnavailableError
from specla.rpc.health import HealthServicer
from specla.rpc.interceptors import CallGuard

log = structlog.get_logger("specla.rpc")

_ABORT_GRACE_S = 2.0  # for handlers to run their `finally` once their calls were cancelled


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Where and how a service listens. A service's own config extends it.

    Attributes:
        host: address to listen on; beyond loopback only with TLS or `insecure`.
        port: 0 lets the system choose.
        insecure: allow plain text beyond loopback (inside a trusted network).
        tls_cert: PEM file of the server's certificate chain.
        tls_key: PEM file of its key.
        tls_client_ca: PEM file of the authority that clients must be signed by; None: any client.
        max_concurrent_calls: calls beyond it are refused with RESOURCE_EXHAUSTED.
        drain_s: how long a stop waits for work in hand, seconds.
    """

    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    max_concurrent_calls: int = 1024
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        self.check_serving()

    def check_serving(self) -> None:
        """Refuse what cannot be served.

        Raises:
            InvalidRequestError: a port out of range, half of a key pair, or plain text beyond loopback.
        """
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError("port", f"port {self.port} does not exist", hint="0 to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError("tls_cert", "TLS needs both a certificate and a key", hint="Give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidRequestError("tls_client_ca", "client certificates need TLS", hint="Give tls_cert and tls_key")
        if self.max_concurrent_calls < 1:
            raise InvalidRequestError("max_concurrent_calls", "no call would be served", hint="At least 1")
        if not 0 <= self.drain_s < float("inf"):
            raise InvalidRequestError("drain_s", "not a time", hint="Seconds, 0 or more")
        if self.tls_cert is None and not self.insecure and not is_loopback(self.host):
            raise InvalidRequestError(
                "host",
                f"{self.host} is reachable from other machines and would be served in plain text",
                hint="Give tls_cert and tls_key, or say insecure inside a network you trust",
            )


def is_loopback(host: str) -> bool:
    """Whether a listening address cannot be reached from another machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class GrpcServer:
    """One grpc.aio server with health, reflection, limits and an orderly stop.

    Args:
        config: where to listen.
        services: full names of the services, for health and reflection.
        register: adds their servicers to the server.
        is_live: whether the engine behind them works, asked at every health check.
    """

    def __init__(
        self,
        config: ServingConfig,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        is_live: Callable[[], bool] = lambda: True,
    ):
        self.config = config
        self.port = 0
        self._is_started = False
        self._guard = CallGuard(config.max_concurrent_calls)
        self._health = HealthServicer(services, is_live)
        self._server = grpc.aio.server(interceptors=[self._guard], options=_server_options())
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection([*services, health_name, reflection.SERVICE_NAME], self._server)
        self._stopped: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """`host:port` as bound; known once started."""
        return _join(self.config.host, self.port)

    def bind(self) -> None:
        """Take the port; calls are answered from `start` on. Harmless twice.

        Raises:
            ServiceUnavailableError: the port is taken or the address is not this machine's.
        """
        if self.port:
            return
        wanted = _join(self.config.host, self.config.port)
        try:
            credentials = _credentials(self.config)
            if credentials is None:
                self.port = self._server.add_insecure_port(wanted)
            else:
                self.port = self._server.add_secure_port(wanted, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ServiceUnavailableError(
                f"cannot listen on {wanted}", hint="Another program has the port; choose another one, or 0 for any"
            )

    async def start(self) -> None:
        """Serve; binds first, and raises what `bind` raises, if that has not been done."""
        self.bind()
        self._is_started = True
        await self._server.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, let those in hand end for a time, then cancel them and await their ends. Harmless twice.

        Args:
            grace_s: how long they may take, seconds; None: the config's `drain_s`.
        """
        if self._stopped is None:
            grace = self.config.drain_s if grace_s is None else grace_s
            self._stopped = asyncio.create_task(self._stop(grace))
        await asyncio.shield(self._stopped)

    async def _stop(self, grace_s: float) -> None:
        self._health.drain()
        if self.port and not self._is_started:
            await self._server.start()  # only a server that was started lets its port go
        await self._server.stop(grace_s)
        if self._guard.calls:
            await asyncio.wait(list(self._guard.calls), timeout=_ABORT_GRACE_S)
        if self._guard.calls:
            log.warning("calls outlived the stop", calls=len(self._guard.calls))

    async def wait_stopped(self) -> None:
        """Return once the server has stopped, whoever stopped it."""
        await self._server.wait_for_termination()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _server_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # on by default: a second server would take the same port unseen
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _credentials(config: ServingConfig) -> grpc.ServerCredentials | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return grpc.ssl_server_credentials(
        [(config.tls_key.read_bytes(), config.tls_cert.read_bytes())],
        root_certificates=config.tls_client_ca.read_bytes() if config.tls_client_ca else None,
        require_client_auth=config.tls_client_ca is not None,
    )
