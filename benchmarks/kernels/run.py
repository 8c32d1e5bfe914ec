"""A whole run: preparation first, then cases in order, restoring and sampling; what is found is saved as it comes."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specla.benchmarks.kernels import convolving, device, host, penalties, restore
from specla.benchmarks.kernels.candidates import release
from specla.benchmarks.kernels.cases import Plan
from specla.benchmarks.kernels.checks import check_replays
from specla.benchmarks.kernels.correctness import Errors
from specla.benchmarks.kernels.measure import measure
from specla.benchmarks.kernels.preparation import Preparation, Prepared
from specla.benchmarks.kernels.replay import Kind, MissingLibraryError, Operation, operation
from specla.benchmarks.kernels.sampler import measure_sampler
from specla.benchmarks.kernels.summary import Run, summarise
from specla.benchmarks.report import Report
from specla.kernels.gpu.selector import Selector

Say = Callable[[str], None]

METHOD = (
    "CUDA graphs; each runs its work once for enough layers that 3 L2 sizes of other states and factors lie between "
    "two visits of the same; states and factors cold: every layer has its own; activations (q, k, v, g, beta, o) "
    "shared by all layers, as in a model, and counted among the bytes moved once; time of the graph over its layers; "
    "rivals in turns, rotating; medians with quartiles; launches, commit and state writes included; our verification "
    "kernels overlap (programmatic dependent launch): states, pending factors and trees are read and commits done "
    "while the kernel before still runs, rows are read and outputs written after its end"
)
REPLAY = (
    "inputs ready path by path, outputs left where they fall, the state after the accepted path by one launch of the "
    "recurrent kernel for all layers, taken without a copy; batched: a copy of the state a path, as its interface asks"
)
_CHUNKED = "errors of the chunked kernel"


class WrongResultError(RuntimeError):
    """A kernel or rival disagrees with the float64 reference: nothing may be timed."""

    def __init__(self, failed: list[Errors]):
        super().__init__("; ".join(f"{e.case}, {e.name}: {e}" for e in failed))


@dataclass(frozen=True)
class Clock:
    """Tells how long stages took, with the time since the run began."""

    say: Say
    begun: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begun

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Says how long a stage took, failed or not."""
        before = self.elapsed
        try:
            yield
        finally:
            self.say(f"[{self.elapsed:6.1f} s] {what}: {self.elapsed - before:.1f} s")


def run(plan: Plan, *, budget: float, say: Say, save: Callable[[Report], None]) -> Run:
    """Measures a plan on the current GPU.

    Whatever fails after the checks is noted, and its goals stay unmet, so that a run always leaves its other figures.

    Args:
        plan: what to measure.
        budget: seconds after which no more cases are begun; restoring and sampling come before the cases without a
            goal, whatever the time.
        say: told about progress, a line at a time.
        save: given the report after every stage.

    Raises:
        WrongResultError: a kernel or rival is not correct.
        TaskError: one could not be checked.
        NoDeviceError: there is no GPU.
    """
    device.require()
    clock = Clock(say)
    made = Run(Report(title="Verification kernels and their rivals", device=device.describe()))
    notes = made.report.notes
    notes.update(method=METHOD, replay=REPLAY, budget_s=budget, triton=_triton_version())
    selector = Selector.for_device(device.name())
    with clock.stage("checks, drift and compilation"):
        preparation = Preparation(plan, selector)
        with clock.stage("importing flash-linear-attention beside them"):
            operations = _operations(notes, plan, say)
        prepared = preparation.result()
    say("longest: " + ", ".join(f"{name} {s:.1f} s" for name, s in prepared.longest(6)))
    note_checks(notes, prepared, say)
    unusable = [name for name in prepared.unfit if name.startswith("replay")]
    wrong = [str(error) for error in prepared.replays if not error.passed]
    if operations and (wrong or unusable):
        operations = {}
        notes["replay rivals"] = f"not timed: {'; '.join(unusable + wrong)}"
        say(f"replay rivals are not timed: {notes['replay rivals']}")
    made.drifts = prepared.drifts
    notes["seconds of checks"] = round(clock.elapsed, 1)
    gc.collect()
    gc.freeze()  # what is alive now stays: the collections between cases need not look at it again
    with clock.stage("copy bandwidth"):
        device.wake()
        notes["clocks before"] = device.clocks()
        made.bandwidth = device.copy_bandwidth()
    l2 = device.l2_bytes()

    def keep() -> None:
        notes["seconds"] = round(clock.elapsed, 1)
        summarise(made)
        save(made.report)

    keep()
    _cases(made, plan, prepared, operations, selector, l2, clock, budget, keep, with_goal=True)
    with _noting(made, restore.CASE, clock):
        made.restored = restore.measure_restore(operations, l2=l2, device=plan.device)
    release()
    keep()
    if plan.samplers:
        with _noting(made, "sampling", clock):
            made.sampled = measure_sampler(plan.samplers, l2=l2, device=plan.device)
        release()
        keep()
    if plan.others:
        _others(made, plan, l2, clock)
        keep()
    _cases(made, plan, prepared, operations, selector, l2, clock, budget, keep, with_goal=False)
    notes["clocks after"] = device.clocks()
    keep()
    return made


def note_checks(notes: dict[str, str | int | float | bool], prepared: Prepared, say: Say) -> None:
    """Puts errors into the notes, and what cannot be made here.

    Raises:
        WrongResultError: an error of ours, or of the rivals that we wrote, is too large.
    """
    for error in (*prepared.errors, *prepared.replays):
        notes[f"errors, {error.case}, {error.name}"] = str(error)
    for name, why in prepared.unfit.items():
        notes[f"cannot be made, {name}"] = why
        say(f"cannot be made, {name}: {why}")
    if failed := [error for error in prepared.errors if not error.passed]:
        raise WrongResultError(failed)


@contextmanager
def _noting(made: Run, what: str, clock: Clock) -> Iterator[None]:
    """A stage whose failure is a note."""
    with clock.stage(what):
        try:
            yield
        except Exception as error:
            made.report.notes[f"failed, {what}"] = f"{type(error).__name__}: {error}"
            clock.say(f"{what} FAILED: {type(error).__name__}: {error}")


def _cases(
    made: Run,
    plan: Plan,
    prepared: Prepared,
    operations: dict[Kind, Operation],
    selector: Selector,
    l2: int,
    clock: Clock,
    budget: float,
    keep: Callable[[], None],
    *,
    with_goal: bool,
) -> None:
    """The cases with or without a goal, until the time is spent."""
    left_out = []
    for case in (case for case in plan.cases if case.goal == with_goal):
        if clock.elapsed > budget:
            left_out.append(case.name)
            continue
        if "chunked" in case.replay and "chunked" in operations and _CHUNKED not in made.report.notes:
            with _noting(made, "checking the chunked kernel, which tunes itself first", clock):
                checked = check_replays(case.shape, plan.device, "chunked")
                made.report.notes[_CHUNKED] = "; ".join(f"{e.name}: {e}" for e in checked.errors)
                if checked.unfit or not all(e.passed for e in checked.errors):
                    del operations["chunked"]
        with _noting(made, case.name, clock):
            timed = measure(case, operations, selector, l2=l2, left_out=prepared.left_out, device=plan.device)
            made.timed[case.name] = timed
            clock.say("  " + ", ".join(f"{name} {statistics.median(us):.2f}" for name, us in timed.samples.items()))
            clock.say("  forms: " + ", ".join(f"{name} {us:.2f}" for name, us in timed.candidates.items()))
        keep()
    if left_out:
        made.report.notes[f"left out for lack of time, {'goals' if with_goal else 'grid'}"] = "; ".join(left_out)


def _others(made: Run, plan: Plan, l2: int, clock: Clock) -> None:
    """What a pass needs beside the recurrence: convolution, penalties and the host's part."""
    with _noting(made, convolving.CASE, clock):
        made.others += convolving.measure_convolution(l2=l2, bandwidth=made.bandwidth, device=plan.device)
    release()
    with _noting(made, penalties.CASE, clock):
        made.others += penalties.measure_penalties(l2=l2, device=plan.device)
    release()
    with _noting(made, host.CASE, clock):
        made.others += host.measure_host(plan.device)


def _operations(notes: dict[str, str | int | float | bool], plan: Plan, say: Say) -> dict[Kind, Operation]:
    """The library's kernels; a note says why there are none."""
    kinds: tuple[Kind, ...] = ("recurrent", "chunked")
    wanted = [kind for kind in kinds if any(kind in case.replay for case in plan.cases)]
    try:
        found = {kind: operation(kind) for kind in wanted}
    except MissingLibraryError as error:
        say(str(error))
        notes["replay rivals"] = f"not measured: {error}"
        return {}
    if found:
        notes["flash-linear-attention"] = str(getattr(sys.modules.get("fla"), "__version__", "unknown"))
    return found


def _triton_version() -> str:
    import triton

    return str(triton.__version__)
