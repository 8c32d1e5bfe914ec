"""Tree-masked factorised verification of many sessions: S streams through shared memory, once. Fast mode.

The equations are those of factorised.py, for trees of up to 16 rows. A program owns 64 columns of one head's state and
sweeps over K in parts that are asked for several ahead (cp.async into a ring of shared memory), so that memory works
while products are taken. A part is read once, gets the pending factors (two products for 16 of them, u in bfloat16
halves: 2^-17 of what is added), is stored, and adds its share to S^T k, S^T q, k . k and q . k. Each of the 4 warps has
16 columns and meets the others at the ring's barriers only.

Against held.py: nothing is summed over warps and rows are prepared once for 64 columns instead of 16, but there are
fewer programs. It is the quicker one from some four sessions on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import UNITS, as_left, as_right_alone, dot, halves, path_units, powers
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.pass_batch import Bucket

MOST_ROWS = 16
MOST_PENDING = 16
COLUMNS = 64
_WARPS = 4


class StreamedTile(NamedTuple):
    """How the work is cut."""

    part_k: int
    """Rows of S in one part: 32 or 64."""
    stages: int
    """Parts of the ring, 2 or more."""
    registers: int = 0
    """A thread's, at most; 0 leaves it to the compiler."""


@constexpr_function
def part(width: int) -> Any:
    """A part of S [width, 64] as products take S^T: 8 bytes a load."""
    regs = [[0, 1], [1, 0]] + [[x, 0] for x in powers(8, width)]
    lanes = [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 16], [0, 32]], [], [width, 64])


@constexpr_function
def row_values() -> Any:
    """v, u or o [16 rows, 64]."""
    lanes = [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout([[0, 1], [1, 0], [8, 0]], lanes, [[0, 16], [0, 32]], [], [16, 64])


@gluon.jit
def _columns_first(x, N: gl.constexpr):
    """[N, 64] as [64, N], columns in the order of products."""
    return gl.reshape(gl.permute(gl.reshape(x, [N, 4, 8, 2]), (1, 3, 2, 0)), [64, N])


@gluon.jit
def _rows_first(x, N: gl.constexpr):
    """[64, N] as [N, 64]."""
    return gl.reshape(gl.permute(gl.reshape(x, [4, 2, 8, N]), (3, 0, 2, 1)), [N, 64])


@gluon.jit
def _copy_rows(at, p, row, o_key):
    """Has 16 rows of q or k on their way to shared memory."""
    async_copy.async_copy_global_to_shared(at, p + gl.expand_dims(row, 1) + o_key)


@gluon.jit
def verify_streamed_kernel(
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
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    KP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (V / 64, HV, sessions)."""
    PARTS: gl.constexpr = K // KP
    P: gl.constexpr = layouts.column_products(4)
    ROW: gl.constexpr = gl.SliceLayout(1, P)
    COL: gl.constexpr = gl.SliceLayout(0, P)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, P, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, P, 2)
    PART: gl.constexpr = part(KP)
    VALUES: gl.constexpr = row_values()
    COPY_S: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    COPY_K: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [4, 1], [1, 0])
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
    p_state += (slot * HV + i_h) * K * V + i_v * 64
    p_pool_k += (pool * H + i_hk) * K
    p_pool_u += (pool * HV + i_h) * V + i_v * 64
    p_pool_g += pool * HV + i_h
    p_q += (start * H + i_hk) * K
    p_k += (start * H + i_hk) * K
    p_v += (start * HV + i_h) * V + i_v * 64
    p_o += (start * HV + i_h) * V + i_v * 64
    p_g += start * HV + i_h
    p_beta += start * HV + i_h

    KEYS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, KP // 8, order=[1, 0])
    at_s = gl.allocate_shared_memory(gl.float32, [STAGES, KP, 64], gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0]))
    at_k = gl.allocate_shared_memory(gl.bfloat16, [16, K], KEYS)
    at_q = gl.allocate_shared_memory(gl.bfloat16, [16, K], KEYS)
    at_pending = gl.allocate_shared_memory(gl.bfloat16, [16, K], KEYS)
    row_s = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(1, COPY_S)), 1)
    o_copy = row_s * V + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, COPY_S)), 0)
    row_k = gl.arange(0, 16, layout=gl.SliceLayout(1, COPY_K))
    o_key = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, COPY_K)), 0)

    # What needs no rows of this layer: the first part of S, the pending factors, the tree.
    async_copy.async_copy_global_to_shared(at_s.index(0), p_state + o_copy)
    if n_pending > 0:  # places past the last repeat it; their u is 0
        _copy_rows(at_pending, p_pool_k, gl.load(p_pending + gl.minimum(row_k, n_pending - 1)) * (H * K), o_key)
    async_copy.commit_group()
    i_row, i_col = gl.arange(0, 16, layout=ROW), gl.arange(0, 16, layout=COL)
    row_v = gl.arange(0, 16, layout=gl.SliceLayout(1, VALUES))
    col_v = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, VALUES)), 0)
    used = row_v < n_pending
    u_at = gl.expand_dims(gl.load(p_pending + row_v, mask=used, other=0), 1) * (HV * V) + col_v
    u_p = gl.load(p_pool_u + u_at, mask=gl.expand_dims(used, 1), other=0.0)
    g_at = gl.load(p_pending + i_row, mask=i_row < n_pending, other=0) * HV
    g_p = gl.load(p_pool_g + g_at, mask=i_row < n_pending, other=0.0)
    below = gl.expand_dims(i_row, 1) > gl.expand_dims(i_col, 0)
    weight = gl.exp(gl.sum(gl.where(below, gl.expand_dims(g_p, 1), 0.0), 0))  # the decay after each factor
    decay_p = gl.exp(gl.sum(g_p, 0))
    u_p = gl.convert_layout(_columns_first(u_p, 16), P, assert_trivial=True) * gl.expand_dims(weight, 0)
    u_hi, u_lo = halves(u_p)
    u_hi, u_lo = as_left(u_hi, P), as_left(u_lo, P)
    word = gl.load(p_ancestors + start + i_row, mask=i_row < n, other=0)
    depth = gl.load(p_depth + start + i_row, mask=i_row < n, other=0)
    pool_row = gl.expand_dims(gl.load(p_pool_row + start + row_v, mask=row_v < n, other=0), 1)
    if OVERLAP:
        gdc_wait()
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()

    row_k = gl.minimum(row_k, n - 1) * (H * K)  # places past the last repeat it; no row has them above
    _copy_rows(at_k, p_k, row_k, o_key)
    _copy_rows(at_q, p_q, row_k, o_key)
    async_copy.commit_group()
    for i in gl.static_range(1, STAGES - 1):
        if i < PARTS:
            async_copy.async_copy_global_to_shared(at_s.index(i), p_state + o_copy + i * (KP * V))
        async_copy.commit_group()
    g = gl.load(p_g + i_col * HV, mask=i_col < n, other=0.0)
    beta_row = gl.load(p_beta + i_row * HV, mask=i_row < n, other=0.0)
    beta_col = gl.load(p_beta + i_col * HV, mask=i_col < n, other=0.0)
    m_v = gl.expand_dims(row_v, 1) < n
    v = gl.load(p_v + gl.expand_dims(row_v, 1) * (HV * V) + col_v, mask=m_v, other=0.0)
    above = (gl.expand_dims(word, 1) >> gl.expand_dims(i_col, 0)) & 1
    paths = gl.sum(above * gl.expand_dims(path_units(g), 0), 1)
    paths_col = gl.convert_layout(paths, COL)
    between = (gl.expand_dims(paths, 1) - gl.expand_dims(paths_col, 0)).to(gl.float32) * (1.0 / UNITS)
    decay = gl.exp(gl.where(above != 0, between, -float("inf")))
    from_root = gl.expand_dims(gl.exp(paths_col.to(gl.float32) * (1.0 / UNITS)), 0)
    rounds = gl.max(depth, 0) - gl.min(gl.where(i_row < n, depth, 1 << 20), 0)

    k_k, q_k = gl.zeros([16, 16], gl.float32, P), gl.zeros([16, 16], gl.float32, P)
    s_k, s_q = gl.zeros([64, 16], gl.float32, P), gl.zeros([64, 16], gl.float32, P)
    row_s = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(1, PART)), 1)
    o_s = row_s * V + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, PART)), 0)
    for i in gl.static_range(PARTS):
        async_copy.wait_group(STAGES - 2)
        if i + STAGES - 1 < PARTS:
            async_copy.async_copy_global_to_shared(
                at_s.index((i + STAGES - 1) % STAGES), p_state + o_copy + (i + STAGES - 1) * (KP * V)
            )
        async_copy.commit_group()
        k, q = at_k.slice(i * KP, KP, 1), at_q.slice(i * KP, KP, 1)
        k_right, q_right = k.permute((1, 0)).load(RIGHT), q.permute((1, 0)).load(RIGHT)
        k_k = mma_v2(k.load(LEFT), k_right, k_k)
        q_k = mma_v2(q.load(LEFT), k_right, q_k)
        s = at_s.index(i % STAGES).load(PART)
        if n_pending > 0:
            st = gl.convert_layout(_columns_first(s * decay_p, KP), P, assert_trivial=True)
            k_p = at_pending.slice(i * KP, KP, 1).load(RIGHT)
            st = mma_v2(u_hi, k_p, mma_v2(u_lo, k_p, st))
            s = gl.convert_layout(_rows_first(st, KP), PART, assert_trivial=True)
            if write_state != 0:
                gl.store(p_state + o_s + i * (KP * V), s)
        s_hi, s_lo = halves(s)
        s_hi, s_lo = as_left(_columns_first(s_hi, KP), P), as_left(_columns_first(s_lo, KP), P)
        s_k = mma_v2(s_hi, k_right, mma_v2(s_lo, k_right, s_k))
        s_q = mma_v2(s_hi, q_right, mma_v2(s_lo, q_right, s_q))

    system_hi, system_lo = halves(gl.where(below, -(decay * gl.expand_dims(beta_row, 1)), 0.0) * k_k)
    scores_hi, scores_lo = halves(decay * q_k)
    system_hi, system_lo = as_right_alone(system_hi, P), as_right_alone(system_lo, P)
    v = gl.convert_layout(_columns_first(v.to(gl.float32), 16), P, assert_trivial=True)
    target = gl.expand_dims(beta_col, 0) * (v - from_root * s_k)
    u = target
    for _ in range(rounds):
        u = dot(u, system_hi, system_lo, target, P)
    o = dot(u, as_right_alone(scores_hi, P), as_right_alone(scores_lo, P), from_root * s_q, P)
    u = gl.convert_layout(_rows_first(u, 16), VALUES, assert_trivial=True)
    o = gl.convert_layout(_rows_first(o, 16), VALUES, assert_trivial=True)
    gl.store(p_pool_u + pool_row * (HV * V) + col_v, u, mask=m_v)
    gl.store(p_o + gl.expand_dims(row_v, 1) * (HV * V) + col_v, o.to(p_o.dtype.element_ty), mask=m_v)


def launch_streamed(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], bucket: Bucket, tile: StreamedTile, overlap: int
) -> None:
    """`factorised.verify_factorised` by this kernel; the arguments are checked and laid out there."""
    verify_streamed_kernel[(sizes["V"] // COLUMNS, sizes["HV"], bucket.sessions)](
        *tensors,
        **sizes,
        KP=tile.part_k,
        STAGES=tile.stages,
        OVERLAP=overlap,
        num_warps=_WARPS,
        maxnreg=tile.registers or None,
        launch_pdl=overlap > 0,
    )
