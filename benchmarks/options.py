"""What the benchmark commands share: options, progress bars, and how a report is shown and kept."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specla.benchmarks.report import Report


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


def numbers(text: str, option: str) -> list[float]:
    """Numbers separated by commas; anything else is a usage error."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint=option) from None


def finish(made: Report, json: Path | None) -> None:
    """Shows a report, writes it, and ends with status 1 if a goal is missed."""
    console = Console()
    made.show(console)
    if json is not None:
        made.write(json)
        console.print(f"written to {json}")
    if not made.all_met:
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
