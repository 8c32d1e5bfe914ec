"""How a service listens and how large a message may be; knows nothing of gRPC, so that every config may extend it."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specla.rpc.errors import InvalidRequestError

MAX_MESSAGE_BYTES = 64 << 20  # a prompt of 100,000 ids is 400 KiB, a slab of features some MiB


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
            raise InvalidRequestError("port", f"port is {self.port}", hint="Give 0 (any) to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError("tls_cert", "TLS needs both a certificate and a key", hint="Give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidRequestError("tls_client_ca", "client certificates need TLS", hint="Give tls_cert and tls_key")
        if self.max_concurrent_calls < 1:
            raise InvalidRequestError(
                "max_concurrent_calls", f"max_concurrent_calls is {self.max_concurrent_calls}", hint="Give 1 or more"
            )
        if not 0 <= self.drain_s < float("inf"):
            raise InvalidRequestError("drain_s", f"drain_s is {self.drain_s}", hint="Give seconds, 0 or more")
        if self.tls_cert is None and not self.insecure and not is_loopback(self.host):
            raise InvalidRequestError(
                "host",
                f"{self.host} is reachable from other machines and would be served in plain text",
                hint="Give tls_cert and tls_key, or say insecure inside a network you trust",
            )


def check_file(field: str, path: Path | None) -> None:
    """Refuse a file that cannot be read; None is no file.

    Raises:
        InvalidRequestError: names the field.
    """
    if path is None:
        return
    try:
        path.open("rb").close()
    except OSError as error:
        raise InvalidRequestError(field, f"{path} cannot be read: {error.strerror}", hint="Give a PEM file") from None


def check_distinct(field: str, names: Sequence[str]) -> None:
    """Refuse a list that names something twice.

    Raises:
        InvalidRequestError: names the field.
    """
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise InvalidRequestError(field, f"{twice[:200]!r} is named twice", hint="Name it once")


def is_loopback(host: str) -> bool:
    """Whether a listening address cannot be reached from another machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(field: str, address: str) -> None:
    """Refuse what is not HOST:PORT; gRPC would take port 99999 for 34463.

    Raises:
        InvalidRequestError: names the field.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
        raise InvalidRequestError(field, f"{address[:200]!r} is not HOST:PORT", hint="Give a port from 1 to 65535")
