"""The serial verification kernel with K shared out over four warps: the pinned form for the usual widths.

What it computes, how trees become groups and why bits are fixed stands in serial.py. Here a program owns 16 columns of
one head's state and each warp a quarter of K: a thread has 16 rows of S by 2 columns (K = 256). S^T k, S^T q and q . k
are summed over a thread's rows in order, over 4 lanes, and over the warps in order through shared memory, with one
barrier a row. States kept where a tree branches stay in shared memory while there is room (two places; trees of
129 rows rarely use three), else in the workspace.

The loads for the next row are behind the barrier: a load that were in flight across the sums would be waited for there,
since a warp has six scoreboards and branches that may fetch a kept state use them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.commit import AT_ONCE
from specla.kernels.gpu.layouts import barrier, powers, prefetch
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.tile_commit import committed, outer_step

COLUMNS = 16
WARPS = 4
WIDTHS = (64, 128, 256)
"""Of keys; others go the way of serial.py."""

NEAR = 2
"""Places in shared memory; others lie in the workspace."""

_NEAR = gl.constexpr(NEAR)
_REGISTERS = 128  # four programs a multiprocessor


@constexpr_function
def pairs(warps: int, width: int) -> Any:
    """q or k of one row as 32-bit words, two numbers each: [W, width / 2]."""
    own = width // 8
    lanes = [[0, own], [0, 2 * own], [0, 0], [0, 0], [0, 0]]
    words = [[0, x] for x in powers(1, own)]
    return gl.DistributedLinearLayout(words, lanes, [[x, 0] for x in powers(1, warps)], [], [warps, width // 2])


@constexpr_function
def all_parts(warps: int) -> Any:
    """[W, 16, 4]: a thread has its two columns of all warps."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 1, 0]] + [[x, 0, 0] for x in powers(1, warps)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 0, 0] for _ in powers(1, warps)], [], [warps, 16, 4])


@constexpr_function
def by_lane(warps: int, width: int) -> Any:
    """A tile as shared memory has it, 16 bytes a lane: [W, width / 8, 32, 4]."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]] + [[0, x, 0, 0] for x in powers(1, width // 8)]
    lanes = [[0, 0, x, 0] for x in powers(1, 32)]
    return gl.DistributedLinearLayout(
        regs, lanes, [[x, 0, 0, 0] for x in powers(1, warps)], [], [warps, width // 8, 32, 4]
    )


@gluon.jit
def _key(p, o_k, o_pair, PAIRS: gl.constexpr):
    """q or k as it is loaded: words of two bfloat16, or numbers of another type."""
    if PAIRS:
        return gl.load(p.to(gl.pointer_type(gl.int32)) + o_pair)
    else:
        return gl.load(p + o_k)


@gluon.jit
def _numbers(x, W: gl.constexpr, KP: gl.constexpr, PAIRS: gl.constexpr, S_K: gl.constexpr):
    """float32 [W, KP] of what `_key` gave."""
    if PAIRS:
        low, high = (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)
        return gl.convert_layout(gl.reshape(gl.join(low, high), [W, KP]), S_K, assert_trivial=True)
    else:
        return x.to(gl.float32)


@gluon.jit
def _over_k(s, k):
    """S^T k over a warp's share of K, [W, 16]."""
    return gl.sum(s * gl.expand_dims(k, 2), 1)


@gluon.jit
def _keep(s, place, at_near, p_far, o_far, W: gl.constexpr, KP: gl.constexpr, TILE: gl.constexpr):
    """Stores the tile at a place, from 1 on."""
    if place <= _NEAR:
        x = gl.permute(gl.reshape(s, [W, 4, KP // 8, 2, 8, 2]), (0, 2, 4, 1, 3, 5))
        at_near.index(place - 1).store(gl.reshape(x, [W, KP // 8, 32, 4]))
    else:
        gl.store(p_far + (place - 1 - _NEAR) * TILE + o_far, s)


@gluon.jit
def _fetch(place, at_near, p_far, o_far, W: gl.constexpr, KP: gl.constexpr, TILE: gl.constexpr):
    """The tile of a place."""
    S: gl.constexpr = layouts.state(W, KP, 16)
    if place <= _NEAR:
        x = gl.reshape(at_near.index(place - 1).load(by_lane(W, KP)), [W, KP // 8, 8, 4, 2, 2])
        x = gl.reshape(gl.permute(x, (0, 3, 1, 4, 2, 5)), [W, KP, 16])
        s = gl.convert_layout(x, S, assert_trivial=True)
    else:
        s = gl.load(p_far + (place - 1 - _NEAR) * TILE + o_far)
    return s


@gluon.jit
def verify_split_kernel(
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
    p_kept,
    p_arrived,
    p_slot,
    p_row_start,
    p_pending_len,
    p_write_state,
    p_groups,
    p_pending,
    p_pool_row,
    p_schedule_len,
    p_schedule,
    POOL: gl.constexpr,
    PENDING: gl.constexpr,
    STEPS: gl.constexpr,
    STEPS_2: gl.constexpr,
    GROUPS: gl.constexpr,
    PLACES: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    AT_ONCE: gl.constexpr,
    ROW_MASK: gl.constexpr,
    EMIT_BIT: gl.constexpr,
    LEAF_BIT: gl.constexpr,
    KEEP_SHIFT: gl.constexpr,
    FETCH_SHIFT: gl.constexpr,
    PLACE_MASK: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (V / 16, HV, sessions * groups)."""
    KP: gl.constexpr = K // W
    PAIRS: gl.constexpr = p_k.dtype.element_ty == gl.bfloat16
    S: gl.constexpr = layouts.state(W, KP, 16)
    S_K: gl.constexpr = gl.SliceLayout(2, S)
    S_V: gl.constexpr = gl.SliceLayout(1, S)
    WORDS: gl.constexpr = pairs(W, KP)
    i_v, i_h, i_bg = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b = i_bg // GROUPS
    slot = gl.load(p_slot + i_b).to(gl.int64)
    n_steps = gl.load(p_schedule_len + i_bg)
    start = gl.load(p_row_start + i_b)
    n_pending = gl.load(p_pending_len + i_b)
    write_state = gl.load(p_write_state + i_b)
    if (slot < 0) | (n_steps == 0):
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
    p_pool_row += start
    p_steps = p_schedule + i_bg * STEPS
    tile = (i_b * HV + i_h) * gl.num_programs(0) + i_v
    FAR: gl.constexpr = PLACES - _NEAR if PLACES > _NEAR else 0
    p_far = p_kept + ((i_bg * HV + i_h) * gl.num_programs(0) + i_v).to(gl.int64) * (FAR * K * 16)

    k_w = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, S_K)), 1)
    o_k = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, S_K)), 0) + k_w * KP
    w_w = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, WORDS)), 1)
    o_pair = gl.expand_dims(gl.arange(0, KP // 2, layout=gl.SliceLayout(0, WORDS)), 0) + w_w * (KP // 2)
    v_w = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, S_V)), 1)
    o_v = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, S_V)), 0) + v_w * 0
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    o_far = gl.expand_dims(o_k, 2) * 16 + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    word = gl.load(p_steps)
    next_word = gl.load(p_steps + 1, mask=n_steps > 1, other=0)
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32 * 64 // K, K // 64], [W, 1], [1, 0])
    i_step = gl.minimum(gl.arange(0, STEPS_2, layout=gl.SliceLayout(1, LINES)), n_steps - 1)
    line_row = gl.expand_dims(gl.load(p_steps + i_step) & ROW_MASK, 1)
    o_line = line_row * (H * K) + gl.expand_dims(gl.arange(0, K // 64, layout=gl.SliceLayout(0, LINES)), 0) * 64

    s = committed(s, p_pending, n_pending, p_pool_k, p_pool_u, p_pool_g, o_k, o_v, H, HV, K, V, AT_ONCE)
    if (n_pending > 0) & (write_state != 0):
        if GROUPS == 1:
            gl.store(p_state + o_s, s)
        else:  # the last program that has read the tile stores it: see serial.py
            n_groups = gl.load(p_groups + i_b)
            barrier()
            if gl.atomic_add(p_arrived + tile, 1, sem="release") == n_groups - 1:
                gl.store(p_state + o_s, s)
                gl.store(p_arrived + tile, 0)
    if OVERLAP:  # all above needs nothing of the kernel before
        gdc_wait()
        gdc_launch_dependents()
    prefetch(p_k + o_line)
    prefetch(p_q + o_line)

    row = word & ROW_MASK
    k = _key(p_k + row * (H * K), o_k, o_pair, PAIRS)
    q = _key(p_q + row * (H * K), o_k, o_pair, PAIRS)
    v = gl.load(p_v + row * (HV * V) + o_v)
    g, beta, pool_row = gl.load(p_g + row * HV), gl.load(p_beta + row * HV), gl.load(p_pool_row + row)
    at_parts = layouts.shared_blocks(gl.float32, 2, [W, 16, 4])
    if PLACES > 0:
        at_near = layouts.shared_blocks(gl.float32, _NEAR, [W, KP // 8, 32, 4])
    for i in range(n_steps):
        b_k, b_q = _numbers(k, W, KP, PAIRS, S_K), _numbers(q, W, KP, PAIRS, S_K)
        alpha = gl.exp(g)
        q_k = gl.convert_layout(gl.sum(b_q * b_k, 1), gl.SliceLayout(1, S_V), assert_trivial=True)
        q_k = gl.expand_dims(q_k, 1) + gl.zeros([W, 16], gl.float32, S_V)
        parts = gl.join(gl.join(_over_k(s, b_k), _over_k(s, b_q)), gl.join(q_k, q_k))
        at = at_parts.index(i % 2)
        at.store(gl.reshape(parts, [W, 16, 4]))
        sums = gl.sum(at.load(all_parts(W)), 0)  # of all warps: [16, 4]
        row_after = next_word & ROW_MASK
        k_after = _key(p_k + row_after * (H * K), o_k, o_pair, PAIRS)
        q_after = _key(p_q + row_after * (H * K), o_k, o_pair, PAIRS)
        v_after = gl.load(p_v + row_after * (HV * V) + o_v)
        g_after, beta_after = gl.load(p_g + row_after * HV), gl.load(p_beta + row_after * HV)
        pool_row_after = gl.load(p_pool_row + row_after)
        word_after = gl.load(p_steps + i + 2, mask=i + 2 < n_steps, other=0)

        recalled_y, q_k = gl.split(gl.reshape(sums, [16, 2, 2]))
        recalled, y = gl.split(recalled_y)
        q_k, _ = gl.split(q_k)
        recalled = gl.expand_dims(gl.convert_layout(recalled, gl.SliceLayout(0, S_V), assert_trivial=True), 0)
        y = gl.expand_dims(gl.convert_layout(y, gl.SliceLayout(0, S_V), assert_trivial=True), 0)
        q_k = gl.expand_dims(gl.convert_layout(q_k, gl.SliceLayout(0, S_V), assert_trivial=True), 0)
        u = beta * (v.to(gl.float32) - alpha * recalled)
        if (word >> LEAF_BIT) & 1 == 0:  # nothing goes on from a leaf's state
            s = outer_step(s, alpha, b_k, u)
        o = gl.fma(u, gl.broadcast(q_k, u)[0], gl.broadcast(alpha * y, u)[0])
        m_emit = (v_w == 0) & (((word >> EMIT_BIT) & 1) > 0)  # all warps have it, one stores it
        gl.store(p_o + row * (HV * V) + o_v, o.to(p_o.dtype.element_ty), mask=m_emit)
        gl.store(p_pool_u + pool_row * (HV * V) + o_v, u, mask=m_emit)
        if PLACES > 0:
            keep = (word >> KEEP_SHIFT) & PLACE_MASK
            if keep > 0:
                _keep(s, keep, at_near, p_far, o_far, W, KP, K * 16)
            fetch = (next_word >> FETCH_SHIFT) & PLACE_MASK
            if fetch > 0:
                s = _fetch(fetch, at_near, p_far, o_far, W, KP, K * 16)
        word, next_word, row, pool_row = next_word, word_after, row_after, pool_row_after
        k, q, v, g, beta = k_after, q_after, v_after, g_after, beta_after


def launch_split(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], steps: Mapping[str, int], bucket: Bucket, overlap: bool
) -> None:
    """`serial.verify_serial` by this kernel; the arguments are checked and laid out there.

    `sizes` are those of the layer, `steps` those of the schedule's words.
    """
    verify_split_kernel[(sizes["V"] // COLUMNS, sizes["HV"], bucket.sessions * bucket.groups)](
        *tensors,
        **sizes,
        **steps,
        STEPS_2=1 << (bucket.tree_rows - 1).bit_length(),
        W=WARPS,
        AT_ONCE=AT_ONCE,
        OVERLAP=overlap,
        num_warps=WARPS,
        maxnreg=_REGISTERS,
        launch_pdl=overlap,
    )
