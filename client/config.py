"""The coordinator's settings: flags of `specla serve coordinator` and keys of its file have these names."""

from dataclasses import dataclass
from pathlib import Path

from specla.rpc.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """How a coordinator serves.

    Attributes:
        listen: address to listen on; beyond loopback only with TLS or `insecure`.
        port: TCP port; 0 takes a free one.
        verifiers: HOST:PORT of each verifier.
        drafters: HOST:PORT of each drafter, the preferred one first.
        tokenizer: the target's tokenizer.json or its folder; unset: the default target's.
        credit: tokens a generation may run ahead of what its caller has taken.
        attach_timeout: seconds a drafter has to attach before the next one is tried.
        drafter_retry: seconds before a drafter that failed is tried again; doubles with each failure, up to 16 times.
        max_stop_strings: stop strings a request may have.
        max_concurrent: generations at a time; further ones are refused with a hint to come back.
        grace_s: seconds that running generations have after a signal to stop.
        insecure: serve beyond loopback without TLS.
        tls_certificate: file of the PEM certificate chain; needs `tls_key`.
        tls_key: file of the PEM private key.
    """

    listen: str = "127.0.0.1"
    port: int = 50051
    verifiers: tuple[str, ...] = ("127.0.0.1:50061",)
    drafters: tuple[str, ...] = ()
    tokenizer: Path | None = None
    credit: int = 256
    attach_timeout: float = 2.0
    drafter_retry: float = 2.0
    max_stop_strings: int = 16
    max_concurrent: int = 256
    grace_s: float = 10.0
    insecure: bool = False
    tls_certificate: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            InvalidRequestError: names the field and its range.
        """
        for name, low, high in (
            ("port", 0, 65535),
            ("credit", 2, 1_000_000),
            ("attach_timeout", 0.001, 3600.0),
            ("drafter_retry", 0.001, 3600.0),
            ("max_stop_strings", 0, 1024),
            ("max_concurrent", 1, 100_000),
            ("grace_s", 0.0, 3600.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequestError(name, f"{name} is {value}", hint=f"it must lie in [{low}, {high}]")
        if not self.verifiers:
            raise InvalidRequestError("verifiers", "there is no verifier", hint="name at least one HOST:PORT")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise InvalidRequestError("tls_key", "TLS needs both tls_certificate and tls_key", hint="give both or none")
