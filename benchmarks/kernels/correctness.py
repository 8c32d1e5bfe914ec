"""Every kernel and rival against the float64 reference; nothing is timed before all of them pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.benchmarks.kernels.contenders import Contender, Ours
from specla.benchmarks.kernels.problem import RING, Problem
from specla.benchmarks.kernels.reference64 import commit64, relative_error, verify64


class Errors(NamedTuple):
    """Relative errors of one contender on one problem, the worst layer's, and what they may be."""

    case: str
    name: str
    outputs: float
    states: float
    factors: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether all are within the tolerance; what is not finite is not."""
        return max(self.outputs, self.states, self.factors) <= self.tolerance

    def __str__(self) -> str:
        return f"o {self.outputs:.1e}, S {self.states:.1e}, u {self.factors:.1e} (at most {self.tolerance:.0e})"


class Expected(NamedTuple):
    """What one layer's pass must give."""

    outputs: Tensor
    factors: Tensor
    states: Tensor


def expected(problem: Problem, layer: int, *, deferred: bool) -> Expected:
    """Float64 outputs, factors and states of a layer.

    With a deferred commit the pass continues the state with the pending factors, and that state is what it stores;
    without, it continues the stored state, and its accepted path is added.
    """
    state = problem.state[layer]
    if deferred:
        waiting = slice(0, problem.pending)
        k, u, g = (x[layer][:, waiting] for x in (problem.pool.k, problem.pool.u, problem.pool.g))
        state = commit64(state, k, u, g)
    outputs, factors = verify64(problem.rows, state, problem.topologies)
    if not deferred:
        places = [
            [first + row for row in path] for first, path in zip(problem.first_rows, problem.accepted, strict=True)
        ]
        at = torch.tensor(places, device=state.device)
        rows = problem.rows
        state = commit64(state, rows.k[at], factors[at], rows.g[at])
    return Expected(outputs, factors, state)


def check(case: str, problem: Problem, contenders: Sequence[Contender]) -> list[Errors]:
    """Runs each contender once over all layers and compares. Contenders must be fresh: states are changed."""
    found = []
    for contender in contenders:
        outputs = []
        for layer in range(problem.layers):
            contender.verify(layer, 0)
            outputs.append(contender.outputs(layer)[: problem.used_rows].clone())
            contender.outputs(layer)[: problem.used_rows] = float("nan")  # the next layer must write all of them again
        contender.commit(0)
        worst = dict.fromkeys(("outputs", "states", "factors"), 0.0)
        for layer in range(problem.layers):
            want = expected(problem, layer, deferred=contender.deferred)
            pairs = {
                "outputs": (outputs[layer], want.outputs),
                "states": (contender.states(layer), want.states),
            }
            if isinstance(contender, Ours):
                pairs["factors"] = (contender.factors(layer), want.factors)
            for what, (got, right) in pairs.items():
                worst[what] = max(worst[what], relative_error(got, right))
        found.append(Errors(case=case, name=contender.name, tolerance=contender.tolerance, **worst))
    return found


def untouched(problem: Problem, contender: Ours) -> bool:
    """Whether a pass left the pool's pending rows as they were, and wrote nothing for rows that belong to nobody.

    A problem without such rows proves nothing and is false.
    """
    pairs = zip(contender.pool[:3], problem.pool[:3], strict=True)
    kept = all(torch.equal(after[:, :, :RING], before[:, :, :RING]) for after, before in pairs)
    nobodys = contender.outputs(0)[problem.used_rows :]
    return kept and len(nobodys) > 0 and bool(nobodys.isnan().all())
