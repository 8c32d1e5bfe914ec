"""Times one case: what the selector chooses, the best of our kernels by measurement, and all rivals, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import get_args

from specla.benchmarks.kernels.candidates import (
    TUNING_ROUNDS,
    best,
    bucket_rows,
    capture,
    problem_of,
    release,
)
from specla.benchmarks.kernels.cases import Case
from specla.benchmarks.kernels.checks import Kernel
from specla.benchmarks.kernels.contenders import MEMORY_LIMIT, Contender, Ours, Snapshots, StandAlone
from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.preparation import MODES, choices_of, selected
from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.replay import Kind, Operation, Replay
from specla.benchmarks.kernels.rivals import COLUMNS
from specla.benchmarks.kernels.shapes import bytes_once
from specla.benchmarks.kernels.timing import Graph, Work, in_turns
from specla.kernels.gpu.selector import Choice, Mode, Selector

STAND_ALONE = {mode: f"{mode}, stand-alone commit" for mode in MODES}
RING = {mode: f"{mode}, ring" for mode in MODES}
OURS = {*STAND_ALONE.values(), *RING.values()}
BEST = {mode: f"{mode}, best of the forms measured" for mode in MODES}
REPLAYS = {
    (kind, batched): Replay.name_of(kind, batched=batched) for kind in get_args(Kind) for batched in (False, True)
}


@dataclass(frozen=True)
class Timed:
    """What a case gave.

    Attributes:
        samples: microseconds of a layer; sample r of every name is from the same round.
        candidates: median microseconds of all our kernels, from a few rounds before the others.
        chosen: the kernel that the selector gives each mode; it is what "exact" and "fast" are.
        best: the fastest of the candidates in each mode, timed with the rivals as well: BEST.
        once: bytes that a layer moves at least.
        accepted: rows that the pass accepts, as many as are pending.
        layers: of one graph.
        skipped: rivals that were left out, and why.
    """

    case: Case
    samples: dict[str, list[float]]
    candidates: dict[str, float]
    chosen: dict[Mode, str]
    best: dict[Mode, str]
    once: int
    accepted: int
    layers: int
    skipped: dict[str, str] = field(default_factory=dict)


def measure(
    case: Case,
    operations: Mapping[Kind, Operation],
    selector: Selector,
    *,
    l2: int,
    left_out: Collection[Kernel] = (),
    device: str = "cuda",
) -> Timed:
    """Times a case.

    Args:
        case: what to time.
        operations: the library's kernels by kind; those that are missing leave their rivals out.
        selector: whose choices are timed as the modes' kernels.
        l2: bytes of the L2 cache.
        left_out: kernels of ours that cannot be made here.
        device: where to run.
    """
    topology = case.topology
    problem = problem_of(case.shape, case.sessions, topology, l2=l2, device=device)
    rows = bucket_rows(len(topology))
    choices = [c for c in choices_of(case, selector) if Kernel(case.shape, rows, c) not in left_out]
    works = {choice: Work.of(Ours(problem, choice), problem.layers) for choice in choices}
    graphs, skipped = capture(works)
    tuning = in_turns(list(graphs.values()), TUNING_ROUNDS)
    medians = {choice: statistics.median(tuning[name_of(choice)]) for choice in graphs}
    chosen, fastest = selected(case, selector), {mode: best(medians, mode) for mode in MODES}
    running = [graphs[chosen[mode]]._replace(name=mode) for mode in MODES]
    running += [graphs[fastest[mode]]._replace(name=BEST[mode]) for mode in MODES if fastest[mode] != chosen[mode]]
    del graphs, works
    for name, make in _rivals(case, problem, chosen, operations, skipped).items():
        try:
            work = Work.of(make(), problem.layers)._replace(name=name)
            running.append(Graph.capture(work))
        except Exception as error:  # another's kernel may refuse a shape; ours must not
            if name in OURS:
                raise
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    samples = in_turns(running, case.rounds)
    for mode in MODES:
        samples.setdefault(BEST[mode], samples[mode])
    made = Timed(
        case,
        samples,
        {name_of(choice): us for choice, us in medians.items()},
        {mode: name_of(choice) for mode, choice in chosen.items()},
        {mode: name_of(choice) for mode, choice in fastest.items()},
        bytes_once(case.shape, sessions=case.sessions, rows=problem.used_rows, pending=problem.pending),
        problem.pending,
        problem.layers,
        skipped,
    )
    del problem, running
    release()
    return made


def _rivals(
    case: Case,
    problem: Problem,
    chosen: Mapping[Mode, Choice],
    operations: Mapping[Kind, Operation],
    skipped: dict[str, str],
) -> dict[str, Callable[[], Contender]]:
    """Makers of the case's rivals by name; what cannot run is put into `skipped`."""
    found: dict[str, Callable[[], Contender]] = {}
    for mode in MODES:
        found[STAND_ALONE[mode]] = lambda mode=mode: StandAlone(problem, chosen[mode])  # type: ignore[misc]
        found[RING[mode]] = lambda mode=mode: Ours(problem, chosen[mode], ring=True)  # type: ignore[misc]
    for columns in COLUMNS:
        name = Snapshots.name_of(tree=not case.is_chain, columns=columns)
        if Snapshots.bytes(problem) > MEMORY_LIMIT:
            skipped[name] = f"{Snapshots.bytes(problem) / 2**30:.0f} GiB of snapshots"
        else:
            found[name] = lambda columns=columns: Snapshots(  # type: ignore[misc]
                problem, tree=not case.is_chain, columns=columns
            )
    if case.replay and "recurrent" in operations:
        found |= _replays(case, problem, operations, skipped)
    elif case.replay:
        skipped["replay"] = "flash-linear-attention is not usable"
    return found


def _replays(
    case: Case, problem: Problem, operations: Mapping[Kind, Operation], skipped: dict[str, str]
) -> dict[str, Callable[[], Contender]]:
    """Makers of the replaying rivals; the recurrent ones also with states ready."""
    found: dict[str, Callable[[], Contender]] = {}
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind, batched, ready in product(kinds, (False, True), (False, True)):
        if kind not in case.replay or (ready and kind != "recurrent"):
            continue
        name = Replay.name_of(kind, batched=batched, ready=ready)
        needs = Replay.input_bytes(problem) + (Replay.bytes(problem) if batched else 0)
        if kind not in operations:
            skipped[name] = "this kernel of flash-linear-attention is not usable"
        elif needs > MEMORY_LIMIT:
            skipped[name] = f"{needs / 2**30:.0f} GiB of inputs and copies of the state"
        else:
            found[name] = partial(
                Replay,
                problem,
                kind,
                batched=batched,
                recurrent=operations["recurrent"],
                replayed=operations[kind],
                ready=ready,
            )
    return found
