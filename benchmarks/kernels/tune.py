"""Measures what the selector chooses from, and fits its table: `specla bench kernels --tune FILE`."""

from __future__ import annotations

import json
from pathlib import Path

from specla.benchmarks.kernels import device
from specla.benchmarks.kernels.candidates import release
from specla.benchmarks.kernels.cases import Place, Plan
from specla.benchmarks.kernels.checks import Kernel
from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.place import PlaceTimer
from specla.benchmarks.kernels.preparation import MODES, Preparation, choices_at
from specla.benchmarks.kernels.run import METHOD, Clock, Say, note_checks
from specla.benchmarks.kernels.summary import OVER_BEST, Run
from specla.benchmarks.report import Report, Row
from specla.kernels.gpu.selector import Choice, LayerShape, Measured, Selector, alike, features
from specla.kernels.gpu.tuning import fit
from specla.kernels.topology import Topology

ROUNDS = 5
_FEWEST_KINDS = 3  # of trees, to tell three costs apart

Times = dict[str, dict[Choice, float]]
"""Microseconds of a layer by tree and choice."""


def tune(plan: Plan, table: Path, *, budget: float, say: Say) -> Run:
    """Times every choice on every tree of the plan's places, after the same checks as ever, and writes the table.

    Args:
        plan: its places are the grid.
        table: where the selector's table goes; written anew after every place, so that a killed run leaves one. Places
            of a table that is there already, made on such a device, stay until they are measured anew.
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
    notes["seconds of checks"] = round(clock.elapsed, 1)
    device.wake()
    notes["clocks before"] = device.clocks()
    measured = _former(table)
    worst = {mode: (0.0, "") for mode in MODES}
    for place in plan.places:
        if clock.elapsed > budget:
            notes[f"left out, {place.name}"] = "for lack of time"
            continue
        with clock.stage(place.name):
            times = _times(place, prepared.left_out, plan.device)
        made_anew = fitted(place, times)
        measured = [former for former in measured if _at(former) != _at(made_anew)] + [made_anew]
        for row in _rows(place, times, made_anew):
            made.report.rows.append(row)
            for mode in MODES:
                if row.name == OVER_BEST[mode]:
                    worst[mode] = max(worst[mode], (row.median, row.case))
        _write(measured, table)
    for mode, (ratio, case) in worst.items():
        if case:
            made.report.rows.append(Row.of("all places", f"{OVER_BEST[mode]}, the worst", [ratio], "x"))
            notes[f"worst choice, {mode}"] = f"{ratio:.3f} of the best, {case}"
    notes["clocks after"] = device.clocks()
    notes["seconds"] = round(clock.elapsed, 1)
    return made


def _at(place: Measured) -> tuple[LayerShape, int, int]:
    return place.shape, place.sessions, place.rows


def _former(table: Path) -> list[Measured]:
    """What a table holds already."""
    if not table.exists():
        return []
    found = json.loads(table.read_text())
    return list(Selector.from_table(found).measured) if device.name() in found["devices"] else []


def _times(place: Place, left_out: set[Kernel], where: str) -> Times:
    choices = [c for c in choices_at(place) if Kernel(place.shape, place.rows, c) not in left_out]
    timer = PlaceTimer(place.shape, place.sessions, place.rows, choices, l2=device.l2_bytes(), device=where)
    found = {name: timer.medians(topology, rounds=ROUNDS) for name, topology in place.topologies.items()}
    del timer
    release()
    return found


def fitted(place: Place, times: Times) -> Measured:
    """The selector's place: each choice fitted over the trees that it may be chosen for, if they are enough.

    Fewer leaves than groups leave programs without a row, which takes as long as something else.
    """
    trees = place.topologies

    def samples(choice: Choice) -> list[tuple[Topology, float]]:
        every = [(trees[name], us[choice]) for name, us in times.items()]
        fair = [(tree, us) for tree, us in every if tree.leaves >= choice.groups]
        return fair if len({features(choice, tree) for tree, _ in fair}) >= _FEWEST_KINDS else every

    choices = next(iter(times.values()))
    costs = [fit(choice, samples(choice)) for choice in choices]
    return Measured(layer_of(place), place.sessions, place.rows, tuple(costs))


def _rows(place: Place, times: Times, measured: Measured) -> list[Row]:
    """What was timed, and how far the fitted choice of each mode is from the best."""
    selector = Selector(device.name(), [measured])
    found = []
    for name, topology in place.topologies.items():
        us, case = times[name], f"{place.name}, {name}"
        found += [Row.of(case, name_of(choice), [time], "us") for choice, time in us.items()]
        for mode in MODES:
            chosen = selector.choose(mode, layer_of(place), [topology] * place.sessions)
            best = min(time for choice, time in us.items() if mode == "fast" or choice.is_exact)
            found.append(Row.of(case, OVER_BEST[mode], [us[chosen] / best], "x"))
    return found


def layer_of(place: Place) -> LayerShape:
    """The shape that a table knows a place by."""
    return LayerShape(place.shape.key_width, place.shape.value_width, place.shape.value_heads)


def _write(measured: list[Measured], table: Path) -> None:
    name = device.name()
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(json.dumps(Selector(name, measured).to_table(alike(name)), indent=1) + "\n")
