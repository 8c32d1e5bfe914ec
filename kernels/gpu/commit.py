"""The deferred commit on a GPU: pending factors applied to a tile of the state, inside every verification kernel.

`apply_pending` is the only code in exact mode that turns accepted factors into state: one token after the other and
with the operations of a serial step (s <- alpha s, then s <- fma(k, u, s)), so a state has the bits of plain decoding
however it was reached. `flush` does it alone, for sessions that are about to sit out, to move or to be saved, in one of
two forms with the same bits: tiles, here, and on a GPU for most shapes a stream of them (flush_streamed.py). The
factorised kernel has a commit of its own (factorised.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.flush_streamed import flush_streamed, streams

AT_ONCE = 4
"""Pending factors whose loads are in flight together."""

LINE = tl.constexpr(32)
"""float32 of one cache line."""

_FLUSH_WARPS = 4
_FLUSH_ROWS = 8  # of S a thread, at most
_FLUSH_COLUMNS = 256  # of S a program, at most
_FLUSH_ASKED = 16  # pending factors whose lines are asked for at once, at most


@triton.jit
def key_order(BK: tl.constexpr, LANES: tl.constexpr):
    """The K index of each row of a tile, [BK]: thread l of LANES that share a column owns BK / LANES rows side by side.

    Tiles are dealt to threads row by row; in this order a thread's rows of S meet 16 bytes of k at a time.
    """
    o = tl.arange(0, BK)
    return o % LANES * (BK // LANES) + o // LANES


@triton.jit
def load_key(p, K: tl.constexpr, BK: tl.constexpr, LANES: tl.constexpr, used=True):
    """One head's k or q in `key_order`, [BK] in its own dtype; 0 past K or where not `used`."""
    o = tl.arange(0, BK // LANES)[:, None] + tl.arange(0, LANES)[None, :] * (BK // LANES)
    return tl.reshape(tl.load(p + o, mask=(o < K) & used, other=0.0).to(tl.float32), [BK])


@triton.jit
def outer_step(s, alpha, k, u):
    """The tile s [BK, BV] after one token, k [BK] and u [BV]."""
    return spread_step(s, alpha, k[:, None], u[None, :])


@triton.jit
def spread_step(s, alpha, k, u):
    """fma(k, u, alpha s), in verification and commit alike; k and u are repeated to the shape of s."""
    return tl.fma(tl.broadcast_to(k, s.shape), tl.broadcast_to(u, s.shape), s * alpha)


@triton.jit
def prefetch(p):
    """Asks for the cache lines at the pointers p."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_pending(
    p_pending,
    n_pending,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    i_v,
    i_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PENDING: tl.constexpr,
):
    """Has the first pending factors on their way together with the state: they lie scattered, and are cold."""
    o_p = tl.arange(0, PENDING)
    row = tl.load(p_pending + o_p, mask=o_p < n_pending, other=0).to(tl.int64)
    o_line = tl.arange(0, BK // 64) * 64
    prefetch(p_pool_k + (row * H + i_h // (HV // H))[:, None] * K + tl.minimum(o_line, K - 1)[None, :])
    prefetch(p_pool_u + (row * HV + i_h) * V + i_v * BV)
    prefetch(p_pool_g + row * HV + i_h)


@triton.jit
def apply_pending(
    s,
    p_pending,
    n_pending,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    o_v,
    i_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The tile s [BK, BV] of value head i_h, rows in `key_order`, after n_pending factors.

    p_pool_* point at the session's pool. Several factors are loaded at once; places past the last one read as
    k = u = g = 0, which changes nothing.
    """
    m_v = o_v < V
    for first in range(0, n_pending, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            used = first + i < n_pending
            row = tl.load(p_pending + first + i, mask=used, other=0).to(tl.int64)
            k = load_key(p_pool_k + (row * H + i_h // (HV // H)) * K, K, BK, LANES, used).to(tl.float32)
            u = tl.load(p_pool_u + (row * HV + i_h) * V + o_v, mask=m_v & used, other=0.0)
            g = tl.load(p_pool_g + row * HV + i_h, mask=used, other=0.0)
            s = outer_step(s, tl.exp(g), k, u)
    return s


@triton.jit
def _factor(
    p_pending,
    i,
    n_pending,
    p_k,
    p_u,
    p_g,
    o_k,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Pending factor i of one head as (g, k, u), in the shapes of o_k and o_v; past the last one nothing is read."""
    used = i < n_pending
    row = tl.load(p_pending + i, mask=used, other=0)
    k = tl.load(p_k + row * (H * K) + o_k, mask=(o_k < K) & used, other=0.0)
    u = tl.load(p_u + row * (HV * V) + o_v, mask=(o_v < V) & used, other=0.0)
    return tl.load(p_g + row * HV, mask=used, other=0.0), k, u


@triton.jit(do_not_specialize=["sessions", "slots"])
def flush_kernel(
    p_state,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    p_slot,
    p_pending,
    p_pending_len,
    sessions,
    slots,
    POOL: tl.constexpr,
    PENDING: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ASKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles of K and V, HV, layers * sessions). A program's tile is [LANES, BK, BV], each lane BK rows of K.

    A thread then has whole quarters of rows: 16 bytes of S and of u at a time, and its rows' k from one line. The lines
    of all factors are asked for together with S; each factor is read while the one before it is applied.
    """
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    i_k, i_v = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    i_h, i_b = tl.program_id(1), tl.program_id(2) % sessions
    slot = tl.load(p_slot + i_b).to(tl.int64)
    n_pending = tl.load(p_pending_len + i_b)
    p_pending += i_b * PENDING
    o_p = tl.arange(0, ASKED)
    asked = tl.load(p_pending + tl.minimum(o_p, PENDING - 1))
    asked_first = tl.load(p_pending)
    if (slot < 0) | (n_pending == 0):
        return
    slot += (tl.program_id(2) // sessions).to(tl.int64) * slots
    p_k = p_pool_k + (slot * POOL * H + i_h // (HV // H)) * K
    p_u = p_pool_u + (slot * POOL * HV + i_h) * V
    p_g = p_pool_g + slot * POOL * HV + i_h
    if not INTERPRETED:
        row = tl.where(o_p < n_pending, asked, asked_first)
        o_line = tl.minimum(i_v * BV + tl.arange(0, BV // LINE) * LINE, V - 1)
        prefetch(p_u + row[:, None] * (HV * V) + o_line[None, :])
        prefetch(p_k + row * (H * K) + i_k * (LANES * BK))
        prefetch(p_g + row * HV)
    o_lane = tl.arange(0, LANES)[:, None, None]
    o_k = i_k * (LANES * BK) + o_lane * BK + tl.arange(0, BK)[None, :, None]  # [LANES, BK, 1]
    o_v = i_v * BV + tl.arange(0, BV)[None, None, :]
    mask = (o_k < K) & (o_v < V)
    p_tile = p_state + (slot * HV + i_h) * K * V + o_k * V + o_v
    s = tl.load(p_tile, mask=mask, other=0.0)  # [LANES, BK, BV]
    o_u = o_v + 0 * o_lane  # [LANES, 1, BV]: laid out over threads as S is
    g, k, u = _factor(p_pending, 0, n_pending, p_k, p_u, p_g, o_k, o_u, H, HV, K, V)
    for i in range(n_pending):
        g_next, k_next, u_next = _factor(p_pending, i + 1, n_pending, p_k, p_u, p_g, o_k, o_u, H, HV, K, V)
        s = spread_step(s, tl.exp(g), k.to(tl.float32), u)
        g, k, u = g_next, k_next, u_next
    tl.store(p_tile, s, mask=mask)


def flush(state: Tensor, pool: FactorPool, slot: Tensor, pending: Tensor, pending_len: Tensor) -> None:
    """Applies pending factors to the stored states, for one layer or for all layers in one launch.

    Args:
        state: float32 [slots, HV, K, V], or [L, slots, HV, K, V]; the named slots are written in place.
        pool: of the same slots; with the same leading L.
        slot: int32 [B], all different; below 0 for places without a session.
        pending: int32 [B, P], pool rows, oldest first; the same for all layers.
        pending_len: int32 [B], how many of them count; 0 leaves the state untouched.

    Raises:
        ValueError: shapes, types or devices do not belong together.
    """
    check_state(state, pool)
    sessions = slot.shape[0]
    named = (slot, pending, pending_len)
    fits = slot.shape == pending_len.shape == (sessions,) and pending.dim() == 2 and pending.shape[0] == sessions
    if not fits or any(x.dtype != torch.int32 for x in named):
        raise ValueError(
            f"slot {list(slot.shape)}, pending {list(pending.shape)}, pending_len {list(pending_len.shape)}: "
            "give int32 [B], [B, P] and [B]"
        )
    check_places(*named, state=state, aligned=False)
    if not pending.shape[1]:
        return
    streamed = state.is_cuda and not triton.knobs.runtime.interpret and streams(*state.shape[-2:])
    (flush_streamed if streamed else flush_tiles)(state, pool, slot, pending, pending_len)


def flush_tiles(state: Tensor, pool: FactorPool, slot: Tensor, pending: Tensor, pending_len: Tensor) -> None:
    """`flush`, which has checked the arguments, for any shape; P is not 0."""
    *_, slots, value_heads, key_width, value_width = state.shape
    layers = state.shape[0] if state.dim() == 5 else 1
    sessions, most = pending.shape
    block_v = min(max(LINE.value, triton.next_power_of_2(value_width)), _FLUSH_COLUMNS)
    lanes = _FLUSH_WARPS * 32 * 4 // block_v  # a row takes a thread for every four columns
    block_k = min(_FLUSH_ROWS, triton.next_power_of_2(triton.cdiv(key_width, lanes)))
    tiles = triton.cdiv(key_width, lanes * block_k) * triton.cdiv(value_width, block_v)
    flush_kernel[(tiles, value_heads, layers * sessions)](
        state,
        pool.k,
        pool.u,
        pool.g,
        slot,
        pending,
        pending_len,
        sessions,
        slots,
        POOL=pool.k.shape[-3],
        PENDING=most,
        H=pool.k.shape[-2],
        HV=value_heads,
        K=key_width,
        V=value_width,
        LANES=lanes,
        BK=block_k,
        BV=block_v,
        ASKED=min(_FLUSH_ASKED, triton.next_power_of_2(most)),
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=_FLUSH_WARPS,
    )


def check_state(state: Tensor, pool: FactorPool) -> None:
    """Raises ValueError unless state and pool belong together and lie as the kernels read them."""
    lead = tuple(state.shape[:-3])
    value_heads, key_width, value_width = state.shape[-3:]
    rows, heads = pool.k.shape[-3:-1]
    fits = (
        state.dtype == pool.u.dtype == pool.g.dtype == torch.float32
        and pool.k.shape == (*lead, rows, heads, key_width)
        and pool.u.shape == (*lead, rows, value_heads, value_width)
        and pool.g.shape == (*lead, rows, value_heads)
        and value_heads % heads == 0
    )
    if not fits:
        raise ValueError(
            f"state {state.dtype} {list(state.shape)}, pool k {list(pool.k.shape)}, u {pool.u.dtype} "
            f"{list(pool.u.shape)}, g {list(pool.g.shape)}: want state [slots, HV, K, V], k [slots, F, H, K], "
            "u [slots, F, HV, V] and g [slots, F, HV], all but k in float32, HV a multiple of H"
        )
    check_places(state, pool.k, pool.u, state=state)
    check_places(pool.g, state=state, aligned=False)


def check_places(*tensors: Tensor, state: Tensor, aligned: bool = True) -> None:
    """Raises ValueError unless the tensors lie as the kernels read them.

    Args:
        tensors: to be contiguous and on the state's device.
        state: whose device counts.
        aligned: whether they must begin at a multiple of 16 bytes: other beginnings would compile to another form,
            whose sums may have another order.
    """
    if not all(x.is_contiguous() and x.device == state.device for x in tensors):
        raise ValueError("state, pool, rows, outputs, batch and workspace must be contiguous and on one device")
    if aligned and any(x.data_ptr() % 16 for x in tensors):
        raise ValueError("state, pool, q, k, v, outputs and workspace must begin at a multiple of 16 bytes")
