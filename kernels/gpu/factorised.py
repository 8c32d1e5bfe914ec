"""Tree-masked factorised verification: all rows of a tree at once, for fast mode.

With G_i the sum of g over row i and its ancestors, D_ij the sum of g on the path from j (excluded) to i, and S the state
with the pending factors applied:

    A_ij = beta_i e^D_ij (k_i . k_j)  for j strictly above i;  (I + A) u = beta (v - e^G S^T k)
    o_i = e^G_i S^T q_i + sum of e^D_ij (q_i . k_j) u_j over j above i and i itself

Rows go block by block in topological order. Blocks above are eliminated by products; inside a block the unit lower
triangular system is solved by substitution, all rows of a depth together: after d rounds of u <- rhs - A u the rows of
depth up to d are final, each from the final values of its ancestors and from nothing else. The series of powers of A
is never formed: it blows up for correlated keys.

Numerics. Path sums are integers in units of 2^-18 (each g rounded once, below -40 taken as -40: e^-40 of a state is
nothing), so D_ij = G_i - G_j is exact, however strong a decay lies above both. Products of float32 operands are split
into bfloat16 halves (three products, errors of 2^-16); q and k in bfloat16 are exact already and S is split in two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.commit import AT_ONCE, apply_pending
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import PassBatch
from specla.kernels.gpu.serial import check_layer

_INTERPRETED = triton.knobs.runtime.interpret
_LOWEST = -40.0  # e^-40 = 4e-18
_UNITS = 262144.0  # 2^18: 129 rows of -40 stay below 2^31


class FactorisedTile(NamedTuple):
    """How the factorised kernel cuts its work: rows a block, columns of V a program, warps."""

    block_n: int
    block_v: int
    warps: int


def factorised_tile(tree_rows: int) -> FactorisedTile:
    """A tile that does well for trees of up to `tree_rows` rows; the selector knows better ones."""
    if tree_rows <= 16:
        return FactorisedTile(16, 16, 4)
    return FactorisedTile(32 if tree_rows <= 32 else 64, 16, 4)


@triton.jit
def _dot(a, b, INTERPRETED: tl.constexpr):
    """a @ b of float32, or of a 16-bit a (exact) and float32 b, as products of bfloat16 halves; float32 [M, N]."""
    if INTERPRETED:  # the interpreter's bfloat16 products are wrong
        return tl.dot(a.to(tl.float32), b, input_precision="ieee")
    b_hi = b.to(tl.bfloat16)
    b_lo = (b - b_hi.to(tl.float32)).to(tl.bfloat16)
    if a.dtype == tl.bfloat16:
        return tl.dot(a, b_hi) + tl.dot(a, b_lo)
    b_a = a.to(tl.float32)
    a_hi = b_a.to(tl.bfloat16)
    a_lo = (b_a - a_hi.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a_hi, b_hi) + tl.dot(a_hi, b_lo) + tl.dot(a_lo, b_hi)


@triton.jit
def _overlaps(a, b, INTERPRETED: tl.constexpr):
    """a @ b^T, [BN, BN] float32, of q or k in their own dtype: products of 16-bit numbers are exact."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")
    if a.dtype == tl.float32:
        return _dot(a, tl.trans(b), False)
    return tl.dot(a, tl.trans(b))


@triton.jit
def _on_path(p_ancestors, o_i, o_j, n, WORDS: tl.constexpr):
    """int32 [BN, BN], 1 where column row o_j is row o_i or above it; 0 for rows past the n-th."""
    mask = (o_i < n)[:, None] & (o_j < n)[None, :]
    word = tl.load(p_ancestors + o_i[:, None] * WORDS + (o_j // 32)[None, :], mask=mask, other=0)
    return (word >> (o_j & 31)[None, :]) & 1


@triton.jit
def _log_decay(p_g, o_j, n, HV: tl.constexpr, LOWEST: tl.constexpr, UNITS: tl.constexpr):
    """g of rows o_j in integer units, [BN]."""
    g = tl.load(p_g + o_j * HV, mask=o_j < n, other=0.0)
    return (tl.maximum(g, LOWEST) * UNITS - 0.5).to(tl.int32)


@triton.jit
def _path_sums(p_ancestors, p_g, i_n, n, BN: tl.constexpr, WORDS: tl.constexpr, HV: tl.constexpr, LOWEST: tl.constexpr, UNITS: tl.constexpr):
    """G of the rows of block i_n, in integer units, [BN]."""
    o_i = i_n * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.int32)
    for j_n in range(0, i_n + 1):
        o_j = j_n * BN + tl.arange(0, BN)
        g = _log_decay(p_g, o_j, n, HV, LOWEST, UNITS)
        total += tl.sum(_on_path(p_ancestors, o_i, o_j, n, WORDS) * g[None, :], 1)
    return total


@triton.jit
def verify_factorised_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_state,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    p_o,
    p_slot,
    p_row_start,
    p_pending_len,
    p_write_state,
    p_pending,
    p_pool_row,
    p_depth,
    p_ancestors,
    POOL: tl.constexpr,
    PENDING: tl.constexpr,
    WORDS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LOWEST: tl.constexpr,
    UNITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles of V, HV, sessions)."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(p_slot + i_b).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(p_row_start + i_b)
    n = tl.load(p_row_start + i_b + 1) - start
    n_pending = tl.load(p_pending_len + i_b)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    mask = m_k[:, None] & m_v[None, :]
    p_tile = p_state + (slot * HV + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    s = tl.load(p_tile, mask=mask, other=0.0)

    i_hk = i_h // (HV // H)
    p_q += (start * H + i_hk) * K
    p_k += (start * H + i_hk) * K
    p_v += (start * HV + i_h) * V
    p_o += (start * HV + i_h) * V
    p_g += start * HV + i_h
    p_beta += start * HV + i_h
    p_depth += start
    p_pool_row += start
    p_ancestors += start * WORDS
    pool = slot * POOL
    p_own_u = p_pool_u + (pool * HV + i_h) * V

    if n_pending > 0:
        s = apply_pending(
            s,
            p_pending + i_b * PENDING,
            n_pending,
            p_pool_k + pool * H * K,
            p_pool_u + pool * HV * V,
            p_pool_g + pool * HV,
            o_k,
            o_v,
            i_h,
            H,
            HV,
            K,
            V,
            AT_ONCE,
        )
        if tl.load(p_write_state + i_b) != 0:
            tl.store(p_tile, s, mask=mask)

    for i_n in range(0, 1 if ONE_BLOCK else tl.cdiv(n, BN)):
        o_i = i_n * BN + tl.arange(0, BN)
        m_i = o_i < n
        k_i = tl.load(p_k + o_i[:, None] * (H * K) + o_k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0)
        q_i = tl.load(p_q + o_i[:, None] * (H * K) + o_k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0)
        m_iv = m_i[:, None] & m_v[None, :]
        v = tl.load(p_v + o_i[:, None] * (HV * V) + o_v[None, :], mask=m_iv, other=0.0).to(tl.float32)
        beta = tl.load(p_beta + o_i * HV, mask=m_i, other=0.0)
        sums = _path_sums(p_ancestors, p_g, i_n, n, BN, WORDS, HV, LOWEST, UNITS)
        from_root = tl.exp(sums.to(tl.float32) * (1.0 / UNITS))[:, None]
        wanted = v - from_root * _dot(k_i, s, INTERPRETED)
        o = from_root * _dot(q_i, s, INTERPRETED)
        if not ONE_BLOCK:
            for j_n in range(0, i_n):
                o_j = j_n * BN + tl.arange(0, BN)
                k_j = tl.load(p_k + o_j[:, None] * (H * K) + o_k[None, :], mask=m_k[None, :], other=0.0)
                pool_j = tl.load(p_pool_row + o_j)
                u_j = tl.load(p_own_u + pool_j[:, None] * (HV * V) + o_v[None, :], mask=m_v[None, :], other=0.0)
                above = _on_path(p_ancestors, o_i, o_j, n, WORDS)
                sums_j = _path_sums(p_ancestors, p_g, j_n, n, BN, WORDS, HV, LOWEST, UNITS)
                between = (sums[:, None] - sums_j[None, :]).to(tl.float32) * (1.0 / UNITS)
                decay = tl.exp(tl.where(above != 0, between, -float("inf")))
                wanted -= _dot(decay * _overlaps(k_i, k_j, INTERPRETED), u_j, INTERPRETED)
                o += _dot(decay * _overlaps(q_i, k_j, INTERPRETED), u_j, INTERPRETED)

        above = _on_path(p_ancestors, o_i, o_i, n, WORDS)
        between = (sums[:, None] - sums[None, :]).to(tl.float32) * (1.0 / UNITS)
        decay = tl.exp(tl.where(above != 0, between, -float("inf")))
        system = tl.where(o_i[:, None] > o_i[None, :], decay * beta[:, None] * _overlaps(k_i, k_i, INTERPRETED), 0.0)
        target = beta[:, None] * wanted
        u = target
        depth = tl.load(p_depth + o_i, mask=m_i, other=0)
        shallowest = tl.min(tl.where(m_i, depth, 1 << 20), 0)
        for _ in range(shallowest, tl.max(depth, 0)):
            u = target - _dot(system, u, INTERPRETED)
        pool_i = tl.load(p_pool_row + o_i, mask=m_i, other=0)
        tl.store(p_own_u + pool_i[:, None] * (HV * V) + o_v[None, :], u, mask=m_iv)
        o += _dot(decay * _overlaps(q_i, k_i, INTERPRETED), u, INTERPRETED)
        tl.store(p_o + o_i[:, None] * (HV * V) + o_v[None, :], o.to(p_o.dtype.element_ty), mask=m_iv)
        if not ONE_BLOCK:
            tl.debug_barrier()  # later blocks read this block's u, whichever thread stored it


def verify_factorised(
    rows: LayerRows,
    state: Tensor,
    pool: FactorPool,
    batch: PassBatch,
    o: Tensor,
    tile: FactorisedTile | None = None,
) -> None:
    """Outputs and factors of all rows, each continuing the state of its parent; fast.

    Arguments, results and errors as for `serial.verify_serial`; `tile` is the selector's, or a default. The state is
    committed with the arithmetic of the serial kernels. Outputs and factors depend, in the last bits, on the tree.
    """
    check_layer(rows, state, pool, batch, o)
    bucket, (_, value_heads, key_width, value_width) = batch.bucket, state.shape
    tile = tile or factorised_tile(bucket.tree_rows)
    verify_factorised_kernel[(triton.cdiv(value_width, tile.block_v), value_heads, bucket.sessions)](
        *rows,
        state,
        pool.k,
        pool.u,
        pool.g,
        o,
        batch.slot,
        batch.row_start,
        batch.pending_len,
        batch.write_state,
        batch.pending,
        batch.pool_row,
        batch.depth,
        batch.ancestors,
        POOL=pool.k.shape[1],
        PENDING=bucket.pending,
        WORDS=bucket.words,
        ONE_BLOCK=bucket.tree_rows <= tile.block_n,
        H=rows.k.shape[1],
        HV=value_heads,
        K=key_width,
        V=value_width,
        BK=triton.next_power_of_2(key_width),
        BV=tile.block_v,
        BN=tile.block_n,
        AT_ONCE=AT_ONCE,
        LOWEST=_LOWEST,
        UNITS=_UNITS,
        INTERPRETED=_INTERPRETED,
        num_warps=tile.warps,
    )
