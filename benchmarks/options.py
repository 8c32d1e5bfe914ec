"""What the benchmark commands share: options, progress bars, and how a report is shown and kept."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specla.benchmarks.report import Report
from specla.drafter_service.config import BY_NAME, DrafterConfig
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.targets.config import check_folder

MOST_TOKENS = VerifierConfig.max_new_tokens
MOST_THREADS = 1024
COLDEST = 1e-4  # of the temperatures that are not greedy


def _writable(path: Path | None) -> Path | None:
    """Refuses, before anything is measured, a place where nothing can be written."""
    if path is not None:
        there = path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}") from None
        if not there:
            path.unlink()
    return path


JsonOption = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, callback=_writable, help="Where to write the result.")
]

ThreadsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST_THREADS,
        help="Threads of one operation; 0: the cores. 1 where other programs keep them busy.",
    ),
]


ALL_DRAFTERS = ",".join(BY_NAME)
DraftersOption = Annotated[str, typer.Option(help=f"Separated by commas, of {', '.join(BY_NAME)}.")]


def folder_of(target: Path | None) -> Path:
    """Where the target lies: as given, else the shipped one's folder.

    Raises:
        InvalidRequestError: it holds no target.
    """
    from specla.client.default_target import default_target  # brings protobuf, which not all benchmarks need

    folder = target or default_target()
    check_folder(folder)
    return folder


def numbers(text: str, option: str) -> list[float]:
    """Numbers separated by commas; anything else is a usage error."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint=option) from None


def checked_temperature(degrees: float | None, option: str = "--temperature") -> float | None:
    """A temperature that a request may have, or None; anything else is a usage error."""
    if degrees is not None and degrees != 0 and not COLDEST <= degrees < math.inf:  # NaN is refused too
        raise typer.BadParameter(f"{degrees:g} is neither 0 (greedy) nor at least {COLDEST:g}", param_hint=option)
    return degrees


def temperatures_of(text: str, option: str) -> list[float]:
    """Temperatures separated by commas."""
    degrees = numbers(text, option)
    for one in degrees:
        checked_temperature(one, option)
    return degrees


def integers(text: str, option: str, low: int, high: int) -> list[int]:
    """Integers of a range, separated by commas."""
    found = numbers(text, option)
    for one in found:
        if not low <= one <= high or one != int(one):
            raise typer.BadParameter(f"{one:g} is no integer from {low} to {high}", param_hint=option)
    return [int(one) for one in found]


def drafters_of(text: str, option: str) -> list[str]:
    """Names separated by commas, plain decoding among them: it is what the others are compared with."""
    names = [name.strip() for name in text.split(",")]
    try:
        DrafterConfig.of_names(names)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if "none" not in names:
        raise typer.BadParameter("none, plain decoding, must be among them", param_hint=option)
    return names


def finish(made: Report, json: Path | None) -> None:
    """Shows a report, writes it, and ends with status 1 if a goal is missed."""
    console = Console()
    made.show(console)
    if json is not None:
        made.write(json)
        console.print(f"written to {json}")
    if not made.none_missed:
        raise typer.Exit(1)


def progress_bar() -> Progress:
    """A bar with counts and the time that remains, on the error stream."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
