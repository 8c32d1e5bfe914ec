"""The checks that come before any timing: all forms of our kernels and all rivals, on random trees and chains.

A form is checked with the deferred and the stand-alone commit; a ring is the same form with `write_state` unset in some
passes, which tests/kernels/gpu proves.

Outputs are compared in float32 and once more as they are timed, rounded to the model's dtype; so a check also compiles
what it proves (see preparation.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specla.benchmarks.kernels.candidates import UNFIT, reason, release
from specla.benchmarks.kernels.contenders import Contender, Ours, Snapshots, StandAlone
from specla.benchmarks.kernels.correctness import Errors, check, untouched
from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.reference64 import relative_error
from specla.benchmarks.kernels.replay import Kind, MissingLibraryError, Replay, operation
from specla.benchmarks.kernels.rivals import COLUMNS
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.kernels.topologies import chain, random_tree
from specla.kernels.gpu.selector import Choice

SIZES: dict[int, tuple[int, ...]] = {
    1: (1, 1, 1),
    16: (16, 1, 5),
    32: (32, 20, 3),
    64: (64, 33, 17),
    128: (128, 40, 7),
    129: (129, 65, 2),
}
"""Rows of the sessions of each bucket's batch; the first is the bucket's size."""

_ACCEPTED = 3
_ROUNDING = 2.0**-7  # of a bfloat16: one unit in the last place, however it is rounded


class Kernel(NamedTuple):
    """One compiled form of our kernels."""

    shape: Shape
    rows: int
    """Of the bucket."""
    choice: Choice

    def __str__(self) -> str:
        return f"{self.shape.name}, up to {self.rows} rows, {name_of(self.choice)}"


class Checked(NamedTuple):
    """What a check found: errors, and what cannot be made on this GPU (or not be had), with why."""

    errors: list[Errors]
    unfit: dict[str, str]


def check_kernel(kernel: Kernel, device: str) -> Checked:
    """One of our kernels with the deferred commit, on sessions with trees of their own."""
    errors: list[Errors] = []
    try:
        for sizes in _batches(kernel):
            errors += _errors_of(kernel, sizes, device)
    except UNFIT as error:
        return Checked([], {str(kernel): reason(error)})
    release()
    return Checked(errors, {})


def _batches(kernel: Kernel) -> list[tuple[int, ...]]:
    """Rows of the sessions. The serial kernel has a form for few programs and one for many (serial_batch.py)."""
    sizes = SIZES[kernel.rows]
    return [sizes[:1], 3 * sizes] if kernel.choice == Choice("serial") else [sizes]


def _errors_of(kernel: Kernel, sizes: Sequence[int], device: str) -> list[Errors]:
    made = _random_trees(kernel.shape, sizes, kernel.rows, device)

    def make(output: torch.dtype | None) -> Ours:
        return Ours(made, kernel.choice, output=output)

    case = f"{kernel.shape.name}, random trees of {', '.join(map(str, sizes))} rows"
    contender = make(torch.float32)
    errors = check(case, made, [contender])
    if not untouched(made, contender):
        errors.append(errors[0]._replace(name=f"{contender.name}, which wrote elsewhere", outputs=math.inf))
    errors += check(case, made, [StandAlone(made, kernel.choice, output=torch.float32)])
    return errors + _rounded(case, made, make)


def check_commits(shape: Shape, rows: int, device: str) -> Checked:
    """The stand-alone commit, and the snapshots of trees."""
    made = _random_trees(shape, SIZES[rows], rows, device)
    case = f"{shape.name}, random trees of {', '.join(map(str, SIZES[rows]))} rows"
    errors = check(case, made, [StandAlone(made, Choice("serial"), output=torch.float32)])
    errors += _snapshots(case, made, tree=True)
    return Checked(errors, {})


def check_chains(shape: Shape, device: str) -> Checked:
    """The snapshots of chains."""
    made = Problem.make(shape, [chain(16), chain(4)], accepted=_ACCEPTED, layers=2, device=device)
    return Checked(_snapshots(f"{shape.name}, chains of 16 and 4 rows", made, tree=False), {})


def check_replays(shape: Shape, device: str, kind: Kind = "recurrent") -> Checked:
    """The library's kernels, on one random tree in two sessions; `unfit` says why if they cannot be used."""
    try:
        recurrent, replayed = operation("recurrent"), operation(kind)
    except MissingLibraryError as error:
        return Checked([], {f"replay, {kind}": str(error)})
    made = Problem.make(shape, [random_tree(16, 7)] * 2, accepted=_ACCEPTED, layers=2, device=device)
    found = Checked([], {})
    for batched in (False, True):
        try:
            replay = Replay(made, kind, batched=batched, recurrent=recurrent, replayed=replayed)
            found.errors.extend(check(f"{shape.name}, replay of a random tree of 16", made, [replay]))
        except Exception as error:  # whatever another's kernel may raise
            found.unfit[f"replay, {kind}, {shape.name}"] = reason(error)
    return found


def _random_trees(shape: Shape, sizes: Sequence[int], rows: int, device: str) -> Problem:
    trees = [random_tree(n, seed) for seed, n in enumerate(sizes)]
    return Problem.make(shape, trees, accepted=_ACCEPTED, layers=2, device=device, tree_rows=rows, spare_rows=3)


def _snapshots(case: str, made: Problem, *, tree: bool) -> list[Errors]:
    found = []
    for columns in COLUMNS:

        def make(output: torch.dtype | None, columns: int = columns) -> Snapshots:
            return Snapshots(made, tree=tree, columns=columns, output=output)

        found += check(case, made, [make(torch.float32)]) + _rounded(case, made, make)
    return found


def _rounded(case: str, made: Problem, make: Callable[[torch.dtype | None], Contender]) -> list[Errors]:
    """One layer's outputs in the model's dtype against those in float32."""
    outputs = []
    for contender in (make(torch.float32), make(None)):
        contender.verify(0, 0)
        outputs.append(contender.outputs(0)[: made.used_rows])
    error = relative_error(outputs[1], outputs[0].double())
    return [Errors(case, f"{contender.name}, rounded", error, 0.0, 0.0, _ROUNDING)]
