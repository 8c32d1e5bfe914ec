"""Tree-masked factorised verification with the state held in registers: the quickest form for few sessions. Fast mode.

The equations are those of factorised.py. A program owns 16 columns of one head's state, its warps a share of K each.
The tile is read once, gets the pending factors with the serial kernels' arithmetic (so a state committed here has the
bits of `flush`), is stored, and stays in registers as bfloat16 halves of S^T: the left operand of S^T k and S^T q for
all blocks of 16 rows, which follow in topological order. Sums over warps pass through shared memory once a block for
the rows' own products, and once for each block above. Substitution runs in every warp alike: u^T is a product's result
and the next one's operand, so a round is three products and no exchange.

With `overlap` all that needs no rows of this layer (state, pending factors, trees) is done while the kernel before
still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu import layouts
from specla.kernels.gpu.commit import AT_ONCE
from specla.kernels.gpu.layouts import UNITS, as_left, as_right, dot, halves, path_units
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.tile_commit import committed


class HeldTile(NamedTuple):
    """How the work is cut."""

    warps: int
    """That share out K: 1, 2 or 4."""


@gluon.jit
def _by_product(x, W: gl.constexpr, KP: gl.constexpr):
    """q or k [W, 16, KP] with its keys in the order in which products take S^T."""
    x = gl.permute(gl.reshape(x, [W, 16, 4, KP // 8, 2]), (0, 1, 3, 2, 4))
    return gl.reshape(x, [W, 16, KP])


@gluon.jit
def _state_by_product(s, W: gl.constexpr, KP: gl.constexpr):
    """S [W, KP, 16] as S^T [W, 16, KP]."""
    s = gl.permute(gl.reshape(s, [W, 4, KP // 8, 2, 8, 2]), (0, 5, 4, 2, 1, 3))
    return gl.reshape(s, [W, 16, KP])


@gluon.jit
def _columns_first(x, W: gl.constexpr):
    """v [W, rows, columns] as [W, columns, rows], a product's result."""
    x = gl.permute(gl.reshape(x, [W, 16, 8, 2]), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(x, [W, 16, 16]), layouts.products(W), assert_trivial=True)


@gluon.jit
def _rows_first(x, W: gl.constexpr):
    """A product's result [W, columns, rows] as [W, rows, columns]."""
    x = gl.permute(gl.reshape(x, [W, 2, 8, 16]), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(x, [W, 16, 16]), layouts.values(W), assert_trivial=True)


@gluon.jit
def _right_halves(x, W: gl.constexpr):
    """x^T as right operands, in bfloat16 halves."""
    hi, lo = halves(x)
    return as_right(hi, layouts.products(W)), as_right(lo, layouts.products(W))


@gluon.jit
def _pieces(x, W: gl.constexpr):
    """A product's result [W, 16, 16] as [W, 2, 32, 4]: 16 bytes a lane, twice."""
    x = gl.permute(gl.reshape(x, [W, 2, 8, 2, 4, 2]), (0, 1, 2, 4, 3, 5))
    return gl.reshape(x, [W, 2, 32, 4])


@gluon.jit
def _whole(x, W: gl.constexpr):
    """[2, 32, 4], known to all warps, as a product's result [W, 16, 16]."""
    P: gl.constexpr = layouts.products(W)
    x = gl.permute(gl.reshape(x, [2, 8, 4, 2, 2]), (0, 1, 3, 2, 4))
    x = gl.convert_layout(gl.reshape(x, [16, 16]), gl.SliceLayout(0, P), assert_trivial=True)
    return gl.expand_dims(x, 0) + gl.zeros([W, 16, 16], gl.float32, P)


@gluon.jit
def _over_warps(x, at_parts, at_sums, W: gl.constexpr, N: gl.constexpr):
    """x [W, N, 32, 4] summed over warps, known to all: [N, 32, 4]. Each warp adds up its share of N."""
    at_parts.store(x)
    at_sums.store(gl.sum(at_parts.load(layouts.shares(W, N)), 0))
    return at_sums.load(layouts.known_to_all(W, N))


@gluon.jit
def _sum_two(a, b, at_parts, at_sums, W: gl.constexpr):
    """Two products' results summed over warps."""
    x = gl.permute(gl.join(_pieces(a, W), _pieces(b, W)), (0, 4, 1, 2, 3))
    x = _over_warps(gl.reshape(x, [W, 4, 32, 4]), at_parts, at_sums, W, 4)
    a, b = gl.split(gl.permute(gl.reshape(x, [2, 2, 32, 4]), (1, 2, 3, 0)))
    return _whole(a, W), _whole(b, W)


@gluon.jit
def _sum_four(a, b, c, d, at_parts, at_sums, W: gl.constexpr):
    """Four products' results summed over warps."""
    x = gl.join(gl.join(_pieces(a, W), _pieces(b, W)), gl.join(_pieces(c, W), _pieces(d, W)))
    x = gl.reshape(gl.permute(x, (0, 4, 5, 1, 2, 3)), [W, 8, 32, 4])
    x = _over_warps(x, at_parts, at_sums, W, 8)
    ab, cd = gl.split(gl.permute(gl.reshape(x, [2, 2, 2, 32, 4]), (2, 3, 4, 0, 1)))
    a, b = gl.split(ab)
    c, d = gl.split(cd)
    return _whole(a, W), _whole(b, W), _whole(c, W), _whole(d, W)


@gluon.jit
def _bits(word, first, i_col):
    """int32 [16, 16]: bit first + column of each row's word."""
    return (gl.expand_dims(word, 1) >> gl.expand_dims(first + i_col, 0)) & 1


@gluon.jit
def _decay(above, sums_i, sums_j, W: gl.constexpr):
    """e^D [W, 16, 16]; 0 off the path."""
    between = (gl.expand_dims(sums_i, 1) - gl.expand_dims(sums_j, 0)).to(gl.float32) * (1.0 / UNITS)
    decay = gl.exp(gl.where(above != 0, between, -float("inf")))
    return gl.expand_dims(decay, 0) + gl.zeros([W, 16, 16], gl.float32, layouts.products(W))


@gluon.jit
def verify_held_kernel(
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
    POOL: gl.constexpr,
    PENDING: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCKS: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    AT_ONCE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (V / 16, HV, sessions)."""
    KP: gl.constexpr = K // W
    P: gl.constexpr = layouts.products(W)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, P))
    COL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, P))
    S: gl.constexpr = layouts.state(W, KP, 16)
    S_K: gl.constexpr = gl.SliceLayout(2, S)
    S_V: gl.constexpr = gl.SliceLayout(1, S)
    KEYS: gl.constexpr = layouts.keys(W, KP)
    VALUES: gl.constexpr = layouts.values(W)
    i_v, i_h, i_b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    slot = gl.load(p_slot + i_b).to(gl.int64)
    start = gl.load(p_row_start + i_b)
    n = gl.load(p_row_start + i_b + 1) - start
    n_pending = gl.load(p_pending_len + i_b)
    write_state = gl.load(p_write_state + i_b)
    if slot < 0:
        if OVERLAP:  # whoever ends has waited: else what follows might not wait for what came before
            gdc_wait()
        return
    i_hk = i_h // (HV // H)
    pool = slot * POOL
    p_pending += i_b * PENDING
    p_state += (slot * HV + i_h) * K * V + i_v * 16
    p_pool_k += (pool * H + i_hk) * K
    p_pool_u += (pool * HV + i_h) * V + i_v * 16
    p_pool_g += pool * HV + i_h
    p_q += (start * H + i_hk) * K
    p_k += (start * H + i_hk) * K
    p_v += (start * HV + i_h) * V + i_v * 16
    p_o += (start * HV + i_h) * V + i_v * 16
    p_g += start * HV + i_h
    p_beta += start * HV + i_h
    p_ancestors += start * WORDS
    p_depth += start
    p_pool_row += start

    w_s = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, S_K)), 1)
    o_k = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, S_K)), 0) + w_s * KP
    o_v = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, S_V)), 0)
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    s = committed(s, p_pending, n_pending, p_pool_k, p_pool_u, p_pool_g, o_k, o_v, H, HV, K, V, AT_ONCE)
    if (n_pending > 0) & (write_state != 0):
        gl.store(p_state + o_s, s)
    s_hi, s_lo = halves(s)
    s_hi, s_lo = as_left(_state_by_product(s_hi, W, KP), P), as_left(_state_by_product(s_lo, W, KP), P)

    i_row, i_col = gl.arange(0, 16, layout=ROW), gl.arange(0, 16, layout=COL)
    below = gl.expand_dims(i_row, 1) > gl.expand_dims(i_col, 0)
    w_k = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(1, KEYS))), 1)
    key = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, gl.SliceLayout(1, KEYS))), 0) + w_k * KP
    i_key = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, KEYS))), 0), 2)
    o_key = i_key * (H * K) + gl.expand_dims(key, 1)
    w_v = gl.expand_dims(gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, VALUES))), 1), 2)
    i_v_row = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, VALUES))), 0), 2
    )
    i_v_row += w_v * 0  # [W, 16, 1]
    v_col = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, VALUES))), 0), 1)
    o_val = i_v_row * (HV * V) + v_col
    mine = w_v == i_v_row // (16 // W)  # all warps have u and o; each stores some rows
    if W > 1:
        at_parts = layouts.shared(gl.float32, [W, 8, 32, 4])
        at_sums = layouts.shared(gl.float32, [8, 32, 4])
    if BLOCKS > 1:
        if W > 1:
            at_parts_2 = layouts.shared(gl.float32, [W, 4, 32, 4])
            at_sums_2 = layouts.shared(gl.float32, [4, 32, 4])
        at_paths = layouts.shared_blocks(gl.int32, BLOCKS, [16])
        at_u = layouts.shared_blocks(gl.float32, BLOCKS, [W, 16, 16])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()

    for i_n in range(0, 1 if BLOCKS == 1 else (n + 15) // 16):
        first = i_n * 16
        left = n - first
        k_i = gl.load(p_k + first * (H * K) + o_key, mask=i_key < left, other=0.0)
        q_i = gl.load(p_q + first * (H * K) + o_key, mask=i_key < left, other=0.0)
        g_i = gl.load(p_g + (first + i_col) * HV, mask=i_col < left, other=0.0)
        beta_row = gl.load(p_beta + (first + i_row) * HV, mask=i_row < left, other=0.0)
        beta_col = gl.load(p_beta + (first + i_col) * HV, mask=i_col < left, other=0.0)
        v_i = gl.load(p_v + first * (HV * V) + o_val, mask=i_v_row < left, other=0.0).to(gl.float32)
        pool_row = gl.load(p_pool_row + first + i_v_row, mask=i_v_row < left, other=0)
        depth = gl.load(p_depth + first + i_row, mask=i_row < left, other=0)
        word = gl.load(p_ancestors + (first + i_row) * WORDS + first // 32, mask=i_row < left, other=0)
        above = _bits(word, first % 32, i_col)
        on_path = above * gl.expand_dims(path_units(g_i), 0)
        if BLOCKS > 1:
            for j_n in range(0, i_n):
                g_j = gl.load(p_g + (j_n * 16 + i_col) * HV)
                word_j = gl.load(p_ancestors + (first + i_row) * WORDS + j_n // 2, mask=i_row < left, other=0)
                on_path += _bits(word_j, j_n % 2 * 16, i_col) * gl.expand_dims(path_units(g_j), 0)
        paths = gl.sum(on_path, 1)
        if BLOCKS > 1:
            at_paths.index(i_n).store(paths)
            paths_col = at_paths.index(i_n).load(COL)
        else:
            paths_col = gl.convert_layout(paths, COL)
        decay = _decay(above, paths, paths_col, W)
        from_root = gl.expand_dims(gl.expand_dims(gl.exp(paths_col.to(gl.float32) * (1.0 / UNITS)), 0), 0)
        rounds = gl.max(depth, 0) - gl.min(gl.where(i_row < left, depth, 1 << 20), 0)

        zero = gl.zeros([W, 16, 16], gl.float32, P)
        k_i, q_i = _by_product(k_i, W, KP), _by_product(q_i, W, KP)
        k_left, k_right, q_left, q_right = as_left(k_i, P), as_right(k_i, P), as_left(q_i, P), as_right(q_i, P)
        k_k = mma_v2(k_left, k_right, zero)
        q_k = mma_v2(q_left, k_right, zero)
        s_k = mma_v2(s_hi, k_right, mma_v2(s_lo, k_right, zero))
        s_q = mma_v2(s_hi, q_right, mma_v2(s_lo, q_right, zero))
        if W > 1:
            k_k, q_k, s_k, s_q = _sum_four(k_k, q_k, s_k, s_q, at_parts, at_sums, W)
        beta_below = gl.expand_dims(gl.where(below, gl.expand_dims(beta_row, 1), 0.0), 0)
        system_hi, system_lo = _right_halves(-(decay * beta_below) * k_k, W)
        scores_hi, scores_lo = _right_halves(decay * q_k, W)
        wanted = _columns_first(v_i, W) - from_root * s_k
        o = from_root * s_q
        if BLOCKS > 1:
            for j_n in range(0, i_n):
                k_j = gl.load(p_k + j_n * (16 * H * K) + o_key)
                word_j = gl.load(p_ancestors + (first + i_row) * WORDS + j_n // 2, mask=i_row < left, other=0)
                j_right = as_right(_by_product(k_j, W, KP), P)
                k_j_k, q_j_k = mma_v2(k_left, j_right, zero), mma_v2(q_left, j_right, zero)
                if W > 1:
                    k_j_k, q_j_k = _sum_two(k_j_k, q_j_k, at_parts_2, at_sums_2, W)
                decay_j = _decay(_bits(word_j, j_n % 2 * 16, i_col), paths, at_paths.index(j_n).load(COL), W)
                u_j = at_u.index(j_n).load(P)
                hi, lo = _right_halves(-decay_j * k_j_k, W)
                wanted = dot(u_j, hi, lo, wanted, P)
                hi, lo = _right_halves(decay_j * q_j_k, W)
                o = dot(u_j, hi, lo, o, P)
        target = gl.expand_dims(gl.expand_dims(beta_col, 0), 0) * wanted
        u = target
        for _ in range(rounds):
            u = dot(u, system_hi, system_lo, target, P)
        o = dot(u, scores_hi, scores_lo, o, P)
        if BLOCKS > 1:
            at_u.index(i_n).store(u)
        m_out = (i_v_row < left) & mine
        gl.store(p_pool_u + pool_row * (HV * V) + v_col, _rows_first(u, W), mask=m_out)
        gl.store(p_o + first * (HV * V) + o_val, _rows_first(o, W).to(p_o.dtype.element_ty), mask=m_out)


def launch_held(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], bucket: Bucket, tile: HeldTile, overlap: bool
) -> None:
    """`factorised.verify_factorised` by this kernel; the arguments are checked and laid out there."""
    verify_held_kernel[(sizes["V"] // 16, sizes["HV"], bucket.sessions)](
        *tensors,
        **sizes,
        WORDS=bucket.words,
        BLOCKS=triton.cdiv(bucket.tree_rows, 16),
        W=tile.warps,
        AT_ONCE=AT_ONCE,
        OVERLAP=overlap,
        num_warps=tile.warps,
        launch_pdl=overlap,
    )
