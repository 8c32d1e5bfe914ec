"""The gated delta rule over trees, serially: the exact mode of verification on a CPU.

A row reads its parent's state S, and everything it computes is a fixed function of S and of its own inputs:

    [y, r] = [q, k]^T S;  u = beta v - (alpha beta) r;  o = alpha y + (q . k) u;  S' = alpha S + k u^T

which is u = beta (v - (alpha S)^T k), o = S'^T q without forming S' for rows that nobody continues. Siblings read
their parent's state in one product. Neither the tree nor the batch enters a row's arithmetic: the K sum of the product
runs in one order for any number of rows from two on (q and k make two), which `exactness.py` checks on the build at
hand.
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
    rows, _, heads, key_width = qk.shape
    sizes = [step.size for step in batch.steps]
    u = torch.empty_like(wanted)
    per_step = zip(
        batch.steps,
        qk.view(2 * rows, heads, key_width).transpose(0, 1).split_with_sizes([2 * size for size in sizes], 1),
        *(x.transpose(0, 1).split_with_sizes(sizes, 1) for x in (wanted, strength, u)),
        strict=True,
    )
    keys, factors = qk[:, 1].unsqueeze(-1).unbind(0), u.unsqueeze(2).unbind(0)  # [HV, K, 1], [HV, 1, V] each
    decays = alpha.unsqueeze(-1).unbind(0)  # [HV, 1, 1] each
    stored = state.unbind(0)
    states: list[Tensor | None] = []  # what each step reads, [HV, K, V]; None once it is overwritten
    products: list[Tensor] = []  # S^T q and S^T k of each step's cells, alternating, [HV, 2 size, V]
    for step, left, target, pull, factor in per_step:
        if step.parent < 0:
            read_state = stored[step.session]
        else:
            read_state = _decayed(step, states, batch, decays[step.parent])
            read_state.addcmul_(keys[step.parent], factors[step.parent])
        product = torch.bmm(left, read_state)
        torch.addcmul(target, pull, product[:, 1::2], value=-1, out=factor)  # [HV, size, V]
        products.append(product)
        states.append(read_state)
    return torch.cat(products, 1)[:, ::2].transpose(0, 1), u


def _decayed(step: Step, states: list[Tensor | None], batch: TreeBatch, decay: Tensor) -> Tensor:
    """The decayed state [HV, K, V] that a step's own is formed from; states that roots read are stored, and copied."""
    before = states[step.source]
    assert before is not None
    if step.last_use and batch.steps[step.source].parent >= 0:
        states[step.source] = None
        return before.mul_(decay)
    return before * decay
