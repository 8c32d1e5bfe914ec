"""The coordinator's settings: flags of `specla serve coordinator` and keys of its file have these names."""

from dataclasses import dataclass
from pathlib import Path

from specla.rpc.errors import InvalidRequestError
from specla.rpc.settings import ServingConfig, check_address, check_distinct


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ServingConfig):
    """How a coordinator serves; where it listens is ServingConfig's.

    Attributes:
        port: 0 lets the system choose.
        verifiers: HOST:PORT of each verifier.
        drafters: HOST:PORT of each drafter, the preferred one first.
        connect_ca: PEM file of the authority that verifiers' and drafters' certificates are signed by; unset:
            plain text to them.
        tokenizer: the target's tokenizer.json or its folder; unset: the default target's.
        credit: tokens a generation may run ahead of what its caller has taken.
        attach_timeout_s: how long a drafter has to attach before the next one is tried, seconds.
        drafter_retry_s: after how long a drafter that failed is tried again, seconds; doubles with each
            failure, up to 16 times.
        max_stop_strings: stop strings a request may have.
    """

    port: int = 50051
    verifiers: tuple[str, ...] = ("127.0.0.1:50061",)
    drafters: tuple[str, ...] = ()
    connect_ca: Path | None = None
    tokenizer: Path | None = None
    credit: int = 256
    attach_timeout_s: float = 2.0
    drafter_retry_s: float = 2.0
    max_stop_strings: int = 16

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            InvalidRequestError: names the field and its range.
        """
        self.check_serving()
        for name, low, high in (
            ("credit", 2, 1_000_000),
            ("attach_timeout_s", 0.001, 3600.0),
            ("drafter_retry_s", 0.001, 3600.0),
            ("max_stop_strings", 0, 1024),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequestError(name, f"{name} is {value}", hint=f"It must lie in [{low}, {high}]")
        for field, addresses in (("verifiers", self.verifiers), ("drafters", self.drafters)):
            for address in addresses:
                check_address(field, address)
            check_distinct(field, addresses)
        if not self.verifiers:
            raise InvalidRequestError("verifiers", "there is no verifier", hint="Name at least one HOST:PORT")
