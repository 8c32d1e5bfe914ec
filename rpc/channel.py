"""The client's end of a gRPC channel: options that match the servers', deadlines, errors turned back into ours."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from google.rpc import status_pb2

from specla.rpc import errors
from specla.rpc.errors import SpeclaError
from specla.rpc.settings import MAX_MESSAGE_BYTES
from specla.rpc.status import from_status

UNARY_DEADLINE_S = 5.0
CONNECT_DEADLINE_S = 10.0

_DETAILS_KEY = "grpc-status-details-bin"

# What a bare status means where the other side sent no details (a proxy, or gRPC itself).
_BY_CODE: dict[grpc.StatusCode, type[SpeclaError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.ServiceUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.SessionCancelledError,
}


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """How a client proves the server's name, and its own where the server asks for it.

    Attributes:
        root_ca: PEM file of the authority that signed the server's certificate; None: the system's.
        cert: PEM file of the client's certificate chain, None: the client shows none.
        key: PEM file of its key.
    """

    root_ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def open_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to `host:port` with this project's message limit and keepalive. Connects when first used."""
    options: list[tuple[str, int]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.root_ca.read_bytes() if tls.root_ca else None,
        private_key=tls.key.read_bytes() if tls.key else None,
        certificate_chain=tls.cert.read_bytes() if tls.cert else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


def from_rpc_error(error: grpc.RpcError) -> SpeclaError:
    """The SpeclaError that a failed call stands for, details included where the server sent them."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return errors.InternalError(f"gRPC call failed with {type(error).__name__}")
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    message = error.details() or error.code().name
    cls = _BY_CODE.get(error.code())
    if cls is not None:
        return cls(message)
    return from_status(status_pb2.Status(code=error.code().value[0], message=message))
