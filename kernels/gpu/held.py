"""Tree-masked factorised verification of trees of up to 16 rows with the state held in registers. Fast mode.

The equations are those of factorised.py. A program owns 16 columns of one head's state, its warps a share of K each.
The tile is read once, gets the pending factors with the serial kernels' arithmetic (so a state committed here has the
bits of `flush`), is stored, and stays in registers as bfloat16 halves of S^T: the left operand of S^T k and S^T q.
Sums over warps pass through shared memory once. Substitution runs in every warp alike: u^T is a product's result and
the next one's operand, so a round is three products and no exchange.

With `overlap` all that needs no rows of this layer (state, pending factors, trees) is done while the kernel before
still runs. Larger trees: held_blocks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu import layouts
from specla.kernels.gpu.commit import AT_ONCE
from specla.kernels.gpu.layouts import (
    TO_LOG2,
    along,
    as_left,
    as_right,
    columns_first,
    exp2,
    halves,
    path_units,
    right_halves,
    rows_first,
)
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.tile_commit import committed

ROWS = 16
"""Of the trees that the kernel below takes."""


class HeldTile(NamedTuple):
    """How the work is cut."""

    warps: int
    """For trees of up to ROWS rows, that share out K: 1, 2 or 4. For larger ones, that have 16 rows each: 2 or 4, and
    no more than a bucket has use for."""


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
def _dot(a, b_hi, b_lo, acc, P: gl.constexpr):
    """acc + a b of float32, b in halves; the small terms apart, so that two chains of products are in flight."""
    a_hi, a_lo = halves(a)
    a_hi, a_lo = as_left(a_hi, P), as_left(a_lo, P)
    return mma_v2(a_hi, b_hi, acc) + mma_v2(a_lo, b_hi, mma_v2(a_hi, b_lo, gl.zeros_like(acc)))


@gluon.jit
def _decay(above, sums_i, sums_j, W: gl.constexpr):
    """e^D [W, 16, 16]; 0 off the path."""
    between = (gl.expand_dims(sums_i, 1) - gl.expand_dims(sums_j, 0)).to(gl.float32) * TO_LOG2
    decay = exp2(gl.where(above != 0, between, -float("inf")))
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
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
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

    o_k = along(KP, S_K, 2, 1) + along(W, S_K, 2, 0) * KP
    o_v = along(16, S_V, 2, 1)
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    s = committed(s, p_pending, n_pending, p_pool_k, p_pool_u, p_pool_g, o_k, o_v, H, HV, K, V, AT_ONCE)
    if (n_pending > 0) & (write_state != 0):
        gl.store(p_state + o_s, s)
    s_hi, s_lo = halves(s)
    s_hi, s_lo = as_left(_state_by_product(s_hi, W, KP), P), as_left(_state_by_product(s_lo, W, KP), P)

    i_row, i_col = gl.arange(0, 16, layout=ROW), gl.arange(0, 16, layout=COL)
    below = gl.expand_dims(i_row, 1) > gl.expand_dims(i_col, 0)
    i_key, key = along(16, KEYS, 3, 1), along(KP, KEYS, 3, 2) + along(W, KEYS, 3, 0) * KP
    o_key = gl.minimum(i_key, n - 1) * (H * K) + key  # places past the last row repeat it
    w_v, v_row, v_col = along(W, VALUES, 3, 0), along(16, VALUES, 3, 1), along(16, VALUES, 3, 2)
    v_row += w_v * 0  # [W, 16, 1]
    o_val = v_row * (HV * V) + v_col
    m_out = (v_row < n) & (w_v == v_row // (16 // W))  # all warps have u and o; each stores some rows
    if W > 1:
        at_parts = layouts.shared(gl.float32, [W, 8, 32, 4])
        at_sums = layouts.shared(gl.float32, [8, 32, 4])
    if OVERLAP:  # all above needs nothing of the kernel before; it takes the longer, so the tree is read below
        gdc_wait()
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()

    k, q = gl.load(p_k + o_key), gl.load(p_q + o_key)
    g = gl.load(p_g + i_col * HV, mask=i_col < n, other=0.0)
    beta_row = gl.load(p_beta + i_row * HV, mask=i_row < n, other=0.0)
    beta_col = gl.load(p_beta + i_col * HV, mask=i_col < n, other=0.0)
    v = gl.load(p_v + o_val, mask=v_row < n, other=0.0).to(gl.float32)
    word = gl.load(p_ancestors + i_row * WORDS, mask=i_row < n, other=0)
    depth = gl.load(p_depth + i_row, mask=i_row < n, other=0)
    pool_row = gl.load(p_pool_row + v_row, mask=v_row < n, other=0)
    rounds = gl.max(depth, 0)
    above = (gl.expand_dims(word, 1) >> gl.expand_dims(i_col, 0)) & 1
    paths = gl.sum(above * gl.expand_dims(path_units(g), 0), 1)
    paths_col = gl.convert_layout(paths, COL)
    decay = _decay(above, paths, paths_col, W)
    from_root = gl.expand_dims(gl.expand_dims(exp2(paths_col.to(gl.float32) * TO_LOG2), 0), 0)

    zero = gl.zeros([W, 16, 16], gl.float32, P)
    k, q = _by_product(k, W, KP), _by_product(q, W, KP)
    k_right, q_right = as_right(k, P), as_right(q, P)
    k_k = mma_v2(as_left(k, P), k_right, zero)
    q_k = mma_v2(as_left(q, P), k_right, zero)
    s_k = mma_v2(s_hi, k_right, mma_v2(s_lo, k_right, zero))
    s_q = mma_v2(s_hi, q_right, mma_v2(s_lo, q_right, zero))
    if W > 1:
        k_k, q_k, s_k, s_q = _sum_four(k_k, q_k, s_k, s_q, at_parts, at_sums, W)
    beta_below = gl.expand_dims(gl.where(below, gl.expand_dims(beta_row, 1), 0.0), 0)
    system_hi, system_lo = right_halves(-(decay * beta_below) * k_k, W)
    scores_hi, scores_lo = right_halves(decay * q_k, W)
    target = gl.expand_dims(gl.expand_dims(beta_col, 0), 0) * (columns_first(v, W) - from_root * s_k)
    u = target
    for _ in range(rounds):
        u = _dot(u, system_hi, system_lo, target, P)
    o = _dot(u, scores_hi, scores_lo, from_root * s_q, P)
    gl.store(p_pool_u + pool_row * (HV * V) + v_col, rows_first(u, W), mask=m_out)
    gl.store(p_o + o_val, rows_first(o, W).to(p_o.dtype.element_ty), mask=m_out)


def launch_held(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], bucket: Bucket, tile: HeldTile, overlap: int
) -> None:
    """`factorised.verify_factorised` by this kernel; the arguments are checked and laid out there."""
    verify_held_kernel[(sizes["V"] // 16, sizes["HV"], bucket.sessions)](
        *tensors,
        **sizes,
        WORDS=bucket.words,
        W=tile.warps,
        AT_ONCE=AT_ONCE,
        OVERLAP=overlap,
        num_warps=tile.warps,
        launch_pdl=overlap > 0,
    )
