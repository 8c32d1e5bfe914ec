"""The truth: every operation of the recurrence in float64, as loops that read like the equations.

The fast forms are tested against these, one head and one row at a time. Nothing here is meant to be quick. All tensors
are converted to float64 and results are float64.

Shapes: N rows of one session in topological order (row 0 is the root), H key heads, HV value heads (a multiple of H:
value head h reads key head h // (HV / H)), K and V the head dimensions, D convolution channels, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One token through one head: the new state [K, V], the factor u [V] and the output o [V]."""

    state: Tensor
    u: Tensor
    o: Tensor


class Accepted(NamedTuple):
    """The rows a pass keeps, root first, and the token that the target adds after the last of them."""

    rows: list[int]
    bonus_token: int


def gated_delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Step:
    """The gated delta rule for one head: S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q.

    Args:
        state: [K, V] before the token; left as it is.
        q: [K], normalised and scaled by K^-1/2.
        k: [K], normalised.
        v: [V].
        g: scalar, the log of the decay, at most 0; -inf forgets everything.
        beta: scalar, 0 to 2.
    """
    state, q, k, v, g, beta = (x.double() for x in (state, q, k, v, g, beta))
    state = torch.exp(g) * state
    u = beta * (v - state.T @ k)
    state = state + torch.outer(k, u)
    return Step(state, u, state.T @ q)


def verify_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Outputs and factors of all rows, each row continuing the state of its parent.

    Args:
        q, k: [N, H, K].
        v: [N, HV, V].
        g, beta: [N, HV].
        state: [HV, K, V] before the root; left as it is.
        parents: the parent's row for each row, -1 for row 0.

    Returns:
        o and u, both float64 [N, HV, V].
    """
    heads, group = state.shape[0], state.shape[0] // q.shape[1]
    outputs = torch.empty_like(v, dtype=torch.float64)
    factors = torch.empty_like(v, dtype=torch.float64)
    for h in range(heads):
        states: list[Tensor] = []
        for row, parent in enumerate(parents):
            before = state[h] if parent < 0 else states[parent]
            step = gated_delta_step(before, q[row, h // group], k[row, h // group], v[row, h], g[row, h], beta[row, h])
            states.append(step.state)
            outputs[row, h], factors[row, h] = step.o, step.u
    return outputs, factors


def commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, path: Sequence[int]) -> Tensor:
    """The state after an accepted path, from the factors alone: S <- e^g S + k u^T for each row of the path in turn.

    Args:
        state: [HV, K, V] before the root; left as it is.
        k: [N, H, K].
        u: [N, HV, V].
        g: [N, HV].
        path: accepted rows from the root on; empty leaves the state.

    Returns:
        float64 [HV, K, V].
    """
    group = state.shape[0] // k.shape[1]
    result = state.double()
    for row in path:
        keys = k[row].double().repeat_interleave(group, 0)  # [HV, K]
        decay = torch.exp(g[row].double())  # [HV]
        result = decay[:, None, None] * result + keys[:, :, None] * u[row].double()[:, None, :]
    return result


def convolution(x: Tensor, window: Tensor, weight: Tensor, parents: Sequence[int]) -> Tensor:
    """Depthwise causal convolution and silu, each row's taps being itself, its ancestors, then the stored window.

    Args:
        x: [N, D], raw inputs.
        window: [W - 1, D], the raw inputs before the root, oldest first (zeros before the prompt).
        weight: [W, D], the last tap multiplies the row itself.
        parents: the parent's row for each row, -1 for row 0.

    Returns:
        float64 [N, D].
    """
    y = torch.empty_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        inputs = _inputs_up_to(x, window, row, parents)[-weight.shape[0] :]
        total = sum((w.double() * value.double() for w, value in zip(weight, inputs, strict=True)), torch.zeros(()))
        y[row] = total / (1 + torch.exp(-total))
    return y


def advance_window(window: Tensor, x: Tensor, path: Sequence[int]) -> Tensor:
    """The window [W - 1, D] after an accepted path (rows of x [N, D], root first), in the window's own dtype."""
    inputs = [*window, *(x[row] for row in path)]
    return torch.stack(inputs[len(inputs) - window.shape[0] :])


def accept(parents: Sequence[int], tokens: Sequence[int], sampled: Sequence[int]) -> Accepted:
    """Walks from the root to the child that holds the target's token for as long as there is one.

    Args:
        parents: the parent's row for each row, -1 for row 0.
        tokens: each row's token; the root's is not looked at.
        sampled: the token that the target draws after each row.
    """
    rows = [0]
    while True:
        wanted = sampled[rows[-1]]
        child = next((r for r, p in enumerate(parents) if p == rows[-1] and tokens[r] == wanted), None)
        if child is None:
            return Accepted(rows, wanted)
        rows.append(child)


def l2_normalise(x: Tensor, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    """scale x / sqrt(sum x^2 + eps) over the last dimension, as fla's kernels define it."""
    x = x.double()
    return scale * x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight x / sqrt(mean x^2 + eps) over the last dimension."""
    x = x.double()
    return weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """Log decay and writing strength from the layer's projections a, b [N, HV] and parameters a_log, dt_bias [HV].

    g = -exp(a_log) softplus(a + dt_bias); beta = sigmoid(b), doubled where negative eigenvalues are allowed.

    Returns:
        g and beta, both float64 [N, HV].
    """
    pre = a.double() + dt_bias.double()
    softplus = torch.clamp(pre, min=0) + torch.log1p(torch.exp(-pre.abs()))
    beta = 1 / (1 + torch.exp(-b.double()))
    return -torch.exp(a_log.double()) * softplus, beta * (2 if allow_neg_eigval else 1)


def _inputs_up_to(x: Tensor, window: Tensor, row: int, parents: Sequence[int]) -> list[Tensor]:
    """The window's entries, then the raw inputs from the root down to `row`."""
    path = []
    while row >= 0:
        path.append(x[row])
        row = parents[row]
    return [*window, *reversed(path)]
