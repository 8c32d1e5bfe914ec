"""The benchmarks that need a GPU: kernels, and whole passes."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from specla.benchmarks.options import JsonOption, finish, numbers
from specla.benchmarks.report import Report


def kernels(
    only: Annotated[
        Literal["all", "goals"], typer.Option(help="goals: nothing but the cases that goals hang on, in fewer rounds.")
    ] = "all",
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no further case is begun.")] = 420.0,
    pictures: Annotated[Path | None, typer.Option(help="Folder for kernel-times.svg and kernel-drift.svg.")] = None,
    tune: Annotated[
        Path | None, typer.Option(help="Measure what the selector chooses from instead; write its table there.")
    ] = None,
    tune_rows: Annotated[str, typer.Option(help="Tune these buckets alone: rows of a tree, by commas.")] = "",
    json: JsonOption = None,
) -> None:
    """The verification kernels and their rivals on a GPU; exits 1 if one is wrong or a goal is missed."""
    from specla.benchmarks.kernels import cases
    from specla.benchmarks.kernels import run as work
    from specla.benchmarks.kernels.device import NoDeviceError
    from specla.benchmarks.kernels.pictures import draw
    from specla.benchmarks.kernels.preparation import TaskError
    from specla.benchmarks.kernels.tune import tune as measure_table

    def save(made: Report) -> None:
        if json is not None:
            made.write(json)

    try:
        if tune is not None:
            buckets = numbers(tune_rows, "--tune-rows") if tune_rows else []
            if not cases.TUNING_TREES.keys() >= set(buckets):
                known = ", ".join(map(str, cases.TUNING_TREES))
                raise typer.BadParameter(
                    f"{tune_rows!r} names other trees than of {known} rows", param_hint="--tune-rows"
                )
            done = measure_table(cases.tuning_plan([int(rows) for rows in buckets]), tune, budget=budget, say=_say)
        else:
            plan = cases.goals_plan() if only == "goals" else cases.full_plan()
            done = work.run(plan, budget=budget, say=_say, save=save)
    except (work.WrongResultError, TaskError, NoDeviceError) as error:
        _say(f"refused: {error}")
        raise typer.Exit(1) from None
    if pictures is not None:
        for path in draw(pictures, done.timed, done.drifts, done.report.device):
            _say(f"drawn: {path}")
    finish(done.report, json)


def whole_pass(
    library: Annotated[bool, typer.Option(help="Whether to run flash-linear-attention's model beside ours.")] = True,
    json: JsonOption = None,
) -> None:
    """Whole passes of the 1.47B model on a GPU, with floors and rivals; exits 1 if one is wrong or a goal is missed."""
    from specla.benchmarks.kernels.device import NoDeviceError
    from specla.benchmarks.target_pass import run as work
    from specla.benchmarks.target_pass.checks import WrongPassError

    def save(made: Report) -> None:
        if json is not None:
            made.write(json)

    try:
        made = work.run(_say, save, with_library=library)
    except (WrongPassError, NoDeviceError) as error:
        _say(f"refused: {error}")
        raise typer.Exit(1) from None
    finish(made, json)


def _say(line: str) -> None:
    """A line of progress, on the error stream, as it stands."""
    Console(stderr=True, highlight=False).print(line, markup=False, soft_wrap=True)
