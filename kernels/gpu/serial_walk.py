"""A walk over a tree's rows with a tile of the state in registers: what the exact kernels in Gluon have in common.

Every sum over K is taken in one order, written down operation by operation, so that no compiler chooses it: each thread
adds up its keys one by one (fma), then come the lanes of a quad (0 + 2) + (1 + 3), then the parts of K likewise. See
serial_layouts.py for who has what.

In a walk each warp has all of K for its columns, so that a row needs no other warp and no barrier: sums pass from lane
to lane. A lane of a quad ends with one sum of the four that the quad has (of two columns, with k or with q), makes u or
o of it, and the quad exchanges u. What rows need besides S (e^g, beta, q . k, v) is made ready for several at a time.
States kept where a tree branches stay in shared memory while there is room,
else in the workspace. In a pass of plain decoding there is one row: the tile stays as it was loaded, and parts of K
meet once in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import along, along_alone, barrier
from specla.kernels.gpu.schedule import EMIT_BIT, FETCH_SHIFT, KEEP_SHIFT, LEAF_BIT, PLACE_MASK, ROW_BITS
from specla.kernels.gpu.serial_layouts import (
    by_column,
    by_quad,
    by_thread,
    eight_entries,
    eight_keys,
    eight_sums,
    known_to_all,
    one_key,
    sums,
    sums_of_all,
    values,
)
from specla.kernels.gpu.tile_commit import outer_step

ROW_MASK = gl.constexpr((1 << ROW_BITS) - 1)
_EMIT_BIT, _LEAF_BIT = gl.constexpr(EMIT_BIT), gl.constexpr(LEAF_BIT)
_KEEP_SHIFT, _FETCH_SHIFT, _PLACE_MASK = gl.constexpr(KEEP_SHIFT), gl.constexpr(FETCH_SHIFT), gl.constexpr(PLACE_MASK)


@gluon.jit
def load_key(p, K: gl.constexpr, C: gl.constexpr, ACROSS: gl.constexpr):
    """q or k of one row as it is loaded: words [K / 2] of two bfloat16, or numbers [K] of another type."""
    if p.dtype.element_ty == gl.bfloat16:
        WORDS: gl.constexpr = one_key(K // 4, C, ACROSS, True)
        return gl.load(p.to(gl.pointer_type(gl.int32)) + gl.arange(0, K // 2, layout=WORDS))
    else:
        return gl.load(p + gl.arange(0, K, layout=one_key(K // 4, C, ACROSS, False)))


@gluon.jit
def numbers(x, K: gl.constexpr, C: gl.constexpr, ACROSS: gl.constexpr):
    """float32 [4, 2, 2, K / 16, 1] of what `load_key` gave."""
    Q_K: gl.constexpr = gl.SliceLayout(4, by_quad(K // 4, C, ACROSS))
    if x.dtype == gl.int32:
        low, high = (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)
        x = gl.join(low, high)
    else:
        x = x.to(gl.float32)
    return gl.expand_dims(gl.convert_layout(gl.reshape(x, [4, 2, 2, K // 16]), Q_K, assert_trivial=True), 4)


@gluon.jit
def quads(s, K: gl.constexpr, C: gl.constexpr, ACROSS: gl.constexpr):
    """S [K, C], or [4, K / 4, C] across warps, as `by_quad` has it."""
    return gl.convert_layout(gl.reshape(s, [4, 2, 2, K // 16, C]), by_quad(K // 4, C, ACROSS), assert_trivial=True)


@gluon.jit
def quad_places(K: gl.constexpr, C: gl.constexpr, ACROSS: gl.constexpr, STRIDE: gl.constexpr):
    """Where S [4, 2, 2, K / 16, C] lies among rows that are so many elements apart."""
    Q: gl.constexpr = by_quad(K // 4, C, ACROSS)
    key = along(2, Q, 5, 1) * (K // 8) + along(2, Q, 5, 2) * (K // 16) + along(K // 16, Q, 5, 3)
    return (along(4, Q, 5, 0) * (K // 4) + key) * STRIDE + along(C, Q, 5, 4)


@gluon.jit
def _keep(s, place, at_near, p_far, NEAR: gl.constexpr, K: gl.constexpr, C: gl.constexpr):
    """Stores the tile at a place, from 1 on: in shared memory each thread's 16 bytes beside those of the next."""
    KEYS: gl.constexpr = 32 // C  # of a thread that fill 16 bytes
    COUNT: gl.constexpr = K // 16 // KEYS
    if place <= NEAR:
        x = gl.reshape(s, [4, 4, COUNT, KEYS, 4, 2, C // 8])  # part, quad, .., warp, pair of lanes, columns of a thread
        x = gl.permute(x, (2, 4, 0, 5, 1, 3, 6))
        at_near.index(place - 1).store(gl.reshape(x, [COUNT, 128, 4]))
    else:
        gl.store(p_far + (place - 1 - NEAR) * (K * C) + quad_places(K, C, False, C), s)


@gluon.jit
def _fetch(place, at_near, p_far, NEAR: gl.constexpr, K: gl.constexpr, C: gl.constexpr):
    """The tile of a place."""
    KEYS: gl.constexpr = 32 // C
    COUNT: gl.constexpr = K // 16 // KEYS
    if place <= NEAR:
        x = gl.reshape(at_near.index(place - 1).load(by_thread(K // 4, C)), [COUNT, 4, 4, 2, 4, KEYS, C // 8])
        s = quads(gl.permute(x, (2, 4, 0, 5, 1, 3, 6)), K, C, False)
    else:
        s = gl.load(p_far + (place - 1 - NEAR) * (K * C) + quad_places(K, C, False, C))
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
def _half(x, KEYS: gl.constexpr, N: gl.constexpr):
    """x [4, 2, 2, KEYS, N] as its first and its second half of keys."""
    x = gl.reshape(x, [4, 2, 2, 2, KEYS // 2, N])
    return gl.split(gl.permute(x, (0, 1, 2, 4, 5, 3)))


@gluon.jit
def _added_up(x, k, so_far, KEYS: gl.constexpr, N: gl.constexpr, L: gl.constexpr, FIRST: gl.constexpr):
    """so_far [4, 2, 2, N] and x k over a thread's keys, one after the other; k [4, 2, 2, KEYS, 1 or N]."""
    if KEYS == 1:
        x = gl.convert_layout(gl.reshape(x, [4, 2, 2, N]), L, assert_trivial=True)
        k = gl.convert_layout(gl.reshape(k, [4, 2, 2, k.shape[4]]), L, assert_trivial=True)
        k = gl.broadcast(k, x)[0]
        if FIRST:
            return x * k
        else:
            return gl.fma(x, k, so_far)
    else:
        x_1, x_2 = _half(x, KEYS, N)
        k_1, k_2 = _half(k, KEYS, k.shape[4])
        so_far = _added_up(x_1, k_1, so_far, KEYS // 2, N, L, FIRST)
        return _added_up(x_2, k_2, so_far, KEYS // 2, N, L, False)


@gluon.jit
def eight_rows(p_steps, p_pool_row, first, n_steps, K: gl.constexpr, C: gl.constexpr):
    """The rows of eight of n_steps steps, as `ask_eight` wants them; places past the last one have the root."""
    i_key = first + along(8, eight_keys(K // 4), 3, 1)
    i_value = first + along(8, by_column(C), 2, 0)
    i_row = first + gl.arange(0, 8, layout=gl.SliceLayout(1, eight_entries()))
    key_row = gl.load(p_steps + i_key, mask=i_key < n_steps, other=0) & ROW_MASK
    value_row = gl.load(p_steps + i_value, mask=i_value < n_steps, other=0) & ROW_MASK
    row = gl.load(p_steps + i_row, mask=i_row < n_steps, other=0) & ROW_MASK
    return key_row, value_row, row, gl.load(p_pool_row + row)


@gluon.jit
def ask_eight(
    key_row,
    value_row,
    row,
    pool_row,
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
):
    """What eight rows need besides S, on its way; pointers are at the session's first row."""
    EIGHT: gl.constexpr = eight_keys(K // 4)
    o_key = key_row * (H * K) + along(4, EIGHT, 3, 0) * (K // 4) + along(K // 4, EIGHT, 3, 2)
    k, q = gl.load(p_k + o_key), gl.load(p_q + o_key)
    v = gl.load(p_v + value_row * (HV * V) + along(C, by_column(C), 2, 1))
    return k, q, gl.load(p_g + row * HV), gl.load(p_beta + row * HV), pool_row, v


@gluon.jit
def _make_ready(k, q, g, beta, pool_row, v, at_entries, at_values, K: gl.constexpr):
    """Leaves it in shared memory, as the walk reads it."""
    ENTRIES: gl.constexpr = eight_entries()
    at_values.store(v)
    k = gl.permute(gl.reshape(k.to(gl.float32), [4, 8, 2, 2, K // 16]), (0, 2, 3, 4, 1))
    q = gl.permute(gl.reshape(q.to(gl.float32), [4, 8, 2, 2, K // 16]), (0, 2, 3, 4, 1))
    share = _added_up(q, k, 0.0, K // 16, 8, eight_sums(), True)
    q_k = gl.sum(gl.sum(gl.sum(share, 1), 1), 0)
    q_k = gl.convert_layout(q_k, gl.SliceLayout(1, ENTRIES), assert_trivial=True)
    named = gl.join(beta, pool_row.to(gl.float32, bitcast=True))
    entries = gl.reshape(gl.join(gl.join(gl.exp(g), q_k), named), [8, 4])
    at_entries.store(gl.convert_layout(entries, ENTRIES, assert_trivial=True))


@gluon.jit
def _sum(s, b_k, b_q, K: gl.constexpr, C: gl.constexpr, ACROSS: gl.constexpr):
    """S^T k and S^T q of each part of K, each in one lane of a quad: [4, 2, 2, C / 2] of `sums`."""
    Q_V: gl.constexpr = gl.SliceLayout(3, by_quad(K // 4, C, ACROSS))
    L: gl.constexpr = sums(C, ACROSS)
    x_k = _added_up(s, b_k, 0.0, K // 16, C, Q_V, True)  # [4, 2, 2, C], of a lane's keys
    x_q = _added_up(s, b_q, 0.0, K // 16, C, Q_V, True)
    of_q = along(2, Q_V, 4, 1) > 0
    x = gl.where(of_q, x_q, x_k) + _from_lane(gl.where(of_q, x_k, x_q), 2)
    even, odd = gl.split(gl.reshape(x, [4, 2, 2, C // 2, 2]))
    even, odd = gl.convert_layout(even, L, assert_trivial=True), gl.convert_layout(odd, L, assert_trivial=True)
    of_odd = along(2, L, 4, 2) > 0
    return gl.where(of_odd, odd, even) + _from_lane(gl.where(of_odd, even, odd), 1)


@gluon.jit
def _results(total, e_g, beta, q_k, v, L: gl.constexpr):
    """u and o of a row, one a lane of a quad, and u of even and of odd columns in all four: [1, 2, 2, C / 2]."""
    u = beta * gl.fma(-e_g, total, v)  # where the sum is S^T k
    even = _shuffle(u, "shfl.sync.idx.b32 $0, $1, 0, 0x1c1f, -1;")  # of the quad's first lane
    odd = _shuffle(u, "shfl.sync.idx.b32 $0, $1, 1, 0x1c1f, -1;")
    mine = gl.where(along(2, L, 4, 2) > 0, odd, even)
    o = gl.fma(mine, q_k, e_g * total)  # where it is S^T q
    return gl.where(along(2, L, 4, 1) > 0, o, u), even, odd


@gluon.jit
def _row(x, at_entry, at_v, K: gl.constexpr, C: gl.constexpr):
    """u or o of a row [1, 2, 2, C / 2], its pool row, and u [1, 2, 2, 1, C] and e^g as the state needs them."""
    Q: gl.constexpr = by_quad(K // 4, C, False)
    L: gl.constexpr = sums(C, False)
    total = gl.expand_dims(gl.sum(x, 0), 0)
    left, right = gl.split(gl.reshape(at_entry.load(known_to_all(4)), [2, 2]))
    alpha, q_k = gl.split(gl.reshape(left, [1, 2]))
    beta, pool_row = gl.split(gl.reshape(right, [1, 2]))
    v = gl.permute(at_v.load(values(C)).to(gl.float32), (1, 0))
    v = gl.convert_layout(v, gl.SliceLayout(0, gl.SliceLayout(0, L)), assert_trivial=True)
    v = gl.broadcast(gl.expand_dims(gl.expand_dims(v, 0), 0), total)[0]
    e_g = gl.broadcast(_to_all(alpha, L, 4), total)[0]
    b_beta = gl.broadcast(_to_all(beta, L, 4), total)[0]
    out, even, odd = _results(total, e_g, b_beta, gl.broadcast(_to_all(q_k, L, 4), total)[0], v, L)
    u = gl.reshape(gl.join(even, odd), [1, 2, 2, C])
    u = gl.expand_dims(gl.convert_layout(u, gl.SliceLayout(3, Q), assert_trivial=True), 3)
    return out, _to_all(pool_row.to(gl.int32, bitcast=True), L, 4), u, _to_all(alpha, Q, 5)


@gluon.jit
def result_places(C: gl.constexpr, ACROSS: gl.constexpr):
    """The columns of `sums`, [1, 2, 2, C / 2]."""
    L: gl.constexpr = sums(C, ACROSS)
    return along(2, L, 4, 1) * 0 + along(2, L, 4, 2) + along(C // 2, L, 4, 3) * 2


@gluon.jit
def _parts_added(x, N: gl.constexpr, M: gl.constexpr):
    """[N, N, M, 4] over its last index, as lanes add parts of K up."""
    even, odd = gl.split(gl.reshape(x, [N, N, M, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (first + third) + (second + fourth)


@gluon.jit
def only_operands(p_q, p_k, p_v, p_g, p_beta, p_pool_row, K: gl.constexpr, C: gl.constexpr):
    """What `only_row` needs of a row besides S; all pointers are at it."""
    v = gl.load(p_v + result_places(C, True)).to(gl.float32)
    k, q = load_key(p_k, K, C, True), load_key(p_q, K, C, True)
    return q, k, v, gl.load(p_g), gl.load(p_beta), gl.load(p_pool_row)


@gluon.jit
def only_row(
    s, q, k, v, g, beta, pool_row, p_o, p_pool_u, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr
):
    """u and o of a session's only row, S across warps; p_o is at it, p_pool_u at the pool's first."""
    L: gl.constexpr = sums(C, True)
    Q_V: gl.constexpr = gl.SliceLayout(3, by_quad(K // 4, C, True))
    ALL: gl.constexpr = gl.SliceLayout(0, L)
    at_share, at_sum = layouts.shared(gl.float32, [4]), layouts.shared(gl.float32, [2, 2, C // 2, 4])
    b_k, b_q = numbers(k, K, C, True), numbers(q, K, C, True)
    share = _added_up(b_q, b_k, 0.0, K // 16, 1, Q_V, True)
    at_share.store(gl.reshape(gl.sum(gl.sum(share, 1), 1), [4]))
    at_sum.store(gl.permute(_sum(s, b_k, b_q, K, C, True), (1, 2, 3, 0)))
    total = gl.convert_layout(_parts_added(at_sum.load(sums_of_all(C)), 2, C // 2), ALL, assert_trivial=True)
    total = gl.expand_dims(total, 0)
    q_k = _parts_added(gl.reshape(at_share.load(known_to_all(4)), [1, 1, 1, 4]), 1, 1)
    q_k = gl.broadcast(_to_all(gl.reshape(q_k, [1]), L, 4), total)[0]
    e_g, b_beta = gl.full([1, 2, 2, C // 2], gl.exp(g), gl.float32, L), gl.full([1, 2, 2, C // 2], beta, gl.float32, L)
    out, _, _ = _results(total, e_g, b_beta, q_k, v, L)
    of_o, o_v = along(2, L, 4, 1) > 0, result_places(C, True)
    gl.store(p_o + o_v, out.to(p_o.dtype.element_ty), mask=of_o)
    gl.store(p_pool_u + pool_row * (HV * V) + o_v, out, mask=of_o == 0)


@gluon.jit
def _store_if_last(s, before, n_groups, p_tile, p_arrived, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr):
    """Stores the tile if all other programs of n_groups arrived before this one, and sets their counter back."""
    if before == n_groups - 1:
        gl.store(p_tile + quad_places(K, C, False, V), s)
        gl.store(p_arrived, 0)


@gluon.jit
def walk(
    s,
    at_words,
    word,
    next_word,
    n_steps,
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_pool_row,
    p_o,
    p_pool_u,
    p_steps,
    p_far,
    eight,
    eight_more,
    p_tile,
    p_arrived,
    arrived,
    n_groups,
    STORES: gl.constexpr,
    PLACES: gl.constexpr,
    NEAR: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
):
    """u and o of the rows that n_steps steps name, from the state S of `by_quad` within warps on.

    Pointers are at the session's first row, p_pool_u at its pool, p_steps at its steps; at_words has the steps, too,
    and zeros behind, word and next_word are the first two. What the first rows need is on its way: `eight` and, for
    those after them, `eight_more`. Sixteen rows at a time are made ready.

    With STORES the tile is stored at p_tile if this program, of n_groups, was the last to arrive; see serial_split.py.
    """
    READY: gl.constexpr = 16
    L: gl.constexpr = sums(C, False)
    NUMBER: gl.constexpr = p_v.dtype.element_ty
    next_row = word & ROW_MASK
    k, q = load_key(p_k + next_row * (H * K), K, C, False), load_key(p_q + next_row * (H * K), K, C, False)
    at_table = layouts.shared_blocks(gl.float32, READY, [4])
    at_v = layouts.shared_blocks(NUMBER, READY, [C // 2, 2])
    some_table = at_table._reinterpret(gl.float32, [READY // 8, 8, 4], layouts.plain([8, 4]))
    some_v = at_v._reinterpret(NUMBER, [READY // 8, 8, C], layouts.plain([8, C]))
    of_o, o_v = along(2, L, 4, 1) > 0, result_places(C, False)
    if STORES:
        at_arrived = layouts.shared(gl.int32, [128])
    if PLACES > 0:
        at_near = layouts.shared_blocks(gl.float32, NEAR, [K * C // 512, 128, 4])
    _make_ready(*eight, some_table.index(0), some_v.index(0), K)
    if n_steps > 8:
        _make_ready(*eight_more, some_table.index(1), some_v.index(1), K)
    if STORES:
        at_arrived.store(arrived)
    barrier()  # here, and not in each turn of the loop
    if STORES:
        _store_if_last(s, gl.sum(at_arrived.slice(0, 1).load(known_to_all(1)), 0), n_groups, p_tile, p_arrived, K, V, C)
    for first in range(0, n_steps, READY):
        end = gl.minimum(first + READY, n_steps)
        for i in range(first, end):
            b_k, b_q = numbers(k, K, C, False), numbers(q, K, C, False)
            x = _sum(s, b_k, b_q, K, C, False)
            next_row = next_word & ROW_MASK
            k, q = load_key(p_k + next_row * (H * K), K, C, False), load_key(p_q + next_row * (H * K), K, C, False)
            word_after = gl.sum(at_words.index(i + 2).load(known_to_all(1)), 0)
            out, pool_row, u, alpha = _row(x, at_table.index(i - first), at_v.index(i - first), K, C)
            emit = ((word >> _EMIT_BIT) & 1) > 0
            gl.store(p_o + (word & ROW_MASK) * (HV * V) + o_v, out.to(p_o.dtype.element_ty), mask=of_o & emit)
            gl.store(p_pool_u + pool_row * (HV * V) + o_v, out, mask=(of_o == 0) & emit)
            if (word >> _LEAF_BIT) & 1 == 0:  # nothing goes on from a leaf's state
                s = outer_step(s, alpha, b_k, u)
            if PLACES > 0:
                keep = (word >> _KEEP_SHIFT) & _PLACE_MASK
                if keep > 0:
                    _keep(s, keep, at_near, p_far, NEAR, K, C)
                fetch = (next_word >> _FETCH_SHIFT) & _PLACE_MASK
                if fetch > 0:
                    s = _fetch(fetch, at_near, p_far, NEAR, K, C)
            word, next_word = next_word, word_after
        if end < n_steps:
            for part in gl.static_range(2):
                rows = eight_rows(p_steps, p_pool_row, end + 8 * part, n_steps, K, C)
                eight = ask_eight(*rows, p_q, p_k, p_v, p_g, p_beta, H, HV, K, V, C)
                _make_ready(*eight, some_table.index(part), some_v.index(part), K)
            barrier()
