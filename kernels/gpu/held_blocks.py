"""Tree-masked factorised verification of trees of more than 16 rows with the state on the multiprocessor. Fast mode.

The equations are those of factorised.py. A program owns 16 columns of one head's state; its tile is read once, gets the
pending factors with the serial kernels' arithmetic (so a state committed here has the bits of `flush`), is stored, and
stays in shared memory as bfloat16 halves of S^T. Rows go in chunks of one block of 16 rows a warp, k and u of every
block are left in shared memory for those below, and a warp takes whole products for its own rows: no product is summed
over warps, which for rows by the dozen costs more than the products.

In a chunk the triangular systems of all blocks are inverted at once: T <- I + T N has the final columns of depth d
after d rounds, each from columns above it and from nothing else, as the substitution of factorised.py. What then
follows block by block is u = T (beta rhs), left for all, and what each warp's rows have of it: two products and one
barrier.

A last chunk of one block (129 rows are 8 blocks and a row) is every warp's own: each takes its share of the blocks
above, and the results are summed over warps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu import block_layouts as blocks
from specla.kernels.gpu import layouts
from specla.kernels.gpu.block_layouts import (
    factors_of_block,
    factors_of_own_block,
    held_state,
    keys_of_block,
    leave_factors,
    leave_keys,
    leave_state,
    left_halves,
    over_warps,
    own_keys,
    right_halves_itself,
    to_warps,
)
from specla.kernels.gpu.commit import AT_ONCE
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.layouts import TO_LOG2, along, columns_first, exp2, path_units, right_halves, rows_first
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.tile_commit import committed

_NARROW = 128  # width of keys up to which three programs a multiprocessor are worth a limit on registers
_NARROW_REGISTERS = 168


@gluon.jit
def _dot(a_hi, a_lo, b_hi, b_lo, acc):
    """acc + a b of halves; the small terms apart, so that two chains of products are in flight."""
    small = mma_v2(a_lo, b_hi, mma_v2(a_hi, b_lo, gl.zeros_like(acc)))
    return mma_v2(a_hi, b_hi, acc) + small


@gluon.jit
def _decay(word, i_above, sums, sums_above):
    """e^D [W, rows above, rows], 0 off the path: bit i_above of a row's word says whether it is on it."""
    above = (gl.expand_dims(word, 1) >> gl.expand_dims(i_above, 2)) & 1
    between = (gl.expand_dims(sums, 1) - gl.expand_dims(sums_above, 2)).to(gl.float32) * TO_LOG2
    return exp2(gl.where(above != 0, between, -float("inf")))


@gluon.jit
def verify_blocks_kernel(
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
    KEPT: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    AT_ONCE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (V / 16, HV, sessions). KEPT chunks leave their k: a last chunk of one block takes the first one's place."""
    P: gl.constexpr = layouts.products(W)
    ABOVE: gl.constexpr = gl.SliceLayout(2, P)  # rows above, [W, 16]
    ROW: gl.constexpr = gl.SliceLayout(1, P)
    S: gl.constexpr = blocks.state(W, K)
    X: gl.constexpr = blocks.rows(W, K)
    LINES: gl.constexpr = blocks.lines(W, K)
    VALUES: gl.constexpr = layouts.values(W)
    PATHS: gl.constexpr = blocks.path_bits(W)
    ROWS: gl.constexpr = 16 * W
    i_v, i_h, i_b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
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

    o_k = along(K, gl.SliceLayout(2, S), 2, 1)
    o_v = along(16, gl.SliceLayout(1, S), 2, 1)
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    s = committed(s, p_pending, n_pending, p_pool_k, p_pool_u, p_pool_g, o_k, o_v, H, HV, K, V, AT_ONCE)
    if (n_pending > 0) & (write_state != 0):
        gl.store(p_state + o_s, s)
    at_hi = layouts.shared(gl.bfloat16, [K // 16, 32, 8])
    at_lo = layouts.shared(gl.bfloat16, [K // 16, 32, 8])
    leave_state(s, at_hi, at_lo, W, K)

    at_k = layouts.shared_blocks(gl.bfloat16, KEPT * W, [K // 32, 2, 32, 8])
    all_k = at_k._reinterpret(gl.bfloat16, [KEPT, W, K // 32, 2, 32, 8], layouts.plain([W, K // 32, 2, 32, 8]))
    # u of even blocks and of odd ones apart: what a block leaves never meets what the one before is read from.
    at_even = layouts.shared_blocks(gl.bfloat16, W, [2, 32, 8])
    at_odd = layouts.shared_blocks(gl.bfloat16, W, [2, 32, 8])
    all_even = at_even._reinterpret(gl.bfloat16, [W, 2, 32, 8], layouts.plain([W, 2, 32, 8]))
    all_odd = at_odd._reinterpret(gl.bfloat16, [W, 2, 32, 8], layouts.plain([W, 2, 32, 8]))
    sums_k = all_even._reinterpret(gl.float32, [W, 2, 32, 4], layouts.plain([W, 2, 32, 4]))
    sums_q = all_odd._reinterpret(gl.float32, [W, 2, 32, 4], layouts.plain([W, 2, 32, 4]))
    if CHUNKS > 1:
        at_u = layouts.shared_blocks(gl.bfloat16, (CHUNKS - 1) * W, [2, 32, 8])
        all_u = at_u._reinterpret(gl.bfloat16, [CHUNKS - 1, W, 2, 32, 8], layouts.plain([W, 2, 32, 8]))
    at_units = layouts.shared_blocks(gl.int32, CHUNKS, [W, 16])
    at_paths = layouts.shared_blocks(gl.int32, CHUNKS * W, [16])
    all_paths = at_paths._reinterpret(gl.int32, [CHUNKS, W, 16], layouts.plain([W, 16]))
    flat_paths = at_paths._reinterpret(gl.int32, [CHUNKS, ROWS], layouts.plain([ROWS]))
    flat_units = at_units._reinterpret(gl.int32, [CHUNKS, ROWS], layouts.plain([ROWS]))

    w_x, x_row, x_key = along(W, X, 3, 0), along(16, X, 3, 1), along(K, X, 3, 2)
    w_l, l_row, l_key = along(W, LINES, 3, 0), along(16, LINES, 3, 1), along(K // 64, LINES, 3, 2) * 64
    c_row, c_key = blocks.chunk_places(W, K)
    w_row, i_row = along(W, ROW, 2, 0), along(16, ROW, 2, 1)
    i_above = along(16, ABOVE, 2, 1) + along(W, ABOVE, 2, 0) * 0
    w_p = along(W, P, 3, 0)
    strict = gl.expand_dims(i_above, 2) < gl.expand_dims(i_row, 1)
    one = gl.where(gl.expand_dims(i_above, 2) == gl.expand_dims(i_row, 1), 1.0, 0.0)
    zero = gl.zeros([W, 16, 16], gl.float32, P)
    w_v, i_val, v_col = along(W, VALUES, 3, 0), along(16, VALUES, 3, 1), along(16, VALUES, 3, 2)
    path_row = along(ROWS, gl.SliceLayout(2, PATHS), 2, 0)  # [ROWS, 1]
    path_block = along(W, gl.SliceLayout(2, PATHS), 2, 1)
    flat_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PATHS)))
    bit = along(16, PATHS, 3, 2)
    if CHUNKS > 1 and OVERLAP:
        gdc_wait()
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()

    for c in range(0, 1 if CHUNKS == 1 else (n + ROWS - 1) // ROWS):
        first = c * ROWS
        left = n - first
        last = left - 1  # of the chunk's rows: places past it repeat it, and no row has them above
        alone = 0
        if CHUNKS > 1:  # a last chunk of one block, which all warps have
            alone = ((left <= 16) & (c > 0)).to(gl.int32)
        apart = 16 - 16 * alone  # rows from a warp's block to the next one's
        block = c * W + w_row * (1 - alone)
        row = first + gl.minimum(w_row * apart + i_row, last)
        word_row = row * WORDS
        word = gl.load(p_ancestors + word_row + gl.minimum(block // 2, WORDS - 1)) >> (block % 2 * 16)
        depth = gl.load(p_depth + row)
        rounds = gl.max(gl.max(depth, 1) - gl.min(depth, 1), 0)
        val_row = w_v * apart + i_val
        o_x = gl.minimum(w_x * apart + x_row, last) * (H * K) + x_key
        o_line = gl.minimum(w_l * apart + l_row, last) * (H * K) + l_key
        o_chunk = gl.minimum(c_row, last) * (H * K) + c_key
        o_val = (first + gl.minimum(val_row, last)) * (HV * V) + v_col
        p_bits = p_ancestors + (first + gl.minimum(path_row, last)) * WORDS
        if CHUNKS == 1:
            bits_0 = gl.load(p_bits + path_block // 2, mask=path_block * 16 < n, other=0) >> (path_block % 2 * 16)
            if OVERLAP:  # all above needs nothing of the kernel before
                gdc_wait()
                if OVERLAP == ADMITS_ONCE_WAITED:
                    gdc_launch_dependents()
        layouts.prefetch(p_q + first * (H * K) + o_line)  # the compiler may ask for them late
        g = gl.load(p_g + (first + gl.minimum(flat_row, last)) * HV)
        k, q = gl.load(p_k + first * (H * K) + o_x), gl.load(p_q + first * (H * K) + o_x)
        k_chunk = gl.load(p_k + first * (H * K) + o_chunk)
        beta = gl.load(p_beta + row * HV)
        v = gl.load(p_v + o_val).to(gl.float32)
        flat_units.index(c).store(path_units(g))
        if alone == 0:
            leave_keys(k_chunk, all_k.index(c), W, K)

        # Path sums: a thread adds up what one block has above a row.
        on_path = gl.zeros([ROWS, W, 16], gl.int32, PATHS)
        for j_c in range(0, c + 1):
            units = at_units.index(j_c).load(gl.SliceLayout(0, PATHS))
            if CHUNKS == 1:
                bits = bits_0
            else:
                block_j = j_c * W + path_block
                bits = gl.load(p_bits + block_j // 2, mask=block_j * 16 < n, other=0) >> (block_j % 2 * 16)
            on_path += ((gl.expand_dims(bits, 2) >> bit) & 1) * gl.expand_dims(units, 0)
        flat_paths.index(c).store(gl.sum(gl.sum(on_path, 2), 1))

        # What S gives.
        k, q = blocks.by_product(k, W, K), blocks.by_product(q, W, K)
        s_hi, s_lo = held_state(at_hi, W, K), held_state(at_lo, W, K)
        s_k = mma_v2(s_hi, k, mma_v2(s_lo, k, zero))
        s_q = mma_v2(s_hi, q, mma_v2(s_lo, q, zero))
        if alone > 0:
            sums_above = to_warps(at_paths.index(c * W).load(gl.SliceLayout(0, ABOVE)), W, ABOVE)
            sums = to_warps(at_paths.index(c * W).load(gl.SliceLayout(0, ROW)), W, ROW)
        else:
            sums_above, sums = all_paths.index(c).load(ABOVE), all_paths.index(c).load(ROW)
        from_root = gl.expand_dims(exp2(sums.to(gl.float32) * TO_LOG2), 1)
        acc_k, acc_q = from_root * s_k - columns_first(v, W), from_root * s_q  # -rhs and o, [W, columns, rows]

        if (CHUNKS > 1) and (alone > 0):  # a warp takes one block of each chunk above
            acc_k, acc_q = gl.where(w_p == 0, acc_k, 0.0), gl.where(w_p == 0, acc_q, 0.0)
            for j_c in range(0, c):
                block_j = j_c * W + w_row
                word_j = gl.load(p_ancestors + word_row + block_j // 2) >> (block_j % 2 * 16)
                decay = _decay(word_j, i_above, sums, all_paths.index(j_c).load(ABOVE))
                k_j = own_keys(all_k.index(j_c), W, K)
                from_k, from_q = decay * mma_v2(k_j, k, zero), decay * mma_v2(k_j, q, zero)
                u_hi, u_lo = factors_of_own_block(all_u.index(j_c), W)
                m_hi, m_lo = right_halves_itself(from_k, W)
                acc_k = _dot(u_hi, u_lo, m_hi, m_lo, acc_k)
                m_hi, m_lo = right_halves_itself(from_q, W)
                acc_q = _dot(u_hi, u_lo, m_hi, m_lo, acc_q)
            acc_k, acc_q = over_warps(acc_k, sums_k, W), over_warps(acc_q, sums_q, W)

        # The block itself: the inverse of its system, times -beta, and its scores.
        minus_beta = -gl.expand_dims(beta, 1)
        if alone > 0:  # the last chunk: k of the first is not needed any more
            leave_keys(k_chunk, all_k.index(0), W, K)
            k_i = keys_of_block(at_k.index(0), W, K)
        else:
            k_i = own_keys(all_k.index(c), W, K)
        decay = _decay(word, i_above, sums, sums_above)
        n_hi, n_lo = right_halves(gl.where(strict, decay * mma_v2(k_i, k, zero) * minus_beta, 0.0), W)
        scores = decay * mma_v2(k_i, q, zero)
        t = one
        for _ in range(rounds):
            t_hi, t_lo = left_halves(t, W)
            t = _dot(t_hi, t_lo, n_hi, n_lo, one)
        t_hi, t_lo = right_halves((t - one) * minus_beta, W)

        if CHUNKS > 1:  # blocks of chunks above
            for j in range(0, c * W * (1 - alone)):
                word_j = gl.load(p_ancestors + word_row + j // 2) >> (j % 2 * 16)
                paths_j = to_warps(at_paths.index(j).load(gl.SliceLayout(0, ABOVE)), W, ABOVE)
                decay = _decay(word_j, i_above, sums, paths_j)
                k_j = keys_of_block(at_k.index(j), W, K)
                from_k, from_q = decay * mma_v2(k_j, k, zero), decay * mma_v2(k_j, q, zero)
                u_hi, u_lo = factors_of_block(at_u.index(j), W)
                m_hi, m_lo = right_halves_itself(from_k, W)
                acc_k = _dot(u_hi, u_lo, m_hi, m_lo, acc_k)
                m_hi, m_lo = right_halves_itself(from_q, W)
                acc_q = _dot(u_hi, u_lo, m_hi, m_lo, acc_q)

        pool_row = gl.load(p_pool_row + first + gl.minimum(val_row, last))
        u = zero
        for j in gl.static_range(W):  # block by block within the chunk
            if j * 16 < left:
                if j + 1 < W:
                    block_j = c * W + j
                    word_j = gl.load(p_ancestors + word_row + block_j // 2) >> (block_j % 2 * 16)
                    paths_j = to_warps(at_paths.index(block_j).load(gl.SliceLayout(0, ABOVE)), W, ABOVE)
                    decay = _decay(word_j, i_above, sums, paths_j)
                    k_j = keys_of_block(at_k.index(c * W * (1 - alone) + j), W, K)
                    from_k = gl.where(w_p == j, 0.0, decay * mma_v2(k_j, k, zero))
                    from_q = gl.where(w_p == j, scores, decay * mma_v2(k_j, q, zero))
                else:
                    from_k, from_q = zero, gl.where(w_p == j, scores, 0.0)
                a_hi, a_lo = left_halves(acc_k, W)
                u = _dot(a_hi, a_lo, t_hi, t_lo, acc_k * minus_beta)
                if j % 2 == 0:
                    leave_factors(u, all_even, W)
                    u_hi, u_lo = factors_of_block(at_even.index(j), W)
                else:
                    leave_factors(u, all_odd, W)
                    u_hi, u_lo = factors_of_block(at_odd.index(j), W)
                m_hi, m_lo = right_halves_itself(from_q, W)
                acc_q = _dot(u_hi, u_lo, m_hi, m_lo, acc_q)
                if j + 1 < W:
                    m_hi, m_lo = right_halves_itself(from_k, W)
                    acc_k = _dot(u_hi, u_lo, m_hi, m_lo, acc_k)
        if (CHUNKS > 1) and (c + 1 < CHUNKS):
            leave_factors(u, all_u.index(c), W)  # for the chunks below
        m_out = (val_row < left) & (w_v * alone == 0)
        gl.store(p_pool_u + pool_row * (HV * V) + v_col, rows_first(u, W), mask=m_out)
        gl.store(p_o + (first + val_row) * (HV * V) + v_col, rows_first(acc_q, W).to(p_o.dtype.element_ty), mask=m_out)


def launch_blocks(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], bucket: Bucket, tile: HeldTile, overlap: int
) -> None:
    """`factorised.verify_factorised` by this kernel; the arguments are checked and laid out there."""
    rows = bucket.tree_rows
    warps = min(tile.warps, 2 if rows <= 32 else 4)
    full = 16 * warps
    chunks = triton.cdiv(rows, full)
    narrow = sizes["K"] <= _NARROW and warps == 4
    verify_blocks_kernel[(sizes["V"] // 16, sizes["HV"], bucket.sessions)](
        *tensors,
        **sizes,
        WORDS=bucket.words,
        CHUNKS=chunks,
        KEPT=chunks - 1 if chunks > 1 and (rows - 1) % full < 16 else chunks,
        W=warps,
        AT_ONCE=AT_ONCE,
        OVERLAP=overlap,
        num_warps=warps,
        maxnreg=_NARROW_REGISTERS if narrow else None,
        launch_pdl=overlap > 0,
    )
