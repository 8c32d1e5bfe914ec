"""The flush as a stream: `commit.flush` where the shape allows it, on a CUDA device.

Programs with one tile each all load, then compute, then store, in step, so that the arithmetic adds to the time of the
bytes. Here a program of two warps walks down a run of small tiles, the next ones on their way to shared memory
(cp.async): some programs compute while others load and store.

A tile is [ROWS, BV], 4 rows and 4 columns of it a thread, copied and read by the same one. The first HELD pending
factors are read once a program: u and alpha of its columns into registers, k of all its rows into shared memory, as
float32, so that an element costs one multiplication and one fma a factor. Further ones are read tile by tile.

The arithmetic is that of `commit.spread_step`, factor by factor: the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu.factor_pool import FactorPool

_WARPS = 2
_TILES = 8  # of a run, at most
_STAGES = 4  # tiles in flight
_HELD = 8  # pending factors that are read once a program
_GROUP = 4  # of them whose k is read together; divides _HELD


@constexpr_function
def _tile(warps: int, columns: int) -> Any:
    """S [ROWS, columns]: 4 x 4 a thread, so that a warp's loads and stores are whole lines."""
    across = min(32, columns // 4)
    wide = min(warps, columns // (4 * across))
    return gl.BlockedLayout([4, 4], [32 // across, across], [warps // wide, wide], [1, 0])


@constexpr_function
def _keys(warps: int, rows: int) -> Any:
    """k [tiles * HELD, ROWS] on its way to shared memory: 4 rows a thread."""
    return gl.BlockedLayout([1, 4], [32 // (rows // 4), rows // 4], [warps, 1], [1, 0])


@gluon.jit
def _step(s, alpha, k, u):
    """fma(k, u, alpha s) for a tile s [ROWS, BV], k [ROWS] and u [BV]."""
    k, u = gl.expand_dims(k, 1), gl.expand_dims(u, 0)
    return gl.fma(gl.broadcast(k, s)[0], gl.broadcast(u, s)[0], s * alpha)


@gluon.jit(do_not_specialize=["sessions", "slots"])
def flush_streamed_kernel(
    p_state,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    p_slot,
    p_pending,
    p_pending_len,
    sessions,
    slots,
    POOL: gl.constexpr,
    PENDING: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
    BV: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    HELD: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Grid (runs of K x tiles of V, HV, layers * sessions): a program has TILES tiles [ROWS, BV] below one another."""
    TILE: gl.constexpr = _tile(WARPS, BV)
    DOWN: gl.constexpr = gl.SliceLayout(1, TILE)
    ACROSS: gl.constexpr = gl.SliceLayout(0, TILE)
    KEYS: gl.constexpr = _keys(WARPS, ROWS)
    COLUMNS: gl.constexpr = V // BV
    i_run, i_v = gl.program_id(0) // COLUMNS, gl.program_id(0) % COLUMNS
    i_h, i_b = gl.program_id(1), gl.program_id(2) % sessions
    slot = gl.load(p_slot + i_b).to(gl.int64)
    n_pending = gl.load(p_pending_len + i_b)
    p_pending += i_b * PENDING
    held = ()
    for i in gl.static_range(HELD):
        held += (gl.load(p_pending + min(i, PENDING - 1)),)  # type: ignore[assignment]
    o_key = gl.arange(0, TILES * HELD, layout=gl.SliceLayout(1, KEYS))  # tile * HELD + factor
    key_row = gl.load(p_pending + gl.minimum(o_key % HELD, PENDING - 1))
    if (slot < 0) | (n_pending == 0):
        return
    slot += (gl.program_id(2) // sessions).to(gl.int64) * slots
    p_tile = p_state + (slot * HV + i_h) * K * V + i_run * (TILES * ROWS * V) + i_v * BV
    p_k = p_pool_k + (slot * POOL * H + i_h // (HV // H)) * K + i_run * (TILES * ROWS)
    p_u = p_pool_u + (slot * POOL * HV + i_h) * V + i_v * BV
    p_g = p_pool_g + slot * POOL * HV + i_h

    o_k = gl.arange(0, ROWS, layout=DOWN)
    o_v = gl.arange(0, BV, layout=ACROSS)
    o_tile = gl.expand_dims(o_k, 1) * V + gl.expand_dims(o_v, 0)
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, BV], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for t in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(ring.index(t), p_tile + o_tile + t * (ROWS * V))
        async_copy.commit_group()

    # keys is one vector a factor and tile to its readers, and a matrix to the one store that fills it.
    keys = gl.allocate_shared_memory(gl.float32, [TILES * HELD, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    all_keys = keys._reinterpret(gl.float32, [TILES * HELD, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    o_row = gl.expand_dims(o_key // HELD * ROWS, 1) + gl.expand_dims(
        gl.arange(0, ROWS, layout=gl.SliceLayout(0, KEYS)), 0
    )
    used = gl.expand_dims(o_key % HELD < n_pending, 1)
    k_held = gl.load(p_k + gl.expand_dims(key_row, 1) * (H * K) + o_row, mask=used, other=0.0)
    us, gs, alphas = (), (), ()
    for i in gl.static_range(HELD):
        u = gl.load(p_u + held[i] * (HV * V) + o_v, mask=o_v * 0 + i < n_pending, other=0.0)
        us += (u,)  # type: ignore[assignment]
        gs += (gl.load(p_g + held[i] * HV, mask=i < n_pending, other=0.0),)  # type: ignore[assignment]
    for i in gl.static_range(HELD):
        alphas += (gl.exp(gs[i]),)  # type: ignore[assignment]
    all_keys.store(k_held.to(gl.float32))

    for t in range(TILES):
        async_copy.wait_group(STAGES - 1)
        s = ring.index(t % STAGES).load(TILE)
        if t + STAGES < TILES:
            async_copy.async_copy_global_to_shared(ring.index(t % STAGES), p_tile + o_tile + (t + STAGES) * (ROWS * V))
        async_copy.commit_group()  # an empty one at the end: groups are counted
        for first in gl.static_range(0, HELD, GROUP):
            if first + GROUP <= n_pending:
                ks = ()
                for i in gl.static_range(GROUP):
                    ks += (keys.index(t * HELD + first + i).load(DOWN),)  # type: ignore[assignment]
                for i in gl.static_range(GROUP):
                    s = _step(s, alphas[first + i], ks[i], us[first + i])
            else:
                for i in gl.static_range(GROUP - 1):
                    if first + i < n_pending:
                        s = _step(s, alphas[first + i], keys.index(t * HELD + first + i).load(DOWN), us[first + i])
        for i_p in range(HELD, n_pending):
            row = gl.load(p_pending + i_p)
            k = gl.load(p_k + row * (H * K) + t * ROWS + o_k).to(gl.float32)
            u = gl.load(p_u + row * (HV * V) + o_v)
            s = _step(s, gl.exp(gl.load(p_g + row * HV)), k, u)
        gl.store(p_tile + o_tile + t * (ROWS * V), s)


def _columns(value_width: int) -> int:
    """Of S a program."""
    return next(x for x in (256, 128, 64) if value_width % x == 0)


def _run(key_width: int, columns: int) -> int:
    """Rows of S a program."""
    return min(key_width, _TILES * _rows(columns))


def _rows(columns: int) -> int:
    """Of a tile: 16 numbers a thread."""
    return _WARPS * 32 * 16 // columns


def streams(key_width: int, value_width: int) -> bool:
    """Whether a state [K, V] is cut into whole runs: both multiples of 64, and K of a run unless K is 64."""
    if key_width % 64 or value_width % 64:
        return False
    return key_width % _run(key_width, _columns(value_width)) == 0


def flush_streamed(state: Tensor, pool: FactorPool, slot: Tensor, pending: Tensor, pending_len: Tensor) -> None:
    """`commit.flush`, which has checked the arguments, for a shape that `streams`; P is not 0."""
    *_, slots, value_heads, key_width, value_width = state.shape
    layers = state.shape[0] if state.dim() == 5 else 1
    columns = _columns(value_width)
    rows, run = _rows(columns), _run(key_width, columns)
    flush_streamed_kernel[(key_width // run * (value_width // columns), value_heads, layers * slot.shape[0])](
        state,
        pool.k,
        pool.u,
        pool.g,
        slot,
        pending,
        pending_len,
        slot.shape[0],
        slots,
        POOL=pool.k.shape[-3],
        PENDING=pending.shape[1],
        H=pool.k.shape[-2],
        HV=value_heads,
        K=key_width,
        V=value_width,
        ROWS=rows,
        BV=columns,
        TILES=run // rows,
        STAGES=_STAGES,
        HELD=_HELD,
        GROUP=_GROUP,
        WARPS=_WARPS,
        num_warps=_WARPS,
    )
