"""A whole run: checks first, then the goals' cases, restoring, sampling and drift, then the grid while time is left."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specla.benchmarks.kernels import device, drift, restore
from specla.benchmarks.kernels.candidates import candidates, measure_choices, release
from specla.benchmarks.kernels.cases import Case, all_cases, tuning_cases
from specla.benchmarks.kernels.checks import Checked, check_replays, run_checks
from specla.benchmarks.kernels.correctness import Errors
from specla.benchmarks.kernels.goals import goals
from specla.benchmarks.kernels.launch import Mode
from specla.benchmarks.kernels.measure import MODES, Timed, measure
from specla.benchmarks.kernels.replay import Kind, MissingLibraryError, Operation, operation
from specla.benchmarks.kernels.sampler import measure_sampler
from specla.benchmarks.kernels.shapes import PAPER, SHAPES
from specla.benchmarks.report import Report, Row

Say = Callable[[str], None]

METHOD = (
    "CUDA graphs; each runs its work once for enough layers that 3 L2 sizes of other bytes lie between two visits of "
    "the same; time of the graph over its layers; rivals in turns, rotating; medians with quartiles; launches, commit "
    "and state writes included"
)
REPLAY = (
    "inputs ready path by path, outputs left where they fall, the state after the accepted path by one launch of the "
    "recurrent kernel for all layers, taken without a copy; batched: a copy of the state a path, as its interface asks"
)


class WrongResultError(RuntimeError):
    """A kernel or rival disagrees with the float64 reference: nothing may be timed."""

    def __init__(self, failed: list[Errors]):
        super().__init__("; ".join(f"{e.case}, {e.name}: {e}" for e in failed))


@dataclass
class Run:
    """What a run has found so far."""

    report: Report
    timed: dict[str, Timed] = field(default_factory=dict)
    drifts: dict[Mode, list[drift.Point]] = field(default_factory=dict)
    restored: dict[str, list[float]] = field(default_factory=dict)
    sampled: dict[str, list[float]] = field(default_factory=dict)
    bandwidth: float = float("nan")


def run(*, budget: float, say: Say, save: Callable[[Report], None]) -> Run:
    """Measures everything on the current GPU.

    Whatever fails after the checks is noted, and its goals stay unmet, so that a run always leaves its other figures.

    Args:
        budget: seconds after which no more cases without a goal are begun.
        say: told about progress, a line at a time.
        save: given the run once the goals are measured, and again at the end.

    Raises:
        WrongResultError: a kernel or rival is not correct.
        NoDeviceError: there is no GPU.
    """
    device.require()
    begun = time.monotonic()
    made = Run(Report(title="Verification kernels and their rivals", device=device.describe()))
    notes = made.report.notes
    notes.update(method=METHOD, replay=REPLAY, budget_s=budget, triton=_triton_version())
    notes["clocks before"] = device.clocks()
    operations = _operations(notes, say)
    say("checking every kernel against float64")
    _note(notes, run_checks(SHAPES))
    notes["seconds of checks"] = round(time.monotonic() - begun, 1)
    device.wake()
    made.bandwidth = device.copy_bandwidth()
    l2 = device.l2_bytes()
    grid = []
    for case in all_cases():
        if case.goal:
            _time(made, case, operations, l2, say)
        else:
            grid.append(case)
    with _noting(made, "restoring", say):
        made.restored = restore.measure_restore(operations, l2=l2)
    release()
    with _noting(made, "sampling", say):
        made.sampled = measure_sampler(l2=l2)
    release()
    for mode in MODES:
        with _noting(made, f"drift, {mode}", say):
            made.drifts[mode] = drift.drift(PAPER, mode)
    summarise(made)
    save(made.report)
    _grid(made, grid, operations, l2, begun + budget, say)
    notes["clocks after"] = device.clocks()
    notes["seconds"] = round(time.monotonic() - begun, 1)
    summarise(made)
    save(made.report)
    return made


def tune(*, budget: float, say: Say) -> Run:
    """Times what a selector chooses from, over shapes, sessions and trees, after the same checks.

    Args:
        budget: seconds after which nothing more is begun.
        say: told about progress, a line at a time.

    Raises:
        WrongResultError: a kernel is not correct.
        NoDeviceError: there is no GPU.
    """
    device.require()
    begun = time.monotonic()
    made = Run(Report(title="What the selector chooses from", device=device.describe()))
    made.report.notes.update(method=METHOD, budget_s=budget, triton=_triton_version())
    _note(made.report.notes, run_checks(SHAPES))
    device.wake()
    for case in tuning_cases():
        if time.monotonic() - begun > budget:
            made.report.notes[f"left out, {case.name}"] = "for lack of time"
            continue
        with _noting(made, case.name, say):
            choices = candidates(case.shape, case.sessions, case.topology, thorough=True)
            times = measure_choices(choices, case.shape, case.sessions, case.topology)
            for choice, us in zip(choices, times, strict=True):
                if us < math.inf:
                    made.report.rows.append(Row.of(case.name, choice.name, [us], "us"))
    made.report.notes["seconds"] = round(time.monotonic() - begun, 1)
    return made


@contextmanager
def _noting(made: Run, what: str, say: Say) -> Iterator[None]:
    """Turns a failure of one part into a note."""
    before = time.monotonic()
    try:
        yield
    except Exception as error:
        made.report.notes[f"failed, {what}"] = f"{type(error).__name__}: {error}"
        say(f"{what} FAILED: {type(error).__name__}: {error}")
    else:
        say(f"{what}: {time.monotonic() - before:.1f} s")


def _grid(made: Run, cases: list[Case], operations: dict[Kind, Operation], l2: int, deadline: float, say: Say) -> None:
    """Cases without a goal, until the time is spent."""
    left_out = []
    for case in cases:
        if time.monotonic() > deadline:
            left_out.append(case.name)
            continue
        if (
            "chunked" in case.replay
            and "chunked" in operations
            and "errors of the chunked kernel" not in made.report.notes
        ):
            say("checking the chunked kernel, which tunes itself first")
            errors = check_replays(PAPER, operations)
            made.report.notes["errors of the chunked kernel"] = "; ".join(f"{e.name}: {e}" for e in errors)
            if not all(e.passed for e in errors):
                del operations["chunked"]
        _time(made, case, operations, l2, say)
    if left_out:
        made.report.notes["left out for lack of time"] = "; ".join(left_out)


def _time(made: Run, case: Case, operations: dict[Kind, Operation], l2: int, say: Say) -> None:
    with _noting(made, case.name, say):
        timed = made.timed[case.name] = measure(case, operations, l2=l2)
        say(", ".join(f"{name} {statistics.median(samples):.2f}" for name, samples in timed.samples.items()))


def _operations(notes: dict[str, str | int | float | bool], say: Say) -> dict[Kind, Operation]:
    """The library's kernels; a note says why there are none."""
    kinds: tuple[Kind, ...] = ("recurrent", "chunked")
    try:
        found = {kind: operation(kind) for kind in kinds}
    except MissingLibraryError as error:
        say(str(error))
        notes["replay rivals"] = f"not measured: {error}"
        return {}
    import fla

    notes["flash-linear-attention"] = str(fla.__version__)
    return found


def _note(notes: dict[str, str | int | float | bool], checked: Checked) -> None:
    """Puts errors into the notes, and what cannot be made here.

    Raises:
        WrongResultError: an error is too large.
    """
    for error in checked.errors:
        notes[f"errors, {error.case}, {error.name}"] = str(error)
    for name, why in checked.unfit.items():
        notes[f"cannot be made, {name}"] = why
    if failed := [error for error in checked.errors if not error.passed]:
        raise WrongResultError(failed)


def summarise(made: Run) -> None:
    """Rows and goals of all that was measured so far, and notes for what was chosen or left out."""
    report = made.report
    report.rows = [Row.of("device", "copy, bytes read and written", [made.bandwidth / 1e9], "GB/s")]
    for name, timed in made.timed.items():
        for contender, samples in timed.samples.items():
            report.rows.append(Row.of(name, contender, samples, "us"))
        for contender, samples in timed.samples.items():
            if contender not in MODES:
                ratios = [s / f for s, f in zip(samples, timed.samples["fast"], strict=True)]
                report.rows.append(Row.of(name, f"{contender}, over fast", ratios, "x"))
        for mode in MODES:
            samples = timed.samples[mode]
            rate = [timed.once / us / 1e3 for us in samples]
            report.rows.append(Row.of(name, f"{mode}, bytes moved once over time", rate, "GB/s"))
            share = [1e9 * r / made.bandwidth for r in rate]
            report.rows.append(Row.of(name, f"{mode}, of the copy bandwidth", share, "x"))
        for candidate, us in timed.candidates.items():
            report.rows.append(Row.of(name, f"when choosing: {candidate}", [us], "us"))
        chosen = ", ".join(f"{mode}: {kernel}" for mode, kernel in timed.chosen.items())
        report.notes[f"chosen, {name}"] = (
            f"{chosen}; {timed.accepted} rows accepted and pending, {timed.layers} layers, {timed.once} bytes at least"
        )
        for rival, reason in timed.skipped.items():
            report.notes[f"not run, {name}, {rival}"] = reason
    for rival, samples in made.restored.items():
        report.rows.append(Row.of(restore.CASE, rival, samples, "us"))
    for mode, points in made.drifts.items():
        for point in points:
            row = Row.of("drift of the state", f"{mode}, {point.step} tokens", [point.error], "relative error")
            report.rows.append(row)
    for config, samples in made.sampled.items():
        report.rows.append(Row.of("sampling 64 rows of 32,000, top-p", config, samples, "us"))
    report.goals = goals(made.timed, made.restored, made.drifts, made.sampled, made.bandwidth)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)
