"""Keeps a coordinator joined to verifiers and drafters behind sockets: connects, notices loss, connects again."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.rpc.channel import ClientTls
from specla.rpc.errors import ServiceUnavailableError, SpeclaError
from specla.rpc.links import VerifierPort
from specla.rpc.remote_drafter import RemoteDrafter
from specla.rpc.remote_verifier import RemoteVerifier
from specla.rpc.settings import check_file

log = structlog.get_logger(__name__)

_PATIENCE_S = 2.0  # for drafters, when there is a verifier already: they may come later
_AFTER_REFUSAL_S = 5.0  # a part that answers but does not fit is asked again, in case it is replaced


class Connections:
    """One task an address. Belongs to the event loop it was started on."""

    def __init__(self, config: CoordinatorConfig, coordinator: Coordinator) -> None:
        self._config = config
        self._coordinator = coordinator
        check_file("connect_ca", config.connect_ca)
        self._tls = ClientTls(root_ca=config.connect_ca) if config.connect_ca is not None else None
        self._tasks: list[asyncio.Task[None]] = []
        self._verifier_there = asyncio.Event()
        self._lost: dict[VerifierPort, asyncio.Event] = {}

    async def start(self) -> None:
        """Begin to connect; returns once a verifier is there and the drafters are too, or have had their time."""
        drafters = [asyncio.Event() for _ in self._config.drafters]
        for address in self._config.verifiers:
            self._spawn(self._keep_verifier(address))
        for rank, (address, there) in enumerate(zip(self._config.drafters, drafters, strict=True)):
            self._spawn(self._find_drafter(address, rank, there))
        await self._verifier_there.wait()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.gather(*(there.wait() for there in drafters))
        except TimeoutError:
            missing = [name for name, it in zip(self._config.drafters, drafters, strict=True) if not it.is_set()]
            log.warning("drafters missing", addresses=missing)

    def on_verifier_lost(self, port: VerifierPort) -> None:
        """The coordinator lost a verifier: connect again."""
        self._lost[port].set()

    async def close(self) -> None:
        """Stop connecting. Links are the coordinator's to close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _keep_verifier(self, address: str) -> None:
        while True:
            try:
                port = await RemoteVerifier.connect(address, tls=self._tls)
            except ServiceUnavailableError as error:
                log.warning("verifier does not answer", address=address, why=error.message)
                continue  # connect has waited already
            except SpeclaError as error:
                await self._refused(address, error)
                continue
            lost = self._lost[port] = asyncio.Event()
            try:
                self._coordinator.add_verifier(port)
                self._verifier_there.set()
                await lost.wait()
            except SpeclaError as error:
                await self._refused(address, error)
            finally:
                del self._lost[port]
                await port.close()

    async def _find_drafter(self, address: str, rank: int, there: asyncio.Event) -> None:
        while not there.is_set():
            try:
                port = await RemoteDrafter.connect(address, tls=self._tls)
            except ServiceUnavailableError as error:
                log.warning("drafter does not answer", address=address, why=error.message)
            except SpeclaError as error:
                await self._refused(address, error)
            else:
                # From here on the channel connects again by itself, and sessions try it again by themselves.
                self._coordinator.add_drafter(port, rank=rank)
                there.set()

    async def _refused(self, address: str, error: SpeclaError) -> None:
        log.error("cannot use the part there", address=address, why=error.message, hint=error.hint)
        await asyncio.sleep(_AFTER_REFUSAL_S)
