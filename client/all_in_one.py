"""`specla serve all`: Generate over gRPC, with verifier and drafters in the same process."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specla.client.cli.flags import Field, fields_of, take
from specla.client.config import DEFAULT_DRAFTERS, CoordinatorConfig
from specla.client.server import generation_server
from specla.drafter_service.config import DrafterConfig
from specla.rpc.serving import GrpcServer, ServingConfig
from specla.verifier_service.config import VerifierConfig

if TYPE_CHECKING:
    from specla.client.in_process import InProcess

_REMOTE = ("verifiers", "drafters", "connect_ca", "tokenizer", "advertised_address")  # of parts that are elsewhere


@dataclass(frozen=True, kw_only=True)
class _Drafters:
    """What is particular to one process.

    Attributes:
        drafters: names of the drafters that requests may choose from, the preferred one first.
    """

    drafters: tuple[str, ...] = DEFAULT_DRAFTERS


def fields() -> list[Field]:
    """Its settings: the coordinator's, the verifier's where they do not speak of sockets, and the drafters' names."""
    return [
        *fields_of(CoordinatorConfig, leave_out=_REMOTE),
        *fields_of(_Drafters),
        *(
            field
            for field in fields_of(VerifierConfig, leave_out=_REMOTE)
            if field.name not in ServingConfig.__dataclass_fields__
        ),
    ]


class AllInOne:
    """A started server and the parts behind it."""

    def __init__(self, parts: "InProcess", config: CoordinatorConfig) -> None:
        self._parts = parts
        self._coordinator = parts.coordinator(config)
        self._server: GrpcServer = generation_server(config, self._coordinator)

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return self._server.address

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ServiceUnavailableError: the port is taken.
        """
        await self._server.start()

    async def stop(self) -> None:
        """Let running generations end for `drain_s`, then cancel the rest."""
        await self._server.stop()
        self._coordinator.close()
        await asyncio.to_thread(self._parts.close)


async def serve_all(values: dict[str, Any]) -> AllInOne:
    """Load the target and serve.

    Raises:
        InvalidRequestError: a setting.
        ServiceUnavailableError: the port is taken.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    from specla.client.in_process import load  # torch: too much for `--help`

    config = take(CoordinatorConfig, {name: value for name, value in values.items() if name not in _REMOTE})
    names = take(_Drafters, values).drafters
    engine_values = {n: v for n, v in values.items() if n not in ServingConfig.__dataclass_fields__}
    parts = await load(take(VerifierConfig, engine_values), [DrafterConfig(name=name) for name in names])
    server = AllInOne(parts, config)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server
