"""The float64 reference for whole batches, level by level, on whatever device the inputs are.

kernels/reference.py is the truth and reads like the equations, one head and row at a time; this form computes the same
for thousands of rows in a run's time. A test holds it to the loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.topology import Topology


def verify64(rows: LayerRows, state: Tensor, topologies: Sequence[Topology]) -> tuple[Tensor, Tensor]:
    """Outputs and factors of all rows, each continuing its parent's state.

    Args:
        rows: the layer's inputs, session after session.
        state: [B, HV, K, V] before the roots.
        topologies: B of them.

    Returns:
        o and u, float64 [R, HV, V] over the rows of the sessions.
    """
    group = rows.v.shape[1] // rows.k.shape[1]
    used = sum(len(t) for t in topologies)
    outputs = torch.empty(used, *rows.v.shape[1:], dtype=torch.float64, device=state.device)
    factors = torch.empty_like(outputs)
    states, level, before = state.double(), 0, {}  # before: where in `states` each row's parent lies
    first = 0
    for b, topology in enumerate(topologies):
        before[first] = b
        first += len(topology)
    while before:
        at = torch.tensor(list(before), device=state.device)
        q, k = (x[at].double().repeat_interleave(group, 1) for x in (rows.q, rows.k))
        v, g, beta = rows.v[at].double(), rows.g[at].double(), rows.beta[at].double()
        states = states[torch.tensor(list(before.values()), device=state.device)]
        states, u = step64(states, k, v, g, beta)
        outputs[at] = torch.einsum("rhkv,rhk->rhv", states, q)
        factors[at] = u
        level += 1
        before = _children(topologies, level, {row: i for i, row in enumerate(before)})
    return outputs, factors


def step64(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: states [R, HV, K, V], k [R, HV, K], v [R, HV, V], g and beta [R, HV], all float64; new state and u."""
    state = torch.exp(g)[..., None, None] * state
    u = beta[..., None] * (v - torch.einsum("rhkv,rhk->rhv", state, k))
    return state + k[..., :, None] * u[..., None, :], u


def commit64(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """States [B, HV, K, V] after the factors k [B, P, H, K], u [B, P, HV, V], g [B, P, HV], float64."""
    group = u.shape[2] // k.shape[2]
    result = state.double()
    for i in range(k.shape[1]):
        keys = k[:, i].double().repeat_interleave(group, 1)
        result = torch.exp(g[:, i].double())[..., None, None] * result
        result = result + keys[..., :, None] * u[:, i].double()[..., None, :]
    return result


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite where anything is not finite."""
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _children(topologies: Sequence[Topology], level: int, parents: dict[int, int]) -> dict[int, int]:
    """Rows of one level, each with its parent's place among the level before."""
    found, first = {}, 0
    for topology in topologies:
        if level < len(topology.levels):
            for row in topology.levels[level]:
                found[first + row] = parents[first + topology.parent_rows[row]]
        first += len(topology)
    return found
