"""The gated delta rule over trees, all rows at once: the fast mode of verification on a CPU.

With G_i the sum of g over row i and its ancestors, D_ij the sum of g on the path from j (excluded) to i, and S0 the
state before the root:

    A_ij = beta_i e^D_ij (k_i . k_j)  for j strictly above i;  (I + A) u = beta (v - e^G S0^T k)
    o_i = e^G_i S0^T q_i + sum of e^D_ij (q_i . k_j) u_j over j above i and i itself

I + A is unit lower triangular because parents precede their children. It is solved by substitution: series of powers
of A blow up in float32 for correlated keys. D is summed along the path, never formed as a difference of totals, which
loses its digits after one strong decay. Results depend, in the last bits, on the tree and the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.kernels.gated_delta import check_shapes, verify_exact
from specla.kernels.tree import TreeBatch

_SINGLE_ROWS = 32
"""Up to so many single precision does; with equal keys and beta 2 errors grow with the rows, on some processors beyond
1e-5 at 129."""

_LOWEST_LOG = -1e4  # e^-104 is already 0 in float32; finite, so that 0 times it is 0


def verify_fast(
    qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, batch: TreeBatch
) -> tuple[Tensor, Tensor]:
    """Outputs and factors of all rows; arguments, results and errors as for `gated_delta.verify_exact`.

    A batch without candidates has nothing to factorise and takes the exact form, which is then the faster one.
    """
    if batch.roots_only:
        return verify_exact(qk, v, g, beta, state, batch)
    check_shapes(qk, v, g, beta, state, batch)
    trees, sessions, n = batch.padded, batch.sessions, batch.padded.width
    value_heads, key_width, value_width = state.shape[1:]
    if n > _SINGLE_ROWS:
        qk, v, g, beta, state = (x.double() for x in (qk, v, g, beta, state))
    if trees.rows is not None:
        qk, v, g, beta = (x.index_select(0, trees.rows) for x in (qk, v, g, beta))
    if qk.shape[2] != value_heads:
        qk = qk.repeat_interleave(value_heads // qk.shape[2], 2)

    qk = qk.view(sessions, n, 2, value_heads, key_width).permute(0, 3, 2, 1, 4)  # [B, HV, 2, N, K]
    left = qk.reshape(sessions * value_heads, 2 * n, key_width)
    keys = left[:, n:]  # [B HV, N, K]
    read, recalled = torch.bmm(left, state.view(-1, key_width, value_width)).split(n, 1)  # [B HV, N, V] each
    scores, overlaps = torch.bmm(left, keys.mT).split(n, 1)  # q_i . k_j and k_i . k_j, [B HV, N, N]
    decay = _path_decays(g.view(sessions, n, value_heads), batch)  # [B HV, N, N + 1]
    from_root, between = decay[:, :, :1], decay[:, :, 1:]

    v = v.view(sessions, n, value_heads, value_width).transpose(1, 2).reshape(-1, n, value_width)
    beta = beta.reshape(sessions, n, value_heads).transpose(1, 2).reshape(-1, n, 1)
    system = (overlaps * between).mul_(beta)  # the diagonal is taken as 1, the rest above it is 0
    wanted = torch.addcmul(v, from_root, recalled, value=-1).mul_(beta)
    u = torch.linalg.solve_triangular(system.mT, wanted.mT, upper=True, left=False, unitriangular=True).mT
    o = torch.baddbmm(from_root * read, scores * between, u)

    o, u = (
        x.view(sessions, value_heads, n, value_width).transpose(1, 2).reshape(-1, value_heads, value_width)
        for x in (o.float(), u.float())
    )
    if trees.places is not None:
        o, u = o.index_select(0, trees.places), u.index_select(0, trees.places)
    return o, u


def _path_decays(g: Tensor, batch: TreeBatch) -> Tensor:
    """e^D of g [B, N, HV] as [B HV, N, N + 1]: column 0 from before the root, then from each row; 0 off the path."""
    trees, (sessions, n, heads) = batch.padded, g.shape
    g = g.clamp(min=_LOWEST_LOG).transpose(1, 2).contiguous()  # [B, HV, N]
    on_path = trees.path * g.unsqueeze(2)  # [B, HV, N, N]
    sums = torch.bmm(on_path.view(sessions, heads * n, n), trees.below.to(g.dtype))  # [B, HV N, N + 1]
    return sums.view(sessions, heads, n, n + 1).add_(trees.off_path).exp_().flatten(0, 1)
