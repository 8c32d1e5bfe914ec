"""`specla serve ROLE`: runs a service until a signal, and says on standard output when it is ready and where."""

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Protocol

import structlog
import typer

from specla.client.cli.exits import exit_codes
from specla.client.cli.flags import Field, fields_of, flagged, take
from specla.client.logs import configure_logs

log = structlog.get_logger(__name__)

Values = dict[str, Any]


class Service(Protocol):
    """What a role starts."""

    @property
    def address(self) -> str:
        """`host:port` as bound."""

    async def stop(self) -> None:
        """Drain, then end."""


class Role(NamedTuple):
    """One `specla serve` command.

    Attributes:
        text: its help.
        fields: its settings.
        start: makes and starts the service.
    """

    text: str
    fields: Callable[[], list[Field]]
    start: Callable[[Values], Coroutine[Any, Any, Service]]


def _verifier_fields() -> list[Field]:
    from specla.verifier_service.config import VerifierConfig

    return fields_of(VerifierConfig)


async def _start_verifier(values: Values) -> Service:
    from specla.verifier_service.config import VerifierConfig
    from specla.verifier_service.targets.config import check_folder

    config = take(VerifierConfig, values)
    check_folder(config.target)
    from specla.verifier_service.server import serve_verifier  # torch: later than what may be refused

    return await serve_verifier(config)


def _drafter_fields() -> list[Field]:
    from specla.drafter_service.config import DrafterConfig

    return fields_of(DrafterConfig)


async def _start_drafter(values: Values) -> Service:
    from specla.drafter_service.config import DrafterConfig
    from specla.drafter_service.server import serve_drafter

    return await serve_drafter(take(DrafterConfig, values))


def _coordinator_fields() -> list[Field]:
    from specla.client.config import CoordinatorConfig

    return fields_of(CoordinatorConfig)


async def _start_coordinator(values: Values) -> Service:
    from specla.client.config import CoordinatorConfig
    from specla.client.server import CoordinatorServer

    server = CoordinatorServer(take(CoordinatorConfig, values))
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


def _all_fields() -> list[Field]:
    from specla.client.all_in_one import fields

    return fields()


async def _start_all(values: Values) -> Service:
    from specla.client.all_in_one import serve_all

    return await serve_all(values)


ROLES = {
    "all": Role("Everything in one process: no sockets between the parts.", _all_fields, _start_all),
    "verifier": Role("A verifier: weights and sessions, one device.", _verifier_fields, _start_verifier),
    "drafter": Role("A drafter.", _drafter_fields, _start_drafter),
    "coordinator": Role("A coordinator: Generate for clients.", _coordinator_fields, _start_coordinator),
}


def command_of(name: str) -> Any:
    """The command of a role; its flags are read from the config classes now."""
    role = ROLES[name]

    def run(values: Values, log_level: str, log_format: str) -> None:
        configure_logs(log_level, log_format)
        asyncio.run(_serve("coordinator" if name == "all" else name, role.start(values)))

    def guarded(**flags: Any) -> None:
        with exit_codes():
            command(**flags)

    command = flagged(role.fields(), run)
    guarded.__signature__ = command.__signature__  # type: ignore[attr-defined]
    guarded.__annotations__ = command.__annotations__
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=role.text)(guarded)
    made = typer.main.get_command(app)
    made.name = name
    return made


async def _serve(name: str, starting: Coroutine[Any, Any, Service]) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, loop, number, told)
    service = await _unless(told, starting)
    if service is None:
        return  # told to stop before it was ready
    gc.collect()
    gc.freeze()  # what is there now lives as long as the service: a collection that looked through it took 0.1 s
    typer.echo(f"READY {name}={service.address}")
    await told.wait()
    log.info("stopping", role=name)
    await service.stop()


def _on_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals, told: asyncio.Event) -> None:
    told.set()
    loop.remove_signal_handler(number)  # the second one of a kind ends the process at once


async def _unless(told: asyncio.Event, starting: Awaitable[Service]) -> Service | None:
    start = asyncio.ensure_future(starting)
    stop = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            return start.result()
        start.cancel()
        await asyncio.wait([start])
        if not start.cancelled() and start.exception() is None:
            await start.result().stop()
        return None
    finally:
        stop.cancel()
