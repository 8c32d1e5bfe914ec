"""What must be done before the first timing: checks, drift, and the compilation of all that will be timed.

Compiling takes most of the time, so everything runs in processes of its own, side by side; what one of them has
compiled the timing process finds in Triton's cache.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from specla.benchmarks.kernels import convolving, penalties, sampler
from specla.benchmarks.kernels.candidates import bucket_rows, candidates, problem_of, release
from specla.benchmarks.kernels.cases import Case, Place, Plan
from specla.benchmarks.kernels.checks import (
    Checked,
    Kernel,
    check_chains,
    check_commits,
    check_kernel,
    check_replays,
)
from specla.benchmarks.kernels.contenders import MEMORY_LIMIT, Snapshots, StandAlone
from specla.benchmarks.kernels.correctness import Errors
from specla.benchmarks.kernels.drift import Point, drift
from specla.benchmarks.kernels.place import warm
from specla.benchmarks.kernels.shapes import PAPER
from specla.kernels.gpu.selector import Choice, LayerShape, Mode, Selector

MODES: tuple[Mode, ...] = ("exact", "fast")

Task = Callable[[], object]


class TaskError(RuntimeError):
    """A task could not be carried out: what it was to prove is not proved."""


class Prepared(NamedTuple):
    """What preparing gave.

    Attributes:
        errors: of our kernels and the rivals that we wrote; nothing may be timed unless all pass.
        replays: of the library's kernels.
        unfit: what cannot be made here, with why.
        left_out: our kernels among them.
        drifts: curves by mode.
        seconds: of each task.
    """

    errors: list[Errors]
    replays: list[Errors]
    unfit: dict[str, str]
    left_out: set[Kernel]
    drifts: dict[Mode, list[Point]]
    seconds: dict[str, float]

    def longest(self, count: int) -> list[tuple[str, float]]:
        """The tasks that took longest."""
        return sorted(self.seconds.items(), key=lambda pair: -pair[1])[:count]


def choices_at(place: Place) -> list[Choice]:
    """What the selector may choose at a place."""
    return candidates(place.shape, place.sessions, list(place.topologies.values()), place.rows)


def choices_of(case: Case, selector: Selector | None) -> list[Choice]:
    """What a case is measured with: all candidates, and what the selector chooses for it."""
    found = candidates(case.shape, case.sessions, [case.topology])
    return list(dict.fromkeys([*found, *(selected(case, selector).values() if selector else ())]))


def selected(case: Case, selector: Selector) -> dict[Mode, Choice]:
    """What the selector chooses for a case."""
    layer = LayerShape(case.shape.key_width, case.shape.value_width, case.shape.value_heads)
    return {mode: selector.choose(mode, layer, [case.topology] * case.sessions) for mode in MODES}


def kernels_of(plan: Plan, selector: Selector | None = None) -> list[Kernel]:
    """The kernels of ours that a plan times, each once; with a selector also what it chooses."""
    found: dict[Kernel, None] = {}
    for case in plan.cases:
        rows = bucket_rows(len(case.topology))
        found |= dict.fromkeys(Kernel(case.shape, rows, choice) for choice in choices_of(case, selector))
    for place in plan.places:
        found |= dict.fromkeys(Kernel(place.shape, place.rows, choice) for choice in choices_at(place))
    return list(found)


class Preparation:
    """Tasks begun in other processes when it is made; `result` waits for them."""

    def __init__(self, plan: Plan, selector: Selector | None = None):
        """Begins. With one process, tasks run in this one, one after the other, when the result is asked for.

        What the selector chooses, if there is one, is prepared with the rest.
        """
        self._kernels = kernels_of(plan, selector)
        self._tasks = tasks(plan, self._kernels)
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[str, Future[tuple[float, object]]] = {}
        count = min(len(self._tasks), plan.processes or len(os.sched_getaffinity(0)))
        if count > 1:
            self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
            self._futures = {name: self._pool.submit(_timed, name, task) for name, task in self._tasks.items()}

    def result(self) -> Prepared:
        """What all tasks gave; their processes end.

        Raises:
            TaskError: a task failed otherwise than by a kernel that cannot be made.
        """
        if self._pool is None:
            done = {name: _timed(name, task) for name, task in self._tasks.items()}
        else:
            with self._pool:
                done = {name: future.result() for name, future in self._futures.items()}
        prepared = Prepared([], [], {}, set(), {}, {name: seconds for name, (seconds, _) in done.items()})
        for name, (_, found) in done.items():
            if isinstance(found, Checked):
                (prepared.replays if name.startswith("replay") else prepared.errors).extend(found.errors)
                prepared.unfit.update(found.unfit)
            elif isinstance(found, Drifted):
                prepared.drifts[found.mode] = found.points
        prepared.left_out.update(kernel for kernel in self._kernels if str(kernel) in prepared.unfit)
        return prepared


class Drifted(NamedTuple):
    """One mode's curve."""

    mode: Mode
    points: list[Point]


def tasks(plan: Plan, kernels: Sequence[Kernel]) -> dict[str, Task]:
    """All of a plan by name, what takes longest first; `kernels` are those that it times."""
    cases, device = plan.cases, plan.device
    found: dict[str, Task] = {}
    for shape in dict.fromkeys(case.shape for case in cases if "recurrent" in case.replay):
        found[f"replay, {shape.name}"] = partial(check_replays, shape, device)
    for mode in MODES if plan.drift_steps else ():
        found[f"drift, {mode}"] = partial(_drifted, mode, plan.drift_steps, device)
    for kernel in sorted(kernels, key=lambda k: (-k.rows, k.choice.is_exact)):
        found[str(kernel)] = partial(check_kernel, kernel, device)
        if kernel.choice.groups > 1:  # what is checked for several sessions has another form for one
            found[f"{kernel}, of one session"] = partial(warm, kernel.shape, kernel.rows, kernel.choice, device)
    for name in plan.samplers:
        found[f"sampler, {name}"] = partial(sampler.warm, name, device)
    if plan.others:
        found[convolving.CASE] = partial(convolving.warm, device)
        found[penalties.CASE] = partial(penalties.warm, device)
    for shape, rows in dict.fromkeys((case.shape, bucket_rows(len(case.topology))) for case in cases):
        found[f"commits, {shape.name}, up to {rows} rows"] = partial(check_commits, shape, rows, device)
    for shape in dict.fromkeys(case.shape for case in cases if case.is_chain):
        found[f"chains, {shape.name}"] = partial(check_chains, shape, device)
    for case in {(c.shape, c.sessions, bucket_rows(len(c.topology))): c for c in cases}.values():
        found[f"commits of {case.name}"] = partial(_warm_commits, case, device)
    return found


def _warm_commits(case: Case, device: str) -> None:
    """Stand-alone commits are compiled for a number of sessions."""
    made = problem_of(case.shape, case.sessions, case.topology, l2=0, device=device)
    StandAlone(made, Choice("serial")).commit(0)
    if Snapshots.bytes(made) <= MEMORY_LIMIT // 8:
        Snapshots(made, tree=True).commit(0)
    if made.state.is_cuda:
        torch.cuda.synchronize()
    release()


def _drifted(mode: Mode, steps: int, device: str) -> Drifted:
    return Drifted(mode, drift(PAPER, mode, steps=steps, device=device))


def _timed(name: str, task: Task) -> tuple[float, object]:
    """A task's seconds and what it gave."""
    begun = time.monotonic()
    try:
        found = task()
    except Exception as error:  # not every exception survives the way from another process
        raise TaskError(f"{name}: {type(error).__name__}: {error}") from error
    return time.monotonic() - begun, found
