"""The server shell that all services share: where it listens, how it is guarded, how it stops."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specla.rpc.errors import ServiceUnavailableError, SpeclaError
from specla.rpc.health import HealthServicer
from specla.rpc.interceptors import CallGuard
from specla.rpc.settings import MAX_MESSAGE_BYTES, ServingConfig, check_file

log = structlog.get_logger("specla.rpc")

_LAST_WORDS_S = 1.0  # for calls in hand to end with an error of ours, before gRPC cancels them with words of its own
_ABORT_GRACE_S = 2.0  # for handlers to run their `finally` once their calls were cancelled
_MENDING = {
    errno.EADDRINUSE: "Another program has the port: give another one, or 0 for any",
    errno.EACCES: "This user may not have the port: give one from 1024 on, or 0 for any",
}


class GrpcServer:
    """One grpc.aio server with health, reflection, limits and an orderly stop.

    Args:
        config: where to listen.
        services: full names of the services, for health and reflection.
        register: adds their servicers to the server; called by `start`.
        is_live: whether the engine behind them works, asked at every health check.
        resume_hint: how a caller goes on whose call the stop has ended.
    """

    def __init__(
        self,
        config: ServingConfig,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        is_live: Callable[[], bool] = lambda: True,
        *,
        resume_hint: str = "Try again when the service is back, or ask another one",
    ):
        self.config = config
        self.port = 0
        self._resume_hint = resume_hint
        self._is_started = False
        self._guard = CallGuard(config.max_concurrent_calls)
        self._health = HealthServicer(services, is_live)
        self._server = grpc.aio.server(interceptors=[self._guard], options=_server_options())
        self._register = register
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
            InvalidRequestError: a file of the certificates cannot be read.
            ServiceUnavailableError: the port is taken or the address is not this machine's.
        """
        if self.port:
            return
        for field in ("tls_cert", "tls_key", "tls_client_ca"):
            check_file(field, getattr(self.config, field))
        wanted = _join(self.config.host, self.config.port)
        _check_free(self.config.host, self.config.port, wanted)
        try:
            credentials = _credentials(self.config)
            if credentials is None:
                self.port = self._server.add_insecure_port(wanted)
            else:
                self.port = self._server.add_secure_port(wanted, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            pem = ", or tls_cert and tls_key are no PEM pair" if self.config.tls_cert is not None else ""
            raise ServiceUnavailableError(
                f"cannot listen on {wanted}",
                hint=f"Another program took the port just now, or the host is abbreviated: write the host in full{pem}",
            )

    async def start(self) -> None:
        """Serve; binds first, and raises what `bind` raises, if that has not been done."""
        self.bind()
        self._register(self._server)
        self._is_started = True
        await self._server.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, let those in hand end for a time, then end them with UNAVAILABLE. Harmless twice.

        Returns once they have ended.

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
        stopping = asyncio.create_task(self._server.stop(grace_s + _LAST_WORDS_S))
        await asyncio.wait([stopping], timeout=grace_s)
        if not stopping.done():
            self._guard.end_calls(self._last_words())
        await stopping
        if self._guard.calls:
            await asyncio.wait(list(self._guard.calls), timeout=_ABORT_GRACE_S)
        if self._guard.calls:
            log.warning("calls outlived the stop", calls=len(self._guard.calls))

    def _last_words(self) -> SpeclaError:
        return ServiceUnavailableError("the service stopped before the call had ended", hint=self._resume_hint)

    async def wait_stopped(self) -> None:
        """Return once the server has stopped, whoever stopped it."""
        await self._server.wait_for_termination()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _check_free(host: str, port: int, wanted: str) -> None:
    """Refuse what no socket can be bound to, before gRPC tries: it writes lines of its own to standard error.

    Raises:
        ServiceUnavailableError: the port is taken or the address is not this machine's.
    """
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        faults = []
        for family, kind, protocol, _, place in places:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: one just closed is free
                    probe.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise  # at one of them: the name would lead to two programs
                faults.append(error)
        if len(faults) == len(places):  # of several addresses, gRPC is content with one
            raise faults[-1]
    except (OSError, UnicodeError) as error:
        code, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, "this is no host's name")
        hint = _MENDING.get(code or 0, "Give an address of this machine")
        raise ServiceUnavailableError(f"cannot listen on {wanted}: {why}", hint=hint) from None


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
