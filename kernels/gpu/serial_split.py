"""The serial verification kernel with K shared out over four warps: the pinned form for the usual widths.

What it computes, how trees become groups and why bits are fixed stands in serial.py. Here a program owns 16 columns of
one head's state and each warp a quarter of K: a thread has 16 rows of S by 2 columns (K = 256). S^T k, S^T q and q . k
are summed over a thread's rows in order, over a quad of lanes, and over the warps in order through shared memory, with
one barrier a row. States kept where a tree branches stay in shared memory while there is room (two places; trees of
129 rows rarely use three), else in the workspace.

With several programs a multiprocessor, instructions and accesses of shared memory are what takes the time. So a lane of
a quad ends with one sum of the four that the quad has (of two columns, with k or with q), reads what other warps have
of that one alone, makes u or o of it, and the quad exchanges u. What rows need besides S (e^g, beta, q . k, v) is made
ready for up to 16 at a time by threads that have a row each, and what they give leaves 8 rows at a time.

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
from specla.kernels.gpu.layouts import along, along_alone, barrier, powers, prefetch
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.tile_commit import committed, outer_step

COLUMNS = 16
WARPS = 4
WIDTHS = (64, 128, 256)
"""Of keys; others go the way of serial.py."""

NEAR = 2
"""Places in shared memory; others lie in the workspace."""

_NEAR = gl.constexpr(NEAR)
_READY = gl.constexpr(16)  # rows that are made ready at a time, 8 by 8
_REGISTERS = 128  # four programs a multiprocessor


@constexpr_function
def pairs(warps: int, width: int) -> Any:
    """q or k of one row as 32-bit words, two numbers each: [W, width / 2]."""
    own = width // 8
    lanes = [[0, own], [0, 2 * own], [0, 0], [0, 0], [0, 0]]
    words = [[0, x] for x in powers(1, own)]
    return gl.DistributedLinearLayout(words, lanes, [[x, 0] for x in powers(1, warps)], [], [warps, width // 2])


@constexpr_function
def by_quad(warps: int, width: int) -> Any:
    """S [W, 2, 2, width / 4, 16], which is [W, width, 16]: the lanes of a quad are the second and third index."""
    regs = [[0, 0, 0, 0, 1]] + [[0, 0, 0, x, 0] for x in powers(1, width // 4)]
    lanes = [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 0, 8]]
    warp = [[x, 0, 0, 0, 0] for x in powers(1, warps)]
    return gl.DistributedLinearLayout(regs, lanes, warp, [], [warps, 2, 2, width // 4, 16])


@constexpr_function
def sums(warps: int) -> Any:
    """A number a lane: [W, of k or of q, column of two, pairs of columns]."""
    lanes = [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    return gl.DistributedLinearLayout([], lanes, [[x, 0, 0, 0] for x in powers(1, warps)], [], [warps, 2, 2, 8])


@constexpr_function
def sums_of_all(warps: int) -> Any:
    """The same of all warps, in every warp."""
    lanes = [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    regs, warp = [[x, 0, 0, 0] for x in powers(1, warps)], [[0] * 4 for _ in powers(1, warps)]
    return gl.DistributedLinearLayout(regs, lanes, warp, [], [warps, 2, 2, 8])


@constexpr_function
def values(warps: int) -> Any:
    """v of a row [8, 2]: of the column that a lane has a sum of."""
    lanes = [[0, 1], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([], lanes, [[0, 0] for _ in powers(1, warps)], [], [8, 2])


@constexpr_function
def by_lane(warps: int, width: int) -> Any:
    """A tile as shared memory has it, 16 bytes a lane: [W, width / 8, 32, 4]."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]] + [[0, x, 0, 0] for x in powers(1, width // 8)]
    lanes = [[0, 0, x, 0] for x in powers(1, 32)]
    return gl.DistributedLinearLayout(
        regs, lanes, [[x, 0, 0, 0] for x in powers(1, warps)], [], [warps, width // 8, 32, 4]
    )


@constexpr_function
def eight_keys(warps: int, width: int) -> Any:
    """k or q of eight rows [W, 8, width]: a thread has of one row what it has of S."""
    own = width // 4
    regs, lanes = [[0, 0, x] for x in powers(1, own)], [[0, 0, own], [0, 0, 2 * own], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[x, 0, 0] for x in powers(1, warps)], [], [warps, 8, width])


@constexpr_function
def eight_entries(warps: int) -> Any:
    """Four numbers of each of eight rows [8, 4], a row a lane."""
    lanes = [[1, 0], [2, 0], [4, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, [[0, 0] for _ in powers(1, warps)], [], [8, 4])


@constexpr_function
def entry(warps: int) -> Any:
    """[4], known to all."""
    return gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0] for _ in powers(1, warps)], [], [4])


@constexpr_function
def one_number(warps: int) -> Any:
    """[1], known to all."""
    return gl.DistributedLinearLayout([], [[0]] * 5, [[0] for _ in powers(1, warps)], [], [1])


@constexpr_function
def eight_results(warps: int) -> Any:
    """[8 rows, u or o, 16 columns]."""
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0]]
    row = [[x, 0, 0] for x in powers(2, 8)]
    warp = row + [[0, 0, 0] for _ in powers(4, warps)]
    return gl.DistributedLinearLayout([[0, 1, 0]], lanes, warp, [], [8, 2, 16])


@gluon.jit
def _key(p, o_k, o_pair, PAIRS: gl.constexpr):
    """q or k as it is loaded: words of two bfloat16, or numbers of another type."""
    if PAIRS:
        return gl.load(p.to(gl.pointer_type(gl.int32)) + o_pair)
    else:
        return gl.load(p + o_k)


@gluon.jit
def _numbers(x, W: gl.constexpr, KP: gl.constexpr, PAIRS: gl.constexpr):
    """float32 [W, 2, 2, KP / 4, 1] of what `_key` gave."""
    Q_K: gl.constexpr = gl.SliceLayout(4, by_quad(W, KP))
    if PAIRS:
        low, high = (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)
        x = gl.join(low, high)
    else:
        x = x.to(gl.float32)
    return gl.expand_dims(gl.convert_layout(gl.reshape(x, [W, 2, 2, KP // 4]), Q_K, assert_trivial=True), 4)


@gluon.jit
def _quads(s, W: gl.constexpr, KP: gl.constexpr):
    """S [W, KP, 16] as `by_quad` has it."""
    return gl.convert_layout(gl.reshape(s, [W, 2, 2, KP // 4, 16]), by_quad(W, KP), assert_trivial=True)


@gluon.jit
def _keep(s, place, at_near, p_far, o_far, W: gl.constexpr, KP: gl.constexpr, TILE: gl.constexpr):
    """Stores the tile at a place, from 1 on."""
    if place <= _NEAR:
        x = gl.permute(gl.reshape(s, [W, 4, KP // 8, 2, 8, 2]), (0, 2, 4, 1, 3, 5))
        at_near.index(place - 1).store(gl.reshape(x, [W, KP // 8, 32, 4]))
    else:
        far = gl.convert_layout(gl.reshape(s, [W, KP, 16]), layouts.state(W, KP, 16), assert_trivial=True)
        gl.store(p_far + (place - 1 - _NEAR) * TILE + o_far, far)


@gluon.jit
def _fetch(place, at_near, p_far, o_far, W: gl.constexpr, KP: gl.constexpr, TILE: gl.constexpr):
    """The tile of a place."""
    if place <= _NEAR:
        x = gl.reshape(at_near.index(place - 1).load(by_lane(W, KP)), [W, KP // 8, 8, 4, 2, 2])
        s = _quads(gl.permute(x, (0, 3, 1, 4, 2, 5)), W, KP)
    else:
        s = _quads(gl.load(p_far + (place - 1 - _NEAR) * TILE + o_far), W, KP)
    return s


@gluon.jit
def _from_lane(x, APART: gl.constexpr):
    """What the lane whose number differs by this bit has."""
    if APART == 1:
        return _shuffle(x, "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, -1;")
    else:
        return _shuffle(x, "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, -1;")


@gluon.jit
def _shuffle(x, INSTRUCTION: gl.constexpr):
    return gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _to_all(x, L: gl.constexpr, RANK: gl.constexpr):
    """x [1], known to all, as [1, .., 1] of a layout."""
    x = gl.convert_layout(x, along_alone(L, RANK, RANK - 1), assert_trivial=True)
    for i in gl.static_range(RANK - 1):
        x = gl.expand_dims(x, i)
    return x


@gluon.jit
def _make_ready(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_steps,
    last,
    at_shares,
    at_entries,
    at_values,
    ROW_MASK: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
):
    """What eight rows need besides S; p_steps points at their steps, places past the last one repeat it.

    q . k is summed as S^T k is: over a thread's keys in order, over a quad, over the warps in order.
    """
    KP: gl.constexpr = K // W
    EIGHT: gl.constexpr = eight_keys(W, KP)
    ENTRIES: gl.constexpr = eight_entries(W)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [W, 1], [1, 0])
    row = gl.load(p_steps + gl.minimum(along(8, EIGHT, 3, 1), last)) & ROW_MASK
    o_key = row * (H * K) + along(W, EIGHT, 3, 0) * KP + along(KP, EIGHT, 3, 2)
    k, q = gl.load(p_k + o_key), gl.load(p_q + o_key)
    row = gl.load(p_steps + gl.minimum(gl.arange(0, 8, layout=gl.SliceLayout(1, ENTRIES)), last)) & ROW_MASK
    g, beta = gl.load(p_g + row * HV), gl.load(p_beta + row * HV)
    row = gl.load(p_steps + gl.minimum(along(8, FLAT, 2, 0), last)) & ROW_MASK
    at_values.store(gl.load(p_v + row * (HV * V) + along(16, FLAT, 2, 1)))
    at_shares.store(gl.permute(gl.sum(q.to(gl.float32) * k.to(gl.float32), 2), (1, 0)))
    q_k = gl.convert_layout(gl.sum(at_shares.load(ENTRIES), 1), gl.SliceLayout(1, ENTRIES), assert_trivial=True)
    entries = gl.reshape(gl.join(gl.join(gl.exp(g), q_k), gl.join(beta, beta)), [8, 4])
    at_entries.store(gl.convert_layout(entries, ENTRIES, assert_trivial=True))


@gluon.jit
def _sum(s, b_k, b_q, at, W: gl.constexpr, KP: gl.constexpr):
    """S^T k and S^T q over all of K, a number a lane: [1, 2, 2, 8] of `sums`."""
    Q_V: gl.constexpr = gl.SliceLayout(3, by_quad(W, KP))
    L: gl.constexpr = sums(W)
    x_k, x_q = gl.sum(s * b_k, 3), gl.sum(s * b_q, 3)  # [W, 2, 2, 16], of a lane's keys
    of_q = along(2, Q_V, 4, 1) > 0
    x = gl.where(of_q, x_q, x_k) + _from_lane(gl.where(of_q, x_k, x_q), 2)
    even, odd = gl.split(gl.reshape(x, [W, 2, 2, 8, 2]))
    even, odd = gl.convert_layout(even, L, assert_trivial=True), gl.convert_layout(odd, L, assert_trivial=True)
    of_odd = along(2, L, 4, 2) > 0
    at.store(gl.where(of_odd, odd, even) + _from_lane(gl.where(of_odd, even, odd), 1))
    x = gl.convert_layout(gl.sum(at.load(sums_of_all(W)), 0), gl.SliceLayout(0, L), assert_trivial=True)
    return gl.expand_dims(x, 0)


@gluon.jit
def _row(total, at_entry, at_v, at_out, W: gl.constexpr, KP: gl.constexpr):
    """Leaves u and o of a row; gives u [1, 2, 2, 1, 16] and e^g as the state needs them."""
    Q: gl.constexpr = by_quad(W, KP)
    L: gl.constexpr = sums(W)
    left, right = gl.split(gl.reshape(at_entry.load(entry(W)), [2, 2]))
    alpha, q_k = gl.split(gl.reshape(left, [1, 2]))
    beta, _ = gl.split(gl.reshape(right, [1, 2]))
    v = gl.permute(at_v.load(values(W)).to(gl.float32), (1, 0))
    v = gl.convert_layout(v, gl.SliceLayout(0, gl.SliceLayout(0, L)), assert_trivial=True)
    v = gl.broadcast(gl.expand_dims(gl.expand_dims(v, 0), 0), total)[0]
    e_g = gl.broadcast(_to_all(alpha, L, 4), total)[0]
    u = gl.broadcast(_to_all(beta, L, 4), total)[0] * (v - e_g * total)  # where the sum is S^T k
    even = _shuffle(u, "shfl.sync.idx.b32 $0, $1, 0, 0x1c1f, -1;")  # of the quad's first lane
    odd = _shuffle(u, "shfl.sync.idx.b32 $0, $1, 1, 0x1c1f, -1;")
    mine = gl.where(along(2, L, 4, 2) > 0, odd, even)
    o = gl.fma(mine, gl.broadcast(_to_all(q_k, L, 4), mine)[0], e_g * total)  # where it is S^T q
    out = gl.where(along(2, L, 4, 1) > 0, o, u)
    at_out.store(gl.permute(gl.reshape(out, [2, 2, 8]), (0, 2, 1)))
    u = gl.reshape(gl.join(even, odd), [1, 2, 2, 16])
    u = gl.expand_dims(gl.convert_layout(u, gl.SliceLayout(3, Q), assert_trivial=True), 3)
    return u, _to_all(alpha, Q, 5)


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
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
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

    o_k = along(KP, S_K, 2, 1) + along(W, S_K, 2, 0) * KP
    o_pair = along(KP // 2, WORDS, 2, 1) + along(W, WORDS, 2, 0) * (KP // 2)
    o_v = along(16, S_V, 2, 1)
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    o_far = gl.expand_dims(o_k, 2) * 16 + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    word = gl.load(p_steps)
    next_word = gl.load(p_steps + 1, mask=n_steps > 1, other=0)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [W, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32 * 64 // K, K // 64], [W, 1], [1, 0])
    i_step = gl.minimum(gl.arange(0, STEPS_2, layout=gl.SliceLayout(1, LINES)), n_steps - 1)
    line_row = gl.expand_dims(gl.load(p_steps + i_step) & ROW_MASK, 1)
    o_line = line_row * (H * K) + along(K // 64, LINES, 2, 1) * 64
    each = gl.arange(0, 2 * STEPS_2, layout=EACH)
    at_words = layouts.shared_blocks(gl.int32, 2 * STEPS_2, [1])
    words = at_words._reinterpret(gl.int32, [2 * STEPS_2], layouts.plain([2 * STEPS_2]))
    words.store(gl.load(p_steps + each, mask=each < n_steps, other=0))

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
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()
    prefetch(p_k + o_line)
    prefetch(p_q + o_line)

    row = word & ROW_MASK
    k, q = _key(p_k + row * (H * K), o_k, o_pair, PAIRS), _key(p_q + row * (H * K), o_k, o_pair, PAIRS)
    at_shares = layouts.shared(gl.float32, [8, W])
    at_table = layouts.shared_blocks(gl.float32, _READY, [4])
    at_v = layouts.shared_blocks(p_v.dtype.element_ty, _READY, [8, 2])
    at_out = layouts.shared_blocks(gl.float32, _READY, [2, 8, 2])
    eight_table = at_table._reinterpret(gl.float32, [_READY // 8, 8, 4], layouts.plain([8, 4]))
    eight_v = at_v._reinterpret(p_v.dtype.element_ty, [_READY // 8, 8, 16], layouts.plain([8, 16]))
    eight_out = at_out._reinterpret(gl.float32, [_READY // 8, 8, 2, 16], layouts.plain([8, 2, 16]))
    at_even, at_odd = layouts.shared(gl.float32, [W, 2, 2, 8]), layouts.shared(gl.float32, [W, 2, 2, 8])
    at_last = layouts.shared(gl.float32, [W, 2, 2, 8])  # its own: else the loop would need a barrier more
    if PLACES > 0:
        at_near = layouts.shared_blocks(gl.float32, _NEAR, [W, KP // 8, 32, 4])
    s = _quads(s, W, KP)
    for first in range(0, n_steps, _READY):
        end = gl.minimum(first + _READY, n_steps)
        for part in range(0, (end - first + 7) // 8):
            p_part, last = p_steps + first + part * 8, end - 1 - first - part * 8
            at_8, at_8_v = eight_table.index(part), eight_v.index(part)
            _make_ready(p_q, p_k, p_v, p_g, p_beta, p_part, last, at_shares, at_8, at_8_v, ROW_MASK, H, HV, K, V, W)
        for i_2 in range(first, end - 1, 2):
            for parity in gl.static_range(2):
                i = i_2 + parity
                b_k, b_q = _numbers(k, W, KP, PAIRS), _numbers(q, W, KP, PAIRS)
                total = _sum(s, b_k, b_q, at_even if parity == 0 else at_odd, W, KP)
                row = next_word & ROW_MASK
                k, q = _key(p_k + row * (H * K), o_k, o_pair, PAIRS), _key(p_q + row * (H * K), o_k, o_pair, PAIRS)
                word_after = gl.sum(at_words.index(i + 2).load(one_number(W)), 0)
                u, alpha = _row(total, at_table.index(i - first), at_v.index(i - first), at_out.index(i - first), W, KP)
                if (word >> LEAF_BIT) & 1 == 0:  # nothing goes on from a leaf's state
                    s = outer_step(s, alpha, b_k, u)
                if PLACES > 0:
                    keep = (word >> KEEP_SHIFT) & PLACE_MASK
                    if keep > 0:
                        _keep(s, keep, at_near, p_far, o_far, W, KP, K * 16)
                    fetch = (next_word >> FETCH_SHIFT) & PLACE_MASK
                    if fetch > 0:
                        s = _fetch(fetch, at_near, p_far, o_far, W, KP, K * 16)
                word, next_word = next_word, word_after
        if (end - first) % 2 == 1:  # the last row of all, a leaf
            total = _sum(s, _numbers(k, W, KP, PAIRS), _numbers(q, W, KP, PAIRS), at_last, W, KP)
            i = end - 1 - first
            _row(total, at_table.index(i), at_v.index(i), at_out.index(i), W, KP)
        for part in range(0, (end - first + 7) // 8):
            at_step = first + part * 8 + along(8, FLAT, 2, 0)
            step = gl.load(p_steps + at_step, mask=at_step < end, other=0)  # past the last: no row to emit
            emit, given = ((step >> EMIT_BIT) & 1) > 0, step & ROW_MASK
            b_u, b_o = gl.split(gl.permute(eight_out.index(part).load(eight_results(W)), (0, 2, 1)))
            b_u, b_o = gl.convert_layout(b_u, FLAT), gl.convert_layout(b_o, FLAT)
            o_column = along(16, FLAT, 2, 1)
            gl.store(p_o + given * (HV * V) + o_column, b_o.to(p_o.dtype.element_ty), mask=emit)
            gl.store(p_pool_u + gl.load(p_pool_row + given) * (HV * V) + o_column, b_u, mask=emit)


def launch_split(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], steps: Mapping[str, int], bucket: Bucket, overlap: int
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
        launch_pdl=overlap > 0,
    )
