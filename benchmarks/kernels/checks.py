"""The checks that come before any timing: every kernel and rival of every shape, on random trees and chains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from triton.runtime.errors import OutOfResources

from specla.benchmarks.kernels.candidates import candidates, release
from specla.benchmarks.kernels.contenders import Candidate, Contender, Ours, Snapshots, StandAlone
from specla.benchmarks.kernels.correctness import Errors, check, untouched
from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.replay import Kind, Operation, Replay
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.kernels.topologies import chain, random_tree

_BATCHES = ((16, 1, 5), (32, 20), (64, 33, 17), (129, 2))
"""Rows of the sessions of each checked batch; the first is its bucket's size."""

_ACCEPTED = 3


def run_checks(shapes: Iterable[Shape], operations: Mapping[Kind, Operation], device: str = "cuda") -> list[Errors]:
    """Errors of everything that will be timed; whoever calls it refuses to time if one has not passed.

    Raises:
        RuntimeError: a pass wrote to factors that wait for their commit.
    """
    found: list[Errors] = []
    for shape in shapes:
        for sizes in _BATCHES:
            case = f"{shape.name}, random trees of {', '.join(map(str, sizes))} rows"
            trees = [random_tree(n, seed) for seed, n in enumerate(sizes)]
            made = Problem.make(shape, trees, accepted=_ACCEPTED, layers=2, device=device, tree_rows=sizes[0])
            for candidate in candidates(shape, 1, trees[0], thorough=True):
                try:
                    found += _check_ours(case, made, candidate)
                except OutOfResources:  # it is no candidate on this GPU: whoever times it finds the same
                    continue
            others: list[Contender] = [
                StandAlone(made, Candidate("serial"), output=torch.float32),
                Snapshots(made, tree=True, output=torch.float32),
            ]
            found += check(case, made, others)
            del made, others
            release()
        chains = Problem.make(shape, [chain(16), chain(4)], accepted=_ACCEPTED, layers=2, device=device)
        found += check(f"{shape.name}, chains", chains, [Snapshots(chains, tree=False, output=torch.float32)])
        found += check_replays(shape, operations, device)
    return found


def _check_ours(case: str, made: Problem, candidate: Candidate) -> list[Errors]:
    contender = Ours(made, candidate, output=torch.float32)
    errors = check(case, made, [contender])
    if not untouched(made, contender):
        raise RuntimeError(f"{candidate.name} wrote to pending factors: {case}")
    return errors


def check_replays(shape: Shape, operations: Mapping[Kind, Operation], device: str = "cuda") -> list[Errors]:
    """The library's kernels, on one random tree in two sessions."""
    made = Problem.make(shape, [random_tree(16, 7)] * 2, accepted=_ACCEPTED, layers=2, device=device)
    replays = [
        Replay(made, kind, batched=batched, recurrent=operations["recurrent"], replayed=operation)
        for kind, operation in operations.items()
        for batched in (False, True)
    ]
    return check(f"{shape.name}, replay of a random tree of 16", made, replays)
