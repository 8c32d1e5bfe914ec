"""x W^T with the weights streaming through shared memory, for 16-bit weights of wide shapes; in Gluon.

A program takes tiles of BN outputs, one after the other, and sweeps over K in blocks that are asked for several ahead
(cp.async into a ring of shared memory, which goes on from tile to tile), so that memory works whatever the products
do. Weights are the left operand of m16n8k16: 16 outputs by 8 rows of x, so a tile of 8, 16, 32 or 64 rows is 1, 2, 4 or
8 independent chains of products, each in the same order over K. Rows of x come straight from the caches into the
registers of every warp, or, if they are many, through a ring of their own.

Both operands lie 16 bytes a lane: 32 consecutive k are dealt out to the 4 lanes of a row, eight each, and called by
other names inside two products, the same on both sides. Outputs 2 g and 2 g + 1 of 16 are rows g and g + 8 of a
product, so that a lane ends up with two neighbours: 8 bytes a store, or a gate and what it gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import powers

BLOCK = 64
"""K, and each of its parts, must be a multiple of it."""
_FEWEST_OUTPUTS = 64
_MULTIPROCESSORS = 132
_RING = 100 * 1024  # bytes in flight a multiprocessor: twice what hides the latency; two launches fit beside each other
_DEEP_RING = 132 * 1024  # where a multiprocessor has one program of few rows


class ProductTile(NamedTuple):
    """How the work is cut. No part of it changes the order of sums."""

    outputs: int
    """BN, 16 or 32 a warp."""
    block_k: int
    """64 or 128, or 256 with few rows."""
    stages: int
    """Blocks of the ring, 3 or more."""
    rows: int
    """8, 16, 32 or 64."""
    warps: int
    """A power of two."""
    programs: int = 0
    """The grid; 0: one program a tile."""
    prefetch: int = 0
    """Bytes a row of weights, behind the ring's, that a program has fetched into L2 before it waits."""
    ask_ahead: bool = False
    """Whether the lines of the next block of x are asked for a step ahead, into L1."""
    shared_x: bool = False
    """Whether x streams through shared memory as the weights do, for many rows."""


def streams(outputs: int, inputs: int, parts: int, dtype: torch.dtype) -> bool:
    """Whether weights of this shape take this form."""
    fits = inputs % (parts * BLOCK) == 0 and outputs >= _FEWEST_OUTPUTS and outputs % 2 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def streamed_tile(outputs: int, inputs: int, parts: int, rows: int) -> ProductTile:
    """A tile for a shape and R row places: what was fastest on an H200, as a rule."""
    height = min(64, max(8, triton.next_power_of_2(rows)))
    wide = next((x for x in (64, 32) if triton.cdiv(outputs, x) * parts >= 120), 16)
    together = min(4, triton.cdiv(triton.cdiv(outputs, wide) * parts, _MULTIPROCESSORS))  # programs on one of them
    if together > 1 and height == 32:
        wide = min(wide, 32)
    width = inputs // parts
    block_k = 128 if width % 128 == 0 else 64
    alone = together == 1 and height <= 16  # a deep ring then pays
    if alone and width % 256 == 0 and width >= 1024:
        block_k = 256
    shared_x = height > 16 or (alone and (height == 16 or block_k == 128)) or (height == 16 and together == 2)
    block = (wide + (height if shared_x else 0)) * block_k * 2
    if height > 16 and (height == 64 or together > 1):
        ring = 3 * block
    elif alone:
        ring = _DEEP_RING
    else:
        ring = _RING // (1 if shared_x else together)
    return ProductTile(
        wide, block_k, min(16, max(3, ring // block), width // block_k + 1), height, wide // 16, shared_x=shared_x
    )


@constexpr_function
def left(warps: int, outputs: int, width: int) -> Any:
    """Weights [BN, BK] in a thread's registers."""
    regs = [[0, 1], [0, 2], [0, 4], [1, 0]] + [[0, x] for x in powers(32, width)]
    regs += [[x, 0] for x in powers(16 * warps, outputs)]
    lanes = [[0, 8], [0, 16], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16 * x, 0] for x in powers(1, warps)], [], [outputs, width])


@constexpr_function
def right(warps: int, rows: int, width: int) -> Any:
    """x [RT, BK], in every warp alike."""
    regs = [[0, 1], [0, 2], [0, 4]] + [[0, x] for x in powers(32, width)] + [[x, 0] for x in powers(8, rows)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 0] for _ in powers(1, warps)], [], [rows, width])


@constexpr_function
def result(warps: int, outputs: int, rows: int, gated: bool) -> Any:
    """Outputs [BN, RT], two neighbours a thread; or channels [BN / 2, RT] of what is gated, each in one."""
    each = 2 if gated else 1
    regs = [[x, 0] for x in powers(1, 3 - each)] + [[0, 1]] + [[0, x] for x in powers(8, rows)]
    regs += [[x // each, 0] for x in powers(16 * warps, outputs)]
    lanes = [[0, 2], [0, 4]] + [[x // each, 0] for x in (2, 4, 8)]
    across = [[16 * x // each, 0] for x in powers(1, warps)]
    return gl.DistributedLinearLayout(regs, lanes, across, [], [outputs // each, rows])


@gluon.jit
def _as_left(w, BN: gl.constexpr, BK: gl.constexpr, P: gl.constexpr):
    """Weights [BN, BK] as the left operand: outputs and k by their names inside products."""
    w = gl.reshape(w, [BN // 16, 8, 2, BK // 32, 4, 2, 2, 2])  # .., g, h, .., lane, product, half, pair
    w = gl.reshape(gl.permute(w, (0, 2, 1, 3, 5, 6, 4, 7)), [BN, BK])
    return gl.convert_layout(w, gl.DotOperandLayout(0, P, 2), assert_trivial=True)


@gluon.jit
def _as_right(x, RT: gl.constexpr, BK: gl.constexpr, P: gl.constexpr):
    """x [RT, BK] as the right operand, with the same names for k."""
    x = gl.permute(gl.reshape(x, [RT, BK // 32, 4, 2, 2, 2]), (1, 3, 4, 2, 5, 0))
    return gl.convert_layout(gl.reshape(x, [BK, RT]), gl.DotOperandLayout(1, P, 2), assert_trivial=True)


@gluon.jit
def _by_output(acc, BN: gl.constexpr, RT: gl.constexpr):
    """A product's result [BN, RT] as [BN / 2, 2, RT], outputs in their own order."""
    acc = gl.permute(gl.reshape(acc, [BN // 16, 2, 8, RT]), (0, 2, 1, 3))
    return gl.reshape(acc, [BN // 2, 2, RT])


@gluon.jit
def _prefetch(p, K: gl.constexpr, BN: gl.constexpr, BYTES: gl.constexpr, WARPS: gl.constexpr):
    """Has BYTES of each of BN rows at p fetched into L2, a share by each thread."""
    EACH: gl.constexpr = 32 * WARPS // BN
    SHARE: gl.constexpr = BYTES // EACH
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    p += thread // EACH * K + thread % EACH * (SHARE // 2)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [p.to(gl.int64), gl.full_like(thread, SHARE)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _first_output(tile, N: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr):
    """Where a tile begins; the last one is moved back to end with the outputs, and stores what is its own alone."""
    if N % BN == 0:
        return tile // PARTS * BN
    else:
        return gl.minimum(tile // PARTS * BN, N - BN)


@gluon.jit
def _copy_block(
    at, p_weight, step, o_copy,
    N: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Has the block of weights of this program's `step` on its way to shared memory."""
    STEPS: gl.constexpr = KP // BK
    tile = gl.program_id(1) + step // STEPS * gl.num_programs(1)
    p = p_weight + _first_output(tile, N, BN, PARTS).to(gl.int64) * K + (tile % PARTS * KP + step % STEPS * BK)
    async_copy.async_copy_global_to_shared(at, p + o_copy)


@gluon.jit
def _first_key(step, KP: gl.constexpr, BK: gl.constexpr, PARTS: gl.constexpr):
    """Where in K the block of this program's `step` begins."""
    STEPS: gl.constexpr = KP // BK
    if PARTS == 1:
        return step % STEPS * BK
    else:
        return (gl.program_id(1) + step // STEPS * gl.num_programs(1)) % PARTS * KP + step % STEPS * BK


@gluon.jit
def _rows_at(
    p_x, first_row, n,
    K: gl.constexpr, RT: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr, EACH: gl.constexpr = 1,
):  # fmt: skip
    """Pointers [RT, COUNT] at every EACH numbers of the rows that a tile begins; past the last row that one again."""
    row = gl.minimum(first_row + gl.arange(0, RT, layout=gl.SliceLayout(1, LAYOUT)), n - 1)
    o_key = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT)) * EACH
    return p_x + (gl.expand_dims(row, 1) * K + gl.expand_dims(o_key, 0))


@gluon.jit
def _store(
    acc, p_out, step, first_row, n, R,
    N: gl.constexpr, KP: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, PARTS: gl.constexpr, RT: gl.constexpr,
    WARPS: gl.constexpr, SWIGLU: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Stores the tile that ends with `step`."""
    tile = gl.program_id(1) + step // (KP // BK) * gl.num_programs(1)
    by_output = _by_output(acc, BN, RT)
    EACH: gl.constexpr = 2 if SWIGLU else 1
    OUT: gl.constexpr = result(WARPS, BN, RT, SWIGLU)
    if SWIGLU:
        gate, up = gl.split(gl.permute(by_output, (0, 2, 1)))
        y = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, OUT, assert_trivial=True)
    else:
        y = gl.convert_layout(gl.reshape(by_output, [BN, RT]), OUT, assert_trivial=True)
    COUNT: gl.constexpr = N // EACH
    first = _first_output(tile, N, BN, PARTS) // EACH
    i_output = first + gl.arange(0, BN // EACH, layout=gl.SliceLayout(1, OUT))
    row = first_row + gl.arange(0, RT, layout=gl.SliceLayout(0, OUT))
    mask = gl.expand_dims(row < n, 0)
    if N % BN != 0:
        mask = mask & gl.expand_dims(i_output >= tile // PARTS * (BN // EACH), 1)
    p_out += (tile % PARTS).to(gl.int64) * R * COUNT
    at = p_out + gl.expand_dims(row.to(gl.int64) * COUNT, 0) + gl.expand_dims(i_output, 1)
    if ADD:
        y += gl.load(at, mask=mask, other=0.0)
    gl.store(at, y.to(p_out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["R"])
def product_streamed_kernel(
    p_x,
    p_weight,
    p_out,
    p_rows,
    R,
    N: gl.constexpr,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    RT: gl.constexpr,
    WARPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    ASK_AHEAD: gl.constexpr,
    SHARED_X: gl.constexpr,
    SWIGLU: gl.constexpr,
    ADD: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (tiles of rows, programs). Program i has tiles i, i + programs, ..; parts of one tile of outputs in turn."""
    KP: gl.constexpr = K // PARTS
    STEPS: gl.constexpr = KP // BK
    TILES: gl.constexpr = (N + BN - 1) // BN * PARTS
    P: gl.constexpr = layouts.column_products(WARPS)
    LEFT: gl.constexpr = left(WARPS, BN, BK)
    RIGHT: gl.constexpr = right(WARPS, RT, BK)
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [2048 // BK, BK // 64], [WARPS, 1], [1, 0])  # of 64 numbers
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    n = gl.load(p_rows)
    first_row = gl.program_id(0) * RT
    total = (TILES - gl.program_id(1) + gl.num_programs(1) - 1) // gl.num_programs(1) * STEPS
    # Pairs of outputs by turns in the two halves of 128 bytes: eight lanes then read 16 bytes each from all banks.
    at_w = gl.allocate_shared_memory(
        p_weight.dtype.element_ty, [STAGES, BN, BK], gl.SwizzledSharedLayout(32, 2, 2, order=[1, 0])
    )
    i_copy = gl.expand_dims(gl.arange(0, BN, layout=gl.SliceLayout(1, COPY)), 1)
    o_copy = i_copy * K + gl.expand_dims(gl.arange(0, BK, layout=gl.SliceLayout(0, COPY)), 0)
    for i in gl.static_range(STAGES - 1):
        if i < total:
            _copy_block(at_w.index(i), p_weight, i, o_copy, N, K, KP, BN, BK, PARTS)
        async_copy.commit_group()
    if PREFETCH > 0:
        first = _first_output(gl.program_id(1), N, BN, PARTS).to(gl.int64) * K + _first_key(STAGES - 1, KP, BK, PARTS)
        _prefetch(p_weight + first, K, BN, PREFETCH, WARPS)
    if OVERLAP:
        gdc_wait()
    if first_row >= n:  # no branch around the copies: it would have them wait for the number of rows
        async_copy.wait_group(0)
        return
    p_row = _rows_at(p_x, first_row, n, K, RT, BK, COPY if SHARED_X else RIGHT)
    p_line = _rows_at(p_x, first_row, n, K, RT, BK // 64, LINES, 64)
    if SHARED_X:
        at_x = gl.allocate_shared_memory(
            p_x.dtype.element_ty, [STAGES, RT, BK], gl.SwizzledSharedLayout(32, 1, 2, order=[1, 0])
        )
        for i in gl.static_range(STAGES - 1):
            if i < total:
                async_copy.async_copy_global_to_shared(at_x.index(i), p_row + _first_key(i, KP, BK, PARTS))
            async_copy.commit_group()
    first_key = _first_key(0, KP, BK, PARTS)
    acc = gl.zeros([BN, RT], gl.float32, P)
    for step in range(total):
        if not SHARED_X:  # carried from step to step, 16-bit numbers would be unpacked, and waited for, at once
            x = gl.load(p_row + first_key)
        first_key = _first_key(step + 1, KP, BK, PARTS)
        async_copy.wait_group(STAGES - 2)
        ahead = step + STAGES - 1
        if ahead < total:
            _copy_block(at_w.index(ahead % STAGES), p_weight, ahead, o_copy, N, K, KP, BN, BK, PARTS)
            if SHARED_X:
                p = p_row + _first_key(ahead, KP, BK, PARTS)
                async_copy.async_copy_global_to_shared(at_x.index(ahead % STAGES), p)
        async_copy.commit_group()
        if ASK_AHEAD:
            layouts.prefetch(p_line + first_key)
        if OVERLAP and step == gl.maximum(total - STAGES, 0):  # all weights are asked for
            gdc_launch_dependents()
        w = at_w.index(step % STAGES).load(LEFT)
        if SHARED_X:
            x = at_x.index(step % STAGES).load(RIGHT)
        acc = mma_v2(_as_left(w, BN, BK, P), _as_right(x, RT, BK, P), acc)
        if step % STEPS == STEPS - 1:
            _store(acc, p_out, step, first_row, n, R, N, KP, BN, BK, PARTS, RT, WARPS, SWIGLU, ADD)
            acc = gl.zeros([BN, RT], gl.float32, P)


def launch_streamed(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    rows: Tensor,
    parts: int,
    tile: ProductTile,
    *,
    swiglu: bool,
    add: bool,
    overlap: bool,
) -> None:
    """`product.product` by this kernel; the arguments are checked there, the tile here.

    Raises:
        ValueError: the tile does not fit the shape.
    """
    (count, inputs), outputs = x.shape, weight.shape[0]
    whole = inputs % (parts * tile.block_k) == 0 and tile.outputs in (16 * tile.warps, 32 * tile.warps)
    behind = inputs // parts - (tile.stages - 1) * tile.block_k  # numbers of a row that the ring leaves
    if (
        not whole
        or tile.outputs > outputs
        or tile.stages < 2
        or tile.prefetch % 64
        or tile.prefetch > max(0, 2 * behind)
    ):
        raise ValueError(f"{tile} does not fit a weight {list(weight.shape)} in {parts} parts")
    tiles = triton.cdiv(outputs, tile.outputs) * parts
    programs = min(tiles, tile.programs) if tile.programs else tiles
    product_streamed_kernel[(triton.cdiv(count, tile.rows), programs)](
        x,
        weight,
        out,
        rows,
        count,
        N=outputs,
        K=inputs,
        PARTS=parts,
        BN=tile.outputs,
        BK=tile.block_k,
        STAGES=tile.stages,
        RT=tile.rows,
        WARPS=tile.warps,
        PREFETCH=tile.prefetch,
        ASK_AHEAD=tile.ask_ahead,
        SHARED_X=tile.shared_x,
        SWIGLU=swiglu,
        ADD=add,
        OVERLAP=overlap,
        num_warps=tile.warps,
        launch_pdl=overlap,
    )
