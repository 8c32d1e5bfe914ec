"""Tree-masked factorised verification: all rows of a tree at once, for fast mode.

With G_i the sum of g over row i and its ancestors, D_ij the sum of g on the path from j (excluded) to i, and S the
state with the pending factors applied:

    A_ij = beta_i e^D_ij (k_i . k_j)  for j strictly above i;  (I + A) u = beta (v - e^G S^T k)
    o_i = e^G_i S^T q_i + sum of e^D_ij (q_i . k_j) u_j over j above i and i itself

A program owns some columns of one head's state. One sweep over K reads each part of S once, commits the pending
factors to it, stores it, and adds up S^T k, S^T q, k . k and q . k; what is left is small. Rows go block by block in
topological order: blocks above are eliminated by products, and inside a block the unit lower triangular system is
solved by substitution, all rows of a depth together. After d rounds of u <- rhs - A u the rows of depth up to d are
final, each from the final values of its ancestors and from nothing else. The series of powers of A is never formed:
it blows up for correlated keys.

Numerics. Path sums are integers in units of 2^-18 (each g rounded once, below -40 taken as -40: e^-40 of a state is
nothing), so D_ij = G_i - G_j is exact, however strong a decay lies above both. Products of float32 operands are split
into bfloat16 halves (three products, errors of 2^-16); q and k in bfloat16 are exact already and S is split in two.
q and k in other dtypes meet S in three products of tf32.

Three forms do this. The one below takes all widths, dtypes and trees and runs in Triton's interpreter. For bfloat16 and
the usual widths two others are much quicker: held.py (held_blocks.py for trees of more than 16 rows), and for several
sessions with smaller ones streamed.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu import held, held_blocks, streamed
from specla.kernels.gpu.commit import prefetch
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.overlap import Admit, admit_at_start, overlapping, wait_for_previous
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.serial import check_layer, layer_sizes
from specla.kernels.gpu.serial_split import WIDTHS
from specla.kernels.gpu.streamed import StreamedTile

_LOWEST = -40.0  # e^-40 = 4e-18
_UNITS = 262144.0  # 2^18: 129 rows of -40 stay below 2^31
_AT_ONCE = 16  # pending factors that are applied together


class FactorisedTile(NamedTuple):
    """How the factorised kernel cuts its work."""

    block_n: int
    """Rows a block: 16 or 32."""
    block_v: int
    """Columns of V a program: 16, 32 or 64."""
    part_k: int = 256
    """Rows of S in one step of the sweep over K: 16, 32, 64, 128 or 256."""
    warps: int = 4


AnyTile = FactorisedTile | HeldTile | StreamedTile
"""A form and how it cuts its work."""


def factorised_tile(tree_rows: int) -> FactorisedTile:
    """A tile of the general form that does well for trees of up to `tree_rows` rows; the selector knows better ones."""
    if tree_rows <= 32:
        return FactorisedTile(16 if tree_rows <= 16 else 32, 16)
    return FactorisedTile(32, 16, part_k=128)


def why_unfit(tile: AnyTile, bucket: Bucket, key_width: int, value_width: int, dtype: torch.dtype) -> str:
    """What keeps a tile from verifying such layers; empty if nothing does."""
    if isinstance(tile, FactorisedTile):
        cut = tile.block_n in (16, 32) and tile.block_v in (16, 32, 64) and tile.part_k in (16, 32, 64, 128, 256)
        return "" if cut else "want block_n 16 or 32, block_v 16, 32 or 64, part_k a power of two from 16 to 256"
    if triton.knobs.runtime.interpret:
        return "runs on a GPU alone"
    if dtype != torch.bfloat16 or key_width not in WIDTHS:
        return f"want bfloat16 and keys of width {', '.join(map(str, WIDTHS))}"
    if isinstance(tile, HeldTile):
        warps = (1, 2, 4) if bucket.tree_rows <= held.ROWS else (2, 4)
        if tile.warps in warps and value_width % 16 == 0:
            return ""
        return f"want {', '.join(map(str, warps))} warps and V a multiple of 16"
    if tile.part_k not in (32, 64) or tile.stages < 2:
        return "want part_k 32 or 64 and at least 2 stages"
    sizes = bucket.tree_rows <= streamed.MOST_ROWS and bucket.pending <= streamed.MOST_PENDING
    if not (sizes and value_width % streamed.COLUMNS == 0):
        return (
            f"want trees of up to {streamed.MOST_ROWS} rows, up to {streamed.MOST_PENDING} pending factors and V a "
            f"multiple of {streamed.COLUMNS}"
        )
    return ""


@triton.jit
def _halves(x):
    """float32 x as the sum of two bfloat16, to 2^-16."""
    hi = x.to(tl.bfloat16)
    return hi, (x - hi.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b of float32, as products of bfloat16 halves."""
    if INTERPRETED:  # the interpreter's bfloat16 products are wrong
        return acc + tl.dot(a, b, input_precision="ieee")
    a_hi, a_lo = _halves(a)
    b_hi, b_lo = _halves(b)
    return tl.dot(a_hi, b_hi, tl.dot(a_hi, b_lo, tl.dot(a_lo, b_hi, acc)))


@triton.jit
def _read(rows, s, s_hi, s_lo, acc, INTERPRETED: tl.constexpr):
    """acc + rows @ s for q or k in their own dtype: bfloat16 is exact as it is, others as three products of tf32."""
    if INTERPRETED:
        return acc + tl.dot(rows.to(tl.float32), s, input_precision="ieee")
    if rows.dtype == tl.bfloat16:
        return tl.dot(rows, s_hi, tl.dot(rows, s_lo, acc))
    return tl.dot(rows.to(tl.float32), s, acc, input_precision="tf32x3")


@triton.jit
def _overlaps(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b^T of q or k [BN, BKP] in their own dtype: products of 16-bit numbers are exact."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")
    if a.dtype == tl.float32:
        return tl.dot(a, tl.trans(b), acc, input_precision="tf32x3")
    return tl.dot(a, tl.trans(b), acc)


@triton.jit
def _on_path(p_ancestors, o_i, j_n, n, BN: tl.constexpr, WORDS: tl.constexpr):
    """int32 [BN, BN], 1 where a row of block j_n is row o_i or above it; 0 for rows past the n-th."""
    word = tl.load(p_ancestors + o_i * WORDS + j_n * BN // 32, mask=o_i < n, other=0)
    o_j = j_n * BN + tl.arange(0, BN)
    return (word[:, None] >> (o_j & 31)[None, :]) & 1


@triton.jit
def _path_sums(
    p_ancestors,
    p_g,
    i_n,
    n,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    HV: tl.constexpr,
    LOWEST: tl.constexpr,
    UNITS: tl.constexpr,
):
    """G of the rows of block i_n, in integer units, [BN]."""
    o_i = i_n * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.int32)
    for j_n in range(0, i_n + 1):
        o_j = j_n * BN + tl.arange(0, BN)
        g = tl.maximum(tl.load(p_g + o_j * HV, mask=o_j < n, other=0.0), LOWEST)
        units = (g * UNITS - 0.5).to(tl.int32)
        total += tl.sum(_on_path(p_ancestors, o_i, j_n, n, BN, WORDS) * units[None, :], 1)
    return total


@triton.jit
def _decay(above, sums_i, sums_j, UNITS: tl.constexpr):
    """e^D, [BN, BN]; 0 off the path."""
    between = (sums_i[:, None] - sums_j[None, :]).to(tl.float32) * (1.0 / UNITS)
    return tl.exp(tl.where(above != 0, between, -float("inf")))


@triton.jit
def _load_rows(p, o_n, n, o_k, H: tl.constexpr, K: tl.constexpr):
    """q or k of rows o_n, [BN, BKP]; 0 past the n-th."""
    return tl.load(p + o_n[:, None] * (H * K) + o_k[None, :], mask=(o_n < n)[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def _weighted(
    p_pending, first, n_pending, p_pool_u, p_pool_g, o_v, HV: tl.constexpr, V: tl.constexpr, BP: tl.constexpr
):
    """Pending factors from the `first` on: pool rows [BP], e^(sum of g after) u [BP, BV] and e^(sum of all g)."""
    o_p = tl.arange(0, BP)
    used = first + o_p < n_pending
    row = tl.load(p_pending + first + o_p, mask=used, other=0)
    g = tl.load(p_pool_g + row * HV, mask=used, other=0.0)
    u = tl.load(p_pool_u + row[:, None] * (HV * V) + o_v[None, :], mask=used[:, None] & (o_v < V)[None, :], other=0.0)
    later = tl.sum(tl.where(o_p[None, :] > o_p[:, None], g[None, :], 0.0), 1)
    return row, tl.exp(later)[:, None] * u, tl.exp(tl.sum(g, 0))


@triton.jit
def _load_pending_keys(
    p_pool_k, row, first, n_pending, first_k, BKP: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BP: tl.constexpr
):
    """k of some pending factors for the rows of S from first_k on, [BKP / 16, 16, BP]; 0 past the last."""
    o_k = first_k + tl.arange(0, BKP // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = (first + tl.arange(0, BP) < n_pending)[None, None, :] & (o_k < K)[:, :, None]
    return tl.load(p_pool_k + row[None, None, :] * (H * K) + o_k[:, :, None], mask=mask, other=0.0)


@triton.jit
def _committed(s, k, u, decay, INTERPRETED: tl.constexpr):
    """decay s + sum of k_j u_j^T over some pending factors: [BKP, BV]; k is [BKP / 16, 16, BP], u [BP, BV].

    u is split into three bfloat16 parts, so that the sum has the precision of float32. The product is taken in slices
    of 16 rows: the instruction that a large product would use needs its operands in other places.
    """
    shape: tl.constexpr = [k.shape[0], u.shape[0], u.shape[1]]
    zero = tl.zeros([k.shape[0], 16, u.shape[1]], tl.float32)
    if INTERPRETED:
        more = tl.dot(k.to(tl.float32), tl.broadcast_to(u[None, :, :], shape), input_precision="ieee")
    elif k.dtype == tl.bfloat16:
        u_hi, u_mid = _halves(u)
        u_lo = (u - u_hi.to(tl.float32) - u_mid.to(tl.float32)).to(tl.bfloat16)
        hi = tl.broadcast_to(u_hi[None, :, :], shape)
        mid = tl.broadcast_to(u_mid[None, :, :], shape)
        lo = tl.broadcast_to(u_lo[None, :, :], shape)
        more = tl.dot(k, hi, tl.dot(k, mid, tl.dot(k, lo, zero)))
    else:
        wide = tl.broadcast_to(u[None, :, :], shape)
        more = tl.dot(k.to(tl.float32), wide, zero, input_precision="tf32x3")
    return tl.fma(s, tl.broadcast_to(decay, s.shape), tl.reshape(more, s.shape))


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
    BLOCKS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BKP: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    LOWEST: tl.constexpr,
    UNITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles of V, HV, sessions)."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    admit_at_start(OVERLAP)
    slot = tl.load(p_slot + i_b).to(tl.int64)
    start = tl.load(p_row_start + i_b)
    n = tl.load(p_row_start + i_b + 1) - start
    n_pending = tl.load(p_pending_len + i_b)
    write_state = tl.load(p_write_state + i_b)
    if slot < 0:
        wait_for_previous(OVERLAP)
        return
    i_hk = i_h // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    p_state += (slot * HV + i_h) * K * V
    p_pending += i_b * PENDING
    pool = slot * POOL
    p_pool_k += (pool * H + i_hk) * K
    p_pool_u += (pool * HV + i_h) * V
    p_pool_g += pool * HV + i_h
    p_q += (start * H + i_hk) * K
    p_k += (start * H + i_hk) * K
    p_v += (start * HV + i_h) * V
    p_o += (start * HV + i_h) * V
    p_g += start * HV + i_h
    p_beta += start * HV + i_h
    p_depth += start
    p_pool_row += start
    p_ancestors += start * WORDS
    if not INTERPRETED:
        prefetch(p_state + tl.minimum(tl.arange(0, BK), K - 1) * V + i_v * BV)
    wait_for_previous(OVERLAP)
    row, u_p, decay_p = _weighted(p_pending, 0, n_pending, p_pool_u, p_pool_g, o_v, HV, V, BP)

    for i_n in range(0, 1 if BLOCKS == 1 else tl.cdiv(n, BN)):
        # All that needs no S first: S and the rows of the first step of the sweep are long on their way.
        o_i = i_n * BN + tl.arange(0, BN)
        m_iv = (o_i < n)[:, None] & m_v[None, :]
        v = tl.load(p_v + o_i[:, None] * (HV * V) + o_v[None, :], mask=m_iv, other=0.0).to(tl.float32)
        beta = tl.load(p_beta + o_i * HV, mask=o_i < n, other=0.0)[:, None]
        depth = tl.load(p_depth + o_i, mask=o_i < n, other=0)
        pool_row = tl.load(p_pool_row + o_i, mask=o_i < n, other=0)
        sums = _path_sums(p_ancestors, p_g, i_n, n, BN, WORDS, HV, LOWEST, UNITS)
        commits = (n_pending > 0) & ((i_n == 0) | (write_state == 0))  # later blocks read what the first has stored
        from_s_k, from_s_q = tl.zeros([BN, BV], tl.float32), tl.zeros([BN, BV], tl.float32)
        k_k, q_k = tl.zeros([BN, BN], tl.float32), tl.zeros([BN, BN], tl.float32)
        for part in range(0, BK // BKP):
            o_k = part * BKP + tl.arange(0, BKP)
            mask = (o_k < K)[:, None] & m_v[None, :]
            p_tile = p_state + o_k[:, None] * V + o_v[None, :]
            s = tl.load(p_tile, mask=mask, other=0.0)
            k_i = _load_rows(p_k, o_i, n, o_k, H, K)
            q_i = _load_rows(p_q, o_i, n, o_k, H, K)
            k_p = _load_pending_keys(p_pool_k, row, 0, n_pending, part * BKP, BKP, H, K, BP)
            k_k = _overlaps(k_i, k_i, k_k, INTERPRETED)
            q_k = _overlaps(q_i, k_i, q_k, INTERPRETED)
            if commits:
                s = _committed(s, k_p, u_p, decay_p, INTERPRETED)
                if PENDING > BP:
                    for first in range(BP, n_pending, BP):
                        row_2, u_2, decay_2 = _weighted(p_pending, first, n_pending, p_pool_u, p_pool_g, o_v, HV, V, BP)
                        k_2 = _load_pending_keys(p_pool_k, row_2, first, n_pending, part * BKP, BKP, H, K, BP)
                        s = _committed(s, k_2, u_2, decay_2, INTERPRETED)
                if write_state != 0:
                    tl.store(p_tile, s, mask=mask)
            s_hi, s_lo = _halves(s)
            from_s_k = _read(k_i, s, s_hi, s_lo, from_s_k, INTERPRETED)
            from_s_q = _read(q_i, s, s_hi, s_lo, from_s_q, INTERPRETED)

        decay = _decay(_on_path(p_ancestors, o_i, i_n, n, BN, WORDS), sums, sums, UNITS)
        system = tl.where(o_i[:, None] > o_i[None, :], -(decay * beta * k_k), 0.0)
        scores = decay * q_k
        from_root = tl.exp(sums.to(tl.float32) * (1.0 / UNITS))[:, None]
        wanted, o = v - from_root * from_s_k, from_root * from_s_q
        if BLOCKS > 1:
            for j_n in range(0, i_n):
                o_j = j_n * BN + tl.arange(0, BN)
                k_j_k, q_j_k = tl.zeros([BN, BN], tl.float32), tl.zeros([BN, BN], tl.float32)
                for part in range(0, BK // BKP):
                    o_k = part * BKP + tl.arange(0, BKP)
                    k_j = _load_rows(p_k, o_j, n, o_k, H, K)
                    k_j_k = _overlaps(_load_rows(p_k, o_i, n, o_k, H, K), k_j, k_j_k, INTERPRETED)
                    q_j_k = _overlaps(_load_rows(p_q, o_i, n, o_k, H, K), k_j, q_j_k, INTERPRETED)
                pool_j = tl.load(p_pool_row + o_j)
                u_j = tl.load(p_pool_u + pool_j[:, None] * (HV * V) + o_v[None, :], mask=m_v[None, :], other=0.0)
                sums_j = _path_sums(p_ancestors, p_g, j_n, n, BN, WORDS, HV, LOWEST, UNITS)
                decay_j = _decay(_on_path(p_ancestors, o_i, j_n, n, BN, WORDS), sums, sums_j, UNITS)
                wanted = _dot(-(decay_j * k_j_k), u_j, wanted, INTERPRETED)
                o = _dot(decay_j * q_j_k, u_j, o, INTERPRETED)

        target = beta * wanted
        u = target
        for _ in range(tl.min(tl.where(o_i < n, depth, 1 << 20), 0), tl.max(depth, 0)):
            u = _dot(system, u, target, INTERPRETED)
        tl.store(p_pool_u + pool_row[:, None] * (HV * V) + o_v[None, :], u, mask=m_iv)
        o = _dot(scores, u, o, INTERPRETED)
        tl.store(p_o + o_i[:, None] * (HV * V) + o_v[None, :], o.to(p_o.dtype.element_ty), mask=m_iv)
        if BLOCKS > 1:
            tl.debug_barrier()  # later blocks read this block's u and S, whichever thread stored them


def verify_factorised(
    rows: LayerRows,
    state: Tensor,
    pool: FactorPool,
    batch: PassBatch,
    o: Tensor,
    tile: AnyTile | None = None,
    *,
    overlap: bool = False,
    admit: Admit = "waited",
) -> None:
    """Outputs and factors of all rows, each continuing the state of its parent; fast.

    Arguments, results and errors as for `serial.verify_serial`; `tile` is the selector's, or a default. Outputs and
    factors depend, in the last bits, on the tree, the path and the tile.

    Raises:
        ValueError: the tile does not fit the layer or the bucket.
    """
    check_layer(rows, state, pool, batch, o)
    bucket, (key_width, value_width) = batch.bucket, state.shape[2:]
    if tile is None:
        usual = HeldTile(4)
        fits = not why_unfit(usual, bucket, key_width, value_width, rows.k.dtype)
        tile = usual if fits else factorised_tile(bucket.tree_rows)
    reason = why_unfit(tile, bucket, key_width, value_width, rows.k.dtype)
    if reason:
        raise ValueError(f"{tile} for {bucket}, {key_width} x {value_width}, {rows.k.dtype}: {reason}")
    overlaps = overlapping(overlap, admit)
    tensors = (
        *(*rows, state, pool.k, pool.u, pool.g, o, batch.slot, batch.row_start, batch.pending_len, batch.write_state),
        *(batch.pending, batch.pool_row, batch.depth, batch.ancestors),
    )
    sizes = layer_sizes(state, pool, batch)
    if isinstance(tile, HeldTile):
        launch = held.launch_held if bucket.tree_rows <= held.ROWS else held_blocks.launch_blocks
        launch(tensors, sizes, bucket, tile, overlaps)
    elif isinstance(tile, StreamedTile):
        streamed.launch_streamed(tensors, sizes, bucket, tile, overlaps)
    else:
        _launch_factorised(tensors, sizes, bucket, tile, overlaps)


def _launch_factorised(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], bucket: Bucket, tile: FactorisedTile, overlap: int
) -> None:
    block_k = triton.next_power_of_2(sizes["K"])
    verify_factorised_kernel[(triton.cdiv(sizes["V"], tile.block_v), sizes["HV"], bucket.sessions)](
        *tensors,
        **sizes,
        WORDS=bucket.words,
        BLOCKS=triton.cdiv(bucket.tree_rows, tile.block_n),
        BK=block_k,
        BKP=min(tile.part_k, block_k),
        BV=tile.block_v,
        BN=tile.block_n,
        BP=_AT_ONCE,
        LOWEST=_LOWEST,
        UNITS=_UNITS,
        OVERLAP=overlap,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=tile.warps,
        num_stages=1,
        launch_pdl=overlap > 0,
    )
