"""`specla serve all`: Generate over gRPC, with verifier and drafters in the same process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specla.client.cli.flags import Field, fields_of, take
from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.client.server import generation_server
from specla.client.tokenizer import Tokenizer
from specla.drafter_service.config import DEFAULTS, DrafterConfig, NameAlone
from specla.rpc.settings import ServingConfig
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.targets.config import check_folder

if TYPE_CHECKING:
    from specla.client.in_process import InProcess

_REMOTE = ("verifiers", "drafters", "connect_ca", "tokenizer", "advertised_address")  # of parts that are elsewhere


@dataclass(frozen=True, kw_only=True)
class _Drafters:
    """What is particular to one process.

    Attributes:
        drafters: drafters that requests may choose from, the preferred one first.
    """

    drafters: tuple[NameAlone, ...] = DEFAULTS


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
    """The server and, once loaded, the parts behind it."""

    def __init__(self, config: CoordinatorConfig, tokenizer: Tokenizer) -> None:
        self._coordinator = Coordinator([], [], tokenizer, config)
        self._server = generation_server(config, self._coordinator)
        self._parts: InProcess | None = None

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return self._server.address

    async def start(self, config: VerifierConfig, drafters: Sequence[DrafterConfig]) -> None:
        """Bind, so that a busy port is known before the target is loaded; load; serve.

        Raises:
            SpeclaError: as `serve_all`.
        """
        from specla.client.in_process import load  # torch: too much for `--help`

        self._server.bind()
        self._parts = await load(config, drafters)
        self._parts.join(self._coordinator)
        await self._server.start()

    async def stop(self) -> None:
        """Let running generations end for `drain_s`, then cancel the rest."""
        await self._server.stop()
        self._coordinator.close()
        if self._parts is not None:
            await asyncio.to_thread(self._parts.close)


async def serve_all(values: dict[str, Any]) -> AllInOne:
    """Load the target and serve.

    Raises:
        InvalidRequestError: a setting.
        ServiceUnavailableError: the port is taken.
        UnsupportedModelError: a checkpoint or tokenizer that cannot be run.
    """
    config = take(CoordinatorConfig, {name: value for name, value in values.items() if name not in _REMOTE})
    drafters = DrafterConfig.of_names(take(_Drafters, values).drafters)
    target = take(VerifierConfig, {n: v for n, v in values.items() if n not in ServingConfig.__dataclass_fields__})
    check_folder(target.target)
    server = AllInOne(config, Tokenizer.load(target.target))
    try:
        await server.start(target, drafters)
    except BaseException:
        await server.stop()
        raise
    return server
