"""Tree-masked factorised verification of larger trees: blocks of 16 rows shared out over warps. Fast mode.

As held.py: the state stays in registers as halves of S^T, its keys shared out over four warps. What differs is how rows
are prepared. Four blocks at a time have their products with S and with themselves taken by all warps (each its share of
K), then each warp adds up one block's and makes its system, scores and right-hand side; and where a block meets the
blocks above it, each warp takes one of four pairs. So what is not a product is done once for four blocks instead of by
every warp for each of them. Only substitution follows block by block, in every warp alike.

Warp w keeps u of block 4 c + w of every chunk c of four blocks: the left operand of its pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.commit import AT_ONCE
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.held import by_product as keys_by_product
from specla.kernels.gpu.held import columns_first, committed, dot, pieces, rows_first, state_by_product, sum_two, whole
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.layouts import UNITS, as_left, as_right, halves, path_units, powers
from specla.kernels.gpu.pass_batch import PassBatch

WARPS = 4


class BlockedTile(NamedTuple):
    """How the work is cut."""

    registers: int = 0
    """A thread's, at most; 0 leaves it to the compiler."""


@constexpr_function
def own_block() -> Any:
    """[4 blocks, 4 shares of K, 4, 32, 4]: a warp has all shares of one block."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]
    lanes = [[0, 0, 0, x, 0] for x in powers(1, 32)]
    return gl.DistributedLinearLayout(regs, lanes, [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]], [], [4, 4, 4, 32, 4])


@constexpr_function
def operands() -> Any:
    """[4, 32, 8] of 16-bit numbers: a lane has its eight of each, in every warp."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]]
    return gl.DistributedLinearLayout(regs, [[0, x, 0] for x in powers(1, 32)], [[0, 0, 0], [0, 0, 0]], [], [4, 32, 8])


@gluon.jit
def _stage(at_stage, b, a, c):
    """Leaves a warp's share of two products of block b."""
    x = gl.permute(gl.join(pieces(a, 4), pieces(c, 4)), (0, 4, 1, 2, 3))
    at_stage.index(b).store(gl.reshape(x, [4, 4, 32, 4]))


@gluon.jit
def _own_sums(at_stage):
    """The two products of a warp's own block, all shares added: [4 blocks, 16, 16] each."""
    P: gl.constexpr = layouts.products(4)
    all_shares = at_stage._reinterpret(gl.float32, [4, 4, 4, 32, 4], layouts.plain([4, 4, 4, 32, 4]))
    x = gl.sum(all_shares.load(own_block()), 1)
    a, b = gl.split(gl.permute(gl.reshape(x, [4, 2, 2, 32, 4]), (0, 2, 3, 4, 1)))
    a = gl.reshape(gl.permute(gl.reshape(a, [4, 2, 8, 4, 2, 2]), (0, 1, 2, 4, 3, 5)), [4, 16, 16])
    b = gl.reshape(gl.permute(gl.reshape(b, [4, 2, 8, 4, 2, 2]), (0, 1, 2, 4, 3, 5)), [4, 16, 16])
    return gl.convert_layout(a, P, assert_trivial=True), gl.convert_layout(b, P, assert_trivial=True)


@gluon.jit
def _by_lane(x):
    """A product's result [4, 16, 16] in 16 bits as [4, 32, 8]."""
    return gl.reshape(gl.permute(gl.reshape(x, [4, 2, 8, 2, 4, 2]), (0, 2, 4, 1, 3, 5)), [4, 32, 8])


@gluon.jit
def _right_of_all(x):
    """[32, 8] that every warp has, as the right operand that `as_right` would have made of it."""
    P: gl.constexpr = layouts.products(4)
    x = gl.reshape(gl.permute(gl.reshape(x, [8, 4, 2, 2, 2]), (2, 0, 3, 1, 4)), [16, 16])
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, P), assert_trivial=True), 0)
    return as_right(gl.broadcast(x, gl.zeros([4, 16, 16], gl.bfloat16, P))[0], P)


@gluon.jit
def _path_bits(word, first, i_col):
    """int32 [4, 16, 16]: bit first + column of each row's word."""
    return (gl.expand_dims(word, 2) >> gl.expand_dims(first + i_col, 1)) & 1


@gluon.jit
def _decay(above, sums_i, sums_j):
    """e^D [4, 16, 16]; 0 off the path."""
    between = (gl.expand_dims(sums_i, 2) - gl.expand_dims(sums_j, 1)).to(gl.float32) * (1.0 / UNITS)
    return gl.exp(gl.where(above != 0, between, -float("inf")))


@gluon.jit
def verify_blocked_kernel(
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
    CHUNKS: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    AT_ONCE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (V / 16, HV, sessions)."""
    KP: gl.constexpr = K // 4
    P: gl.constexpr = layouts.products(4)
    ROW: gl.constexpr = gl.SliceLayout(2, P)  # [4, 16] of a block a warp
    COL: gl.constexpr = gl.SliceLayout(1, P)
    S: gl.constexpr = layouts.state(4, KP, 16)
    S_K: gl.constexpr = gl.SliceLayout(2, S)
    S_V: gl.constexpr = gl.SliceLayout(1, S)
    KEYS: gl.constexpr = layouts.keys(4, KP)
    VALUES: gl.constexpr = layouts.values(4)
    i_v, i_h, i_b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    slot = gl.load(p_slot + i_b).to(gl.int64)
    start = gl.load(p_row_start + i_b)
    n = gl.load(p_row_start + i_b + 1) - start
    n_pending = gl.load(p_pending_len + i_b)
    write_state = gl.load(p_write_state + i_b)
    if slot < 0:
        if OVERLAP:  # as in held.py
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

    w_s = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, S_K)), 1)
    o_k = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, S_K)), 0) + w_s * KP
    o_v = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, S_V)), 0)
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    s = committed(s, p_pending, n_pending, p_pool_k, p_pool_u, p_pool_g, o_k, o_v, H, HV, K, V, AT_ONCE)
    if (n_pending > 0) & (write_state != 0):
        gl.store(p_state + o_s, s)
    s_hi, s_lo = halves(s)
    s_hi, s_lo = as_left(state_by_product(s_hi, 4, KP), P), as_left(state_by_product(s_lo, 4, KP), P)

    w_row = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, ROW)), 1)
    w_col = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, COL)), 1)
    i_row = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, ROW)), 0)
    i_col = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, COL)), 0)
    below = gl.expand_dims(i_row, 2) > gl.expand_dims(i_col, 1)
    w_p = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, P))), 1), 2)
    w_k = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, KEYS))), 1)
    key = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, gl.SliceLayout(1, KEYS))), 0) + w_k * KP
    i_key = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, KEYS))), 0), 2)
    o_key = i_key * (H * K) + gl.expand_dims(key, 1)
    w_v = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, VALUES))), 1), 2)
    i_val = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, VALUES))), 0)
    i_val = gl.expand_dims(i_val, 2) + w_v * 0  # [4, 16, 1]
    v_col = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, VALUES))), 0), 1)
    mine = w_v == i_val // 4  # all warps have u and o of a block; each stores some rows

    at_stage = layouts.shared_blocks(gl.float32, 4, [4, 4, 32, 4])
    at_parts = layouts.shared(gl.float32, [4, 4, 32, 4])
    at_sums = layouts.shared(gl.float32, [4, 32, 4])
    at_right = layouts.shared_blocks(gl.bfloat16, 4, [4, 32, 8])  # system and scores, high and low halves
    at_sides = layouts.shared_blocks(gl.float32, 4, [4, 32, 4])  # right-hand sides, and o from S
    at_paths = layouts.shared_blocks(gl.int32, CHUNKS, [4, 16])
    all_right = at_right._reinterpret(gl.bfloat16, [4, 4, 32, 8], layouts.plain([4, 4, 32, 8]))
    all_sides = at_sides._reinterpret(gl.float32, [4, 4, 32, 4], layouts.plain([4, 4, 32, 4]))
    each_paths = at_paths._reinterpret(gl.int32, [4 * CHUNKS, 16], layouts.plain([16]))
    zero = gl.zeros([4, 16, 16], gl.float32, P)
    u_0, u_1, u_2 = zero, zero, zero
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()

    for c in range(0, (n + 63) // 64):
        blocks = gl.minimum(4, (n - c * 64 + 15) // 16)
        # Four blocks' products with themselves, then with S; each warp adds up one block's.
        for b in range(0, blocks):
            first = c * 64 + b * 16
            k_b = keys_by_product(gl.load(p_k + first * (H * K) + o_key, mask=i_key < n - first, other=0.0), 4, KP)
            q_b = keys_by_product(gl.load(p_q + first * (H * K) + o_key, mask=i_key < n - first, other=0.0), 4, KP)
            k_right = as_right(k_b, P)
            _stage(at_stage, b, mma_v2(as_left(k_b, P), k_right, zero), mma_v2(as_left(q_b, P), k_right, zero))
        k_k, q_k = _own_sums(at_stage)
        for b in range(0, blocks):
            first = c * 64 + b * 16
            k_b = keys_by_product(gl.load(p_k + first * (H * K) + o_key, mask=i_key < n - first, other=0.0), 4, KP)
            q_b = keys_by_product(gl.load(p_q + first * (H * K) + o_key, mask=i_key < n - first, other=0.0), 4, KP)
            k_right, q_right = as_right(k_b, P), as_right(q_b, P)
            s_k = mma_v2(s_hi, k_right, mma_v2(s_lo, k_right, zero))
            s_q = mma_v2(s_hi, q_right, mma_v2(s_lo, q_right, zero))
            _stage(at_stage, b, s_k, s_q)
        s_k, s_q = _own_sums(at_stage)

        # Each warp: its block's path sums, system, scores and right-hand side.
        r_row = c * 64 + w_row * 16 + i_row
        beta = gl.load(p_beta + r_row * HV, mask=r_row < n, other=0.0)
        r_val = c * 64 + w_v * 16 + i_val
        v = gl.load(p_v + r_val * (HV * V) + v_col, mask=r_val < n, other=0.0).to(gl.float32)
        on_path = gl.zeros([4, 16, 16], gl.int32, P)
        for j_c in range(0, c + 1):
            for m in gl.static_range(4):
                r_j = j_c * 64 + m * 16 + i_col
                g_j = gl.load(p_g + r_j * HV, mask=r_j < n, other=0.0)
                word = gl.load(
                    p_ancestors + r_row * WORDS + j_c * 2 + m // 2, mask=(r_row < n) & (j_c * 64 + m * 16 < n), other=0
                )
                on_path += _path_bits(word, m % 2 * 16, i_col) * gl.expand_dims(path_units(g_j), 1)
        paths = gl.sum(on_path, 2)
        at_paths.index(c).store(paths)
        paths_col = at_paths.index(c).load(COL)
        word = gl.load(p_ancestors + r_row * WORDS + c * 2 + w_row // 2, mask=r_row < n, other=0)
        above = _path_bits(word >> (w_row % 2 * 16), 0, i_col)
        decay = _decay(above, paths, paths_col)
        from_root = gl.expand_dims(gl.exp(paths_col.to(gl.float32) * (1.0 / UNITS)), 1)
        system_hi, system_lo = halves(gl.where(below, -(decay * gl.expand_dims(beta, 2)), 0.0) * k_k)
        scores_hi, scores_lo = halves(decay * q_k)
        right = gl.join(
            gl.join(_by_lane(system_hi), _by_lane(system_lo)), gl.join(_by_lane(scores_hi), _by_lane(scores_lo))
        )  # [4, 32, 8, high or low, system or scores]
        all_right.store(gl.reshape(gl.permute(right, (0, 4, 3, 1, 2)), [4, 4, 32, 8]))
        side = gl.join(pieces(columns_first(v, 4) - from_root * s_k, 4), pieces(from_root * s_q, 4))
        all_sides.store(gl.reshape(gl.permute(side, (0, 4, 1, 2, 3)), [4, 4, 32, 4]))

        # Block by block: what the blocks above add, then substitution.
        for b in range(0, blocks):
            first = c * 64 + b * 16
            side_2 = gl.reshape(at_sides.index(b).load(layouts.known_to_all(4, 4)), [2, 2, 32, 4])
            wanted, o = gl.split(gl.permute(side_2, (1, 2, 3, 0)))
            wanted, o = whole(wanted, 4), whole(o, 4)
            if c * 4 + b > 0:
                r_i = first + i_row + w_row * 0
                k_i = gl.load(p_k + first * (H * K) + o_key, mask=i_key < n - first, other=0.0)
                q_i = gl.load(p_q + first * (H * K) + o_key, mask=i_key < n - first, other=0.0)
                k_left, q_left = as_left(keys_by_product(k_i, 4, KP), P), as_left(keys_by_product(q_i, 4, KP), P)
                paths_i = each_paths.index(c * 4 + b).load(gl.SliceLayout(0, ROW))
                paths_i = gl.expand_dims(paths_i, 0) + w_row * 0
                more_w, more_o = zero, zero
                for j_c in range(0, c + 1):
                    for j_b in range(0, gl.minimum(4, c * 4 + b - j_c * 4)):
                        j_key = (j_c * 64 + j_b * 16) * (H * K) + o_key
                        j_right = as_right(keys_by_product(gl.load(p_k + j_key), 4, KP), P)
                        _stage(at_stage, j_b, mma_v2(k_left, j_right, zero), mma_v2(q_left, j_right, zero))
                    k_j_k, q_j_k = _own_sums(at_stage)
                    word_j = gl.load(p_ancestors + r_i * WORDS + j_c * 2 + w_row // 2, mask=r_i < n, other=0)
                    above_j = _path_bits(word_j >> (w_row % 2 * 16), 0, i_col)
                    above_j = gl.where(j_c * 4 + w_p < c * 4 + b, above_j, 0)
                    decay_j = _decay(above_j, paths_i, at_paths.index(j_c).load(COL))
                    u_j = u_0
                    if CHUNKS > 1:
                        u_j = gl.where(j_c == 1, u_1, u_j)
                    if CHUNKS > 2:
                        u_j = gl.where(j_c == 2, u_2, u_j)
                    hi, lo = halves(gl.where(above_j != 0, -decay_j * k_j_k, 0.0))
                    more_w = dot(u_j, as_right(hi, P), as_right(lo, P), more_w, 4)
                    hi, lo = halves(gl.where(above_j != 0, decay_j * q_j_k, 0.0))
                    more_o = dot(u_j, as_right(hi, P), as_right(lo, P), more_o, 4)
                more_w, more_o = sum_two(more_w, more_o, at_parts, at_sums, 4)
                wanted, o = wanted + more_w, o + more_o
            r_col_i = first + i_col + w_col * 0
            beta_col = gl.load(p_beta + r_col_i * HV, mask=r_col_i < n, other=0.0)
            depth = gl.load(p_depth + r_col_i, mask=r_col_i < n, other=0)
            deepest = gl.max(gl.max(depth, 1), 0)
            shallowest = gl.min(gl.min(gl.where(r_col_i < n, depth, 1 << 20), 1), 0)
            operand = gl.reshape(at_right.index(b).load(operands()), [2, 2, 32, 8])
            high, low = gl.split(gl.permute(operand, (0, 2, 3, 1)))  # [system or scores, 32, 8] each
            a_hi, c_hi = gl.split(gl.permute(high, (1, 2, 0)))
            a_lo, c_lo = gl.split(gl.permute(low, (1, 2, 0)))
            a_hi, a_lo = _right_of_all(a_hi), _right_of_all(a_lo)
            target = gl.expand_dims(beta_col, 1) * wanted
            u = target
            for _ in range(deepest - shallowest):
                u = dot(u, a_hi, a_lo, target, 4)
            o = dot(u, _right_of_all(c_hi), _right_of_all(c_lo), o, 4)
            u_0 = gl.where((w_p == b) & (c == 0), u, u_0)
            if CHUNKS > 1:
                u_1 = gl.where((w_p == b) & (c == 1), u, u_1)
            if CHUNKS > 2:
                u_2 = gl.where((w_p == b) & (c == 2), u, u_2)
            r_val_i = first + i_val
            m_out = (r_val_i < n) & mine
            pool_row = gl.load(p_pool_row + r_val_i, mask=r_val_i < n, other=0)
            gl.store(p_pool_u + pool_row * (HV * V) + v_col, rows_first(u, 4), mask=m_out)
            o_out = rows_first(o, 4).to(p_o.dtype.element_ty)
            gl.store(p_o + r_val_i * (HV * V) + v_col, o_out, mask=m_out)


def launch_blocked(
    rows: LayerRows, state: Tensor, pool: FactorPool, batch: PassBatch, o: Tensor, tile: BlockedTile, overlap: bool
) -> None:
    """`factorised.verify_factorised` by this kernel; the arguments are checked there."""
    _, value_heads, key_width, value_width = state.shape
    verify_blocked_kernel[(value_width // 16, value_heads, batch.bucket.sessions)](
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
        PENDING=batch.bucket.pending,
        WORDS=batch.bucket.words,
        CHUNKS=-(-batch.bucket.tree_rows // 64),
        H=rows.k.shape[1],
        HV=value_heads,
        K=key_width,
        V=value_width,
        AT_ONCE=AT_ONCE,
        OVERLAP=overlap,
        num_warps=WARPS,
        maxnreg=tile.registers or None,
        launch_pdl=overlap,
    )
