"""Measures what the selector chooses from, and fits its table: `specla bench kernels --tune FILE`."""

from __future__ import annotations

import json
import math
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
from specla.kernels.gpu.selector import Choice, Cost, LayerShape, Measured, Mode, Selector, alike, features
from specla.kernels.gpu.tuning import fit
from specla.kernels.topology import Topology

ROUNDS = 5
_FITS = 12
_GOOD = 1.02  # over the best one: better than times repeat
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

    A table is there to choose by: trees for which the fit chooses badly count more and more in the next ones, and the
    fit whose worst choice is the best one is kept. Fewer leaves than groups leave programs without a row, which takes
    as long as something else.
    """
    emphasis = dict.fromkeys(times, 1.0)
    kept, least = None, math.inf
    for _ in range(_FITS):
        measured = _fitted(place, times, emphasis)
        over = {name: max(_over_best(measured, place.topologies[name], times[name]).values()) for name in times}
        if max(over.values()) < least:
            kept, least = measured, max(over.values())
        if least < _GOOD:
            break
        emphasis = {name: weight * (2.0 if over[name] >= _GOOD else 1.0) for name, weight in emphasis.items()}
    assert kept is not None
    return kept


def _fitted(place: Place, times: Times, emphasis: dict[str, float]) -> Measured:
    trees = place.topologies

    def cost(choice: Choice) -> Cost:
        fair = [name for name in times if trees[name].leaves >= choice.groups]
        enough = len({features(choice, trees[name]) for name in fair}) >= _FEWEST_KINDS
        names = fair if enough else list(times)
        return fit(choice, [(trees[n], times[n][choice]) for n in names], [emphasis[n] for n in names])

    return Measured(layer_of(place), place.sessions, place.rows, tuple(map(cost, next(iter(times.values())))))


def _over_best(measured: Measured, topology: Topology, us: dict[Choice, float]) -> dict[Mode, float]:
    """What each mode's choice takes over its best one; not of a mode none of whose choices was timed."""
    selector, found = Selector("the same device", [measured]), {}
    for mode in MODES:
        chosen = selector.choose(mode, measured.shape, [topology] * measured.sessions)
        if chosen in us:
            found[mode] = us[chosen] / min(time for choice, time in us.items() if mode == "fast" or choice.is_exact)
    return found


def _rows(place: Place, times: Times, measured: Measured) -> list[Row]:
    """What was timed, and how far the fitted choice of each mode is from the best."""
    found = []
    for name, topology in place.topologies.items():
        us, case = times[name], f"{place.name}, {name}"
        found += [Row.of(case, name_of(choice), [time], "us") for choice, time in us.items()]
        over = _over_best(measured, topology, us)
        found += [Row.of(case, OVER_BEST[mode], [ratio], "x") for mode, ratio in over.items()]
    return found


def layer_of(place: Place) -> LayerShape:
    """The shape that a table knows a place by."""
    return LayerShape(place.shape.key_width, place.shape.value_width, place.shape.value_heads)


def _write(measured: list[Measured], table: Path) -> None:
    name = device.name()
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(json.dumps(Selector(name, measured).to_table(alike(name)), indent=1) + "\n")
