"""The checks that come before any timing: every kernel and rival of every shape, on random trees and chains.

Batches are checked in processes of their own, side by side: compiling takes most of the time, and what one process has
compiled the timing finds in Triton's cache.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from specla.benchmarks.kernels.candidates import UNFIT, candidates, reason, release
from specla.benchmarks.kernels.contenders import Contender, Ours, Snapshots, StandAlone
from specla.benchmarks.kernels.correctness import Errors, check, untouched
from specla.benchmarks.kernels.launch import Candidate
from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.replay import Kind, MissingLibraryError, Operation, Replay, operation
from specla.benchmarks.kernels.rivals import COLUMNS
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.kernels.topologies import chain, random_tree

BATCHES: tuple[tuple[int, ...], ...] = ((16, 1, 5), (32, 20, 3), (64, 33, 17), (128, 40, 7), (129, 65, 2))
"""Rows of the sessions of each checked batch; the first is its bucket's size."""

_ACCEPTED = 3


class Checked(NamedTuple):
    """What checking found: errors, and the kernels that cannot be made on this GPU, with why."""

    errors: list[Errors]
    unfit: dict[str, str]


def run_checks(shapes: Sequence[Shape], device: str = "cuda", processes: int | None = None) -> Checked:
    """Checks everything that will be timed; whoever calls it refuses to time if an error is too large.

    Args:
        shapes: of the layers.
        device: where to run.
        processes: how many at a time; one a core if unset, 1 stays in this process.

    Raises:
        RuntimeError: a pass wrote to factors that wait for their commit, or to rows that are not its own.
    """
    tasks = [partial(check_trees, shape, sizes, device) for sizes in reversed(BATCHES) for shape in shapes]
    tasks += [partial(check_rivals, shape, device) for shape in shapes]
    count = min(len(tasks), processes or len(os.sched_getaffinity(0)))
    if count == 1:
        parts = [task() for task in tasks]
    else:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            parts = [future.result() for future in [pool.submit(task) for task in tasks]]
    unfit = {name: why for part in parts for name, why in part.unfit.items()}
    return Checked([error for part in parts for error in part.errors], unfit)


def check_trees(shape: Shape, sizes: Sequence[int], device: str) -> Checked:
    """Our kernels, the stand-alone commit and the snapshots of trees, on sessions with trees of their own."""
    trees = [random_tree(n, seed) for seed, n in enumerate(sizes)]
    case = f"{shape.name}, random trees of {', '.join(map(str, sizes))} rows"
    made = Problem.make(shape, trees, accepted=_ACCEPTED, layers=2, device=device, tree_rows=sizes[0])
    found = Checked([], {})
    for candidate in candidates(shape, 1, trees[0], thorough=True):
        try:
            found.errors.extend(_check_ours(case, made, candidate))
        except UNFIT as error:  # it is no candidate here: whoever times it finds the same
            found.unfit[f"{case}, {candidate.name}"] = reason(error)
    others: list[Contender] = [
        StandAlone(made, Candidate("serial"), output=torch.float32),
        *(Snapshots(made, tree=True, columns=n, output=torch.float32) for n in COLUMNS),
    ]
    found.errors.extend(check(case, made, others))
    release()
    return found


def check_rivals(shape: Shape, device: str) -> Checked:
    """The snapshots of chains, and the library's recurrent kernel if it is there."""
    chains = Problem.make(shape, [chain(16), chain(4)], accepted=_ACCEPTED, layers=2, device=device)
    snapshots = [Snapshots(chains, tree=False, columns=n, output=torch.float32) for n in COLUMNS]
    errors = check(f"{shape.name}, chains of 16 and 4 rows", chains, snapshots)
    with suppress(MissingLibraryError):  # the run says so, and leaves its rivals out
        errors += check_replays(shape, {"recurrent": operation("recurrent")}, device)
    return Checked(errors, {})


def check_replays(shape: Shape, operations: Mapping[Kind, Operation], device: str = "cuda") -> list[Errors]:
    """The library's kernels, on one random tree in two sessions."""
    made = Problem.make(shape, [random_tree(16, 7)] * 2, accepted=_ACCEPTED, layers=2, device=device)
    replays = [
        Replay(made, kind, batched=batched, recurrent=operations["recurrent"], replayed=replayed)
        for kind, replayed in operations.items()
        for batched in (False, True)
    ]
    return check(f"{shape.name}, replay of a random tree of 16", made, replays)


def _check_ours(case: str, made: Problem, candidate: Candidate) -> list[Errors]:
    contender = Ours(made, candidate, output=torch.float32)
    errors = check(case, made, [contender])
    if not untouched(made, contender):
        raise RuntimeError(f"{candidate.name} wrote where it must not: {case}")
    return errors
