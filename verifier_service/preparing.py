"""Before an engine serves: its usual passes are made ready, which takes a while on a GPU, and timed."""

import time
from collections.abc import Callable
from functools import partial

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.cost_model import PassTimes, measure
from specla.verifier_service.devices import is_out_of_memory
from specla.verifier_service.engine import Engine
from specla.verifier_service.memory import MIB

log = structlog.get_logger("specla.verifier")


def pass_times_of(engine: Engine, clock: Callable[[], float]) -> PassTimes:
    """Forecasts of an engine's passes, which are ready then."""
    prepare(engine)
    return measure(partial(engine.measure_pass_times, repeats=1), clock)


def prepare(engine: Engine) -> None:
    """A bar on a terminal, and one line in the log when there was something to do; another one where that has taken
    more memory than was counted.

    Raises:
        InvalidRequestError: a GPU has no room for the passes beside the sessions.
    """
    begun, console = time.monotonic(), Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    made = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("making passes ready", total=None, visible=False)

        def show(done: int, total: int) -> None:
            nonlocal made
            made = done
            bar.update(task, completed=done, total=total, visible=True)

        try:
            engine.prepare(show)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InvalidRequestError(
                "memory_mib",
                f"the GPU has no room for more than {made} of its usual passes",
                hint="Give a smaller memory_mib than what is free, or fewer max_sessions",
            ) from None
    if made:
        log.info("passes_ready", passes=made, seconds=round(time.monotonic() - begun, 1))
    beyond = engine.memory.beyond(engine.max_sessions, engine.config.max_rows)
    if beyond > 0:
        log.warning("memory_beyond_account", mib=-(-beyond // MIB))
