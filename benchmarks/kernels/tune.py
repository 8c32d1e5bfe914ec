"""Measures what the selector chooses from, and fits its table: `specla bench kernels --tune FILE`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

from specla.benchmarks.kernels import device
from specla.benchmarks.kernels.candidates import bucket_rows, candidates, measure_choices
from specla.benchmarks.kernels.cases import Case, Plan
from specla.benchmarks.kernels.checks import Kernel
from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.preparation import Preparation
from specla.benchmarks.kernels.run import METHOD, Clock, Run, Say, note_checks
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.report import Report, Row
from specla.kernels.gpu.selector import Choice, LayerShape, Measured, Selector
from specla.kernels.gpu.tuning import fit
from specla.kernels.topology import Topology

Place = tuple[Shape, int, int]
"""Shape, sessions and rows of the bucket: one place of the selector's grid."""

Samples = dict[Choice, list[tuple[Topology, float]]]


def tune(plan: Plan, table: Path, *, budget: float, say: Say) -> Run:
    """Times every choice over the plan's cases, after the same checks, and writes the table of what was measured.

    Args:
        plan: its cases are the grid.
        table: where the selector's table goes; written anew after every case, so that a killed run leaves one.
        budget: seconds after which nothing more is begun.
        say: told about progress, a line at a time.

    Raises:
        WrongResultError: a kernel is not correct.
        TaskError: one could not be checked.
        NoDeviceError: there is no GPU.
    """
    device.require()
    clock = Clock(say)
    made = Run(Report(title="What the selector chooses from", device=device.describe()))
    notes = made.report.notes
    notes.update(method=METHOD, budget_s=budget)
    with clock.stage("checks and compilation"):
        prepared = Preparation(plan).result()
    note_checks(notes, prepared, say)
    device.wake()
    found: dict[Place, Samples] = defaultdict(lambda: defaultdict(list))
    for case in plan.cases:
        if clock.elapsed > budget:
            notes[f"left out, {case.name}"] = "for lack of time"
            continue
        with clock.stage(case.name):
            _measure(case, prepared.left_out, found, made, plan.device)
        _write(found, table)
    notes["seconds"] = round(clock.elapsed, 1)
    return made


def _measure(case: Case, left_out: set[Kernel], found: dict[Place, Samples], made: Run, where: str) -> None:
    topology = case.topology
    rows = bucket_rows(len(topology))
    choices = [
        choice
        for choice in candidates(case.shape, case.sessions, topology)
        if Kernel(case.shape, rows, choice) not in left_out
    ]
    times = measure_choices(choices, case.shape, case.sessions, topology, l2=device.l2_bytes(), device=where)
    for choice, us in zip(choices, times, strict=True):
        if us < math.inf:
            found[case.shape, case.sessions, rows][choice].append((topology, us))
            made.report.rows.append(Row.of(case.name, name_of(choice), [us], "us"))


def table_of(found: dict[Place, Samples]) -> list[Measured]:
    """The selector's places from what was timed, each choice fitted over the trees that it ran."""
    return [
        Measured(
            LayerShape(shape.key_width, shape.value_width, shape.value_heads),
            sessions,
            rows,
            tuple(fit(choice, samples) for choice, samples in choices.items()),
        )
        for (shape, sessions, rows), choices in found.items()
    ]


def _write(found: dict[Place, Samples], table: Path) -> None:
    name = device.name()
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(json.dumps(Selector(name, table_of(found)).to_table([name]), indent=1) + "\n")
