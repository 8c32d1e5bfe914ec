"""The gated delta rule over trees, serially: the exact mode of verification on a CPU.

A row reads its parent's state S, and everything it computes is a fixed function of S and of its own inputs:

    [y, r] = [q, k]^T S;  u = beta v - (alpha beta) r;  o = alpha y + (q . k) u;  S' = alpha S + k u^T

which is u = beta (v - (alpha S)^T k), o = S'^T q without forming S' for rows that nobody continues. Neither the tree
nor the batch enters a row's arithmetic. In particular every row has its own product of two rows, q and k, with S: one
product for all siblings would be quicker, but on some processors (AVX2 with MKL) the order of its K sum changes with
the number of siblings. `exactness.py` checks the build at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.kernels.tree import Step, TreeBatch


def verify_exact(
    qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, batch: TreeBatch
) -> tuple[Tensor, Tensor]:
    """Outputs and factors of all rows, with bits that do not depend on the tree or the batch.

    Args:
        qk: float32 [R, 2, H, K], q and k of each row, from `rowwise.l2_normalise` (q scaled by K^-1/2).
        v: float32 [R, HV, V], HV a multiple of H.
        g: float32 [R, HV], log decay, -inf to 0.
        beta: float32 [R, HV], 0 to 2.
        state: float32 [B, HV, K, V], each session's state before its root, contiguous; not written.
        batch: whose rows these are.

    Returns:
        o and u, both float32 [R, HV, V].

    Raises:
        ValueError: the shapes do not belong together.
    """
    check_shapes(qk, v, g, beta, state, batch)
    if batch.cell_rows is not None:
        qk, v, g, beta = (x.index_select(0, batch.cell_rows) for x in (qk, v, g, beta))
    if qk.shape[2] != v.shape[1]:
        qk = qk.repeat_interleave(v.shape[1] // qk.shape[2], 2)
    qk = qk.contiguous()
    alpha, beta = torch.exp(g).unsqueeze(-1), beta.unsqueeze(-1)  # [R, HV, 1]
    wanted, strength = v * beta, alpha * beta
    if batch.roots_only:
        y, recalled = _read_roots(qk, state)
        u = torch.addcmul(wanted, strength, recalled, value=-1)
    else:
        y, u = _walk(qk, wanted, strength, alpha, state, batch)
    overlap = (qk[:, 0] * qk[:, 1]).sum(-1, keepdim=True)  # [R, HV, 1]
    o = torch.mul(alpha, y, out=torch.empty_like(u)).addcmul_(overlap, u)
    if batch.row_cells is not None:
        o, u = o.index_select(0, batch.row_cells), u.index_select(0, batch.row_cells)
    return o, u


def check_shapes(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, batch: TreeBatch) -> None:
    """Raises ValueError unless the tensors describe the batch's rows and sessions."""
    rows, _, heads, width = qk.shape
    value_heads, value_width = v.shape[1:]
    fits = (
        rows == batch.rows == v.shape[0]
        and value_heads % heads == 0
        and g.shape == beta.shape == (rows, value_heads)
        and state.shape == (batch.sessions, value_heads, width, value_width)
    )
    if not fits:
        raise ValueError(
            f"qk {list(qk.shape)}, v {list(v.shape)}, g {list(g.shape)}, beta {list(beta.shape)} and state "
            f"{list(state.shape)} do not fit {batch.rows} rows of {batch.sessions} sessions: want qk [R, 2, H, K], "
            "v [R, HV, V], g and beta [R, HV], state [B, HV, K, V] with HV a multiple of H"
        )


def _read_roots(qk: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S^T q and S^T k, both [B, HV, V], of one row a session: plain decoding."""
    sessions, heads, key_width, value_width = state.shape
    left = qk.transpose(1, 2).reshape(sessions * heads, 2, key_width)
    product = torch.bmm(left, state.view(-1, key_width, value_width))  # [B HV, 2, V]
    y, recalled = product.view(sessions, heads, 2, value_width).unbind(2)
    return y, recalled


def _walk(
    qk: Tensor, wanted: Tensor, strength: Tensor, alpha: Tensor, state: Tensor, batch: TreeBatch
) -> tuple[Tensor, Tensor]:
    """S^T q and u, both [R, HV, V], of all cells; each step forms one state and reads it for all who continue it."""
    rows, heads, value_width = wanted.shape
    u = torch.empty_like(wanted)
    products = torch.empty(rows, heads, 2, value_width)  # S^T q and S^T k
    sizes = [step.size for step in batch.steps]
    by_step = (x.split_with_sizes(sizes) for x in (wanted, strength, products[:, :, 1], u))
    pairs, results = iter(qk.transpose(1, 2).unbind(0)), iter(products.unbind(0))  # [HV, 2, K], [HV, 2, V] each
    keys, factors = qk[:, 1].unsqueeze(-1).unbind(0), u.unsqueeze(2).unbind(0)  # [HV, K, 1], [HV, 1, V] each
    decays = alpha.unsqueeze(-1).unbind(0)  # [HV, 1, 1] each
    stored = state.unbind(0)
    states: list[Tensor | None] = []  # what each step reads, [HV, K, V]; None once it is overwritten
    for step, target, pull, recalled, factor in zip(batch.steps, *by_step, strict=True):
        if step.parent < 0:
            read_state = stored[step.session]
        else:
            read_state = _decayed(step, states, batch, decays[step.parent])
            read_state.addcmul_(keys[step.parent], factors[step.parent])
        for _ in range(step.size):
            torch.bmm(next(pairs), read_state, out=next(results))
        torch.addcmul(target, pull, recalled, value=-1, out=factor)  # [size, HV, V]
        states.append(read_state)
    return products[:, :, 0], u


def _decayed(step: Step, states: list[Tensor | None], batch: TreeBatch, decay: Tensor) -> Tensor:
    """The decayed state [HV, K, V] that a step's own is formed from; states that roots read are stored, and copied."""
    before = states[step.source]
    assert before is not None
    if step.last_use and batch.steps[step.source].parent >= 0:
        states[step.source] = None
        return before.mul_(decay)
    return before * decay
