"""The gated delta rule over trees, serially: the exact mode of verification on a CPU.

A row reads its parent's state S, and everything it computes is a fixed function of S and of its own inputs:

    [Yq, Yk] = [q, k] S;  u = beta v - (alpha beta) Yk;  o = alpha Yq + (q . k) u;  S' = alpha S + k u^T

which is u = beta (v - (alpha S)^T k), o = S'^T q without forming S' for rows that nobody continues. Rows go level by
level; siblings read their parent's state in one product, and only states with children are formed. Neither the tree
nor the batch enters a row's arithmetic: the K sum of the product runs in one order for any number of rows from two on
(q and k make two), which `exactness.py` checks on the build at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.kernels.tree import Level, TreeBatch


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
    alpha = torch.exp(g)
    if batch.cell_rows is not None:
        qk, v, alpha, beta = (x.index_select(0, batch.cell_rows) for x in (qk, v, alpha, beta))
    qk = qk.contiguous()
    alpha, beta = alpha.unsqueeze(-1), beta.unsqueeze(-1)  # [R, HV, 1]
    wanted, strength = v * beta, alpha * beta
    reads: list[Tensor] = []
    factors: list[Tensor] = []
    for level in batch.levels:
        read, recalled = _product(level, qk, state)  # [n, HV, V] each
        if len(batch.levels) == 1:
            u = torch.addcmul(wanted, recalled, strength, value=-1)
        else:
            cells = slice(level.start, level.stop)
            u = torch.addcmul(wanted[cells], recalled, strength[cells], value=-1)
        reads.append(read)
        factors.append(u)
        if level.inner:
            state = _inner_states(level, qk, u, alpha, state)
    read, u = (reads[0], factors[0]) if len(reads) == 1 else (torch.cat(reads), torch.cat(factors))
    overlap = (qk[:, 0] * qk[:, 1]).sum(-1, keepdim=True)  # [R, H, 1]
    if overlap.shape[1] != v.shape[1]:
        overlap = overlap.repeat_interleave(v.shape[1] // overlap.shape[1], 1)
    o = torch.addcmul(alpha * read, overlap, u)
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


def _product(level: Level, qk: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """q S and k S of the level's cells, S being their parents' states [P, HV, K, V]: two of [n, HV, V]."""
    parents, value_heads, key_width, value_width = states.shape
    heads, width = qk.shape[2], level.width
    if parents == 1 and heads == value_heads:
        left = qk[level.start : level.stop].view(2 * width, heads, key_width).transpose(0, 1)
    else:
        rows = qk.view(-1, key_width).index_select(0, level.qk_index(heads, value_heads))
        left = rows.view(parents * value_heads, 2 * width, key_width)
    product = torch.bmm(left, states.view(-1, key_width, value_width))  # [P HV, 2 width, V]
    if parents == 1:
        both = product.view(value_heads, width, 2, value_width).permute(2, 1, 0, 3)
    elif width == 1:
        both = product.view(parents, value_heads, 2, value_width).permute(2, 0, 1, 3)
    else:
        rows = product.view(-1, value_width).index_select(0, level.result_index(value_heads))
        both = rows.view(2, -1, value_heads, value_width)
    read, recalled = both.unbind(0)
    return read, recalled


def _inner_states(level: Level, qk: Tensor, u: Tensor, alpha: Tensor, states: Tensor) -> Tensor:
    """The states [m, HV, K, V] after the level's m cells that have children; `states` is left as it is."""
    if level.inner_slice is not None:
        inner = slice(level.start + level.inner_slice.start, level.start + level.inner_slice.stop)
        k, decay, u = qk[inner, 1], alpha[inner], u[level.inner_slice]
    else:
        index = level.inner_index + level.start
        k, decay, u = (
            qk[:, 1].index_select(0, index),
            alpha.index_select(0, index),
            u.index_select(0, level.inner_index),
        )
    if k.shape[1] != u.shape[1]:
        k = k.repeat_interleave(u.shape[1] // k.shape[1], 1)
    if level.parents > 1 and not level.same_parents:
        states = states.index_select(0, level.parent_of_inner_index)
    decayed = states * decay.unsqueeze(-1)  # [m, HV, K, V]
    return decayed.addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
