"""x W^T for many rows: tiles of 128 or 192 outputs by 128 rows, by warps that each do one thing; in Gluon, for Hopper.

With many rows a product waits for tensor cores, and how evenly tiles share out over the multiprocessors counts most:
88 tiles of 128 x 256 keep two thirds of 132 busy, 118 of 192 x 128 nine tenths. Groups of four warps have 64 outputs
each and share the rows of x; another warp asks for blocks of both, and goes on with the next tile while the groups
store one. The order of sums is that of product_streamed.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu import layouts
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.product_streamed import (
    BLOCK,
    MULTIPROCESSORS,
    ProductTile,
    first_output,
    ring,
    store_products,
    warpgroup_products,
)

_WIDEST = 192
_GROUP = gl.constexpr(64)  # outputs of four warps
_ROWS = gl.constexpr(128)
_BLOCK = gl.constexpr(BLOCK)


class WideTile(NamedTuple):
    """How the work is cut. No part of it changes the order of sums."""

    outputs: int
    """128 or 192."""
    stages: int
    """Blocks of 64 along K in the ring, 2 or more; no more are taken than K has."""


def wide_tile(outputs: int, parts: int, rows: int, other: ProductTile) -> WideTile | None:
    """A tile for a shape and R row places unless another one, of product_streamed.py, is done earlier; else None.

    Many rows wait for tensor cores, so what the busiest multiprocessor multiplies is counted.
    """
    if rows <= _ROWS.value or outputs < _WIDEST:
        return None

    def products(width: int, height: int) -> int:
        tiles = math.ceil(outputs / width) * parts * math.ceil(rows / height)
        return math.ceil(tiles / MULTIPROCESSORS) * width * height

    earlier = products(other.outputs, other.rows) < products(_WIDEST, _ROWS.value)
    return None if earlier else WideTile(_WIDEST, 5)


@gluon.jit
def _place(tile, row_tiles, PARTS: gl.constexpr):
    """A tile's first row, its number among those of outputs, and its part of K: those that share weights follow each
    other."""
    return tile % row_tiles * _ROWS, tile // row_tiles // PARTS, tile // row_tiles % PARTS


@gluon.jit
def _ask_weights(weight, first, key, at_w, full, slot, GROUPS: gl.constexpr):
    """Has a block of weights on its way to a place, which is full when as much of x is there too."""
    mbarrier.expect(full.index(slot), (GROUPS * _GROUP + _ROWS) * _BLOCK * 2)
    for i in gl.static_range(GROUPS):
        at = at_w.index(slot * GROUPS + i)._reinterpret(at_w.dtype, [_GROUP // 16, 2, 8, _BLOCK], ring(4))
        tma.async_copy_global_to_shared(weight, [first // 16 + i * 4, 0, 0, key], full.index(slot), at)


@gluon.jit
def _ask(x, weight, at_w, at_x, full, empty, tiles, row_tiles, SIZES: gl.constexpr, OVERLAP: gl.constexpr):
    """Keeps the ring full, through all tiles of the program."""
    N: gl.constexpr = SIZES[0]
    PARTS: gl.constexpr = SIZES[2]
    KP: gl.constexpr = SIZES[1] // PARTS
    GROUPS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    STEPS: gl.constexpr = KP // _BLOCK
    first_row, i_output, part = _place(gl.program_id(0), row_tiles, PARTS)
    first = first_output(i_output, N, GROUPS * _GROUP)
    for i in gl.static_range(STAGES):
        _ask_weights(weight, first, part * KP + i * _BLOCK, at_w, full, i, GROUPS)
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
    if OVERLAP:
        gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [first_row, part * KP + i * _BLOCK], full.index(i), at_x.index(i))
    if OVERLAP == ADMITS_ONCE_WAITED:
        gdc_launch_dependents()
    for step in range(STAGES, STEPS):
        slot, key = step % STAGES, part * KP + step * _BLOCK
        mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
        _ask_weights(weight, first, key, at_w, full, slot, GROUPS)
        tma.async_copy_global_to_shared(x, [first_row, key], full.index(slot), at_x.index(slot))
    done = STEPS  # blocks of the tiles before
    for tile in range(gl.program_id(0) + gl.num_programs(0), tiles, gl.num_programs(0)):
        first_row, i_output, part = _place(tile, row_tiles, PARTS)
        first = first_output(i_output, N, GROUPS * _GROUP)
        for step in range(STEPS):
            slot, key = (done + step) % STAGES, part * KP + step * _BLOCK
            mbarrier.wait(empty.index(slot), ((done + step) // STAGES + 1) & 1)
            _ask_weights(weight, first, key, at_w, full, slot, GROUPS)
            tma.async_copy_global_to_shared(x, [first_row, key], full.index(slot), at_x.index(slot))
        done += STEPS


@gluon.jit
def _multiply(
    at_w, at_x, full, empty, tiles, row_tiles, p_out, p_rows, R,
    GROUP: gl.constexpr, SIZES: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    """64 outputs of every tile of the program."""
    N: gl.constexpr = SIZES[0]
    PARTS: gl.constexpr = SIZES[2]
    GROUPS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    STEPS: gl.constexpr = SIZES[1] // PARTS // _BLOCK
    n = gl.load(p_rows)
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_row, i_output, part = _place(tile, row_tiles, PARTS)
        acc = gl.zeros([_GROUP, _ROWS], gl.float32, warpgroup_products(4, _ROWS))
        for step in range(STEPS):
            at = done + step
            mbarrier.wait(full.index(at % STAGES), at // STAGES & 1)
            w, x_t = at_w.index(at % STAGES * GROUPS + GROUP), at_x.index(at % STAGES).permute((1, 0))
            acc = warpgroup_mma_wait(1, deps=[warpgroup_mma(w, x_t, acc, is_async=True)])
            layouts.barrier()
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        done += STEPS
        layouts.barrier()
        mbarrier.arrive(empty.index((done - 1) % STAGES), count=1)
        first = first_output(i_output, N, GROUPS * _GROUP) + GROUP * _GROUP
        p_part = p_out + part.to(gl.int64) * R * N
        store_products(
            acc, p_part, n, first_row, first, i_output * GROUPS * _GROUP, N, GROUPS * _GROUP, _GROUP, _ROWS, 4,
            SWIGLU, False,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["R", "tiles", "row_tiles"])
def product_wide_kernel(
    x, weight, p_out, p_rows, R, tiles, row_tiles,
    N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    SWIGLU: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Programs take the tiles in turn."""
    SIZES: gl.constexpr = (N, K, PARTS, GROUPS, STAGES)
    at_w = gl.allocate_shared_memory(weight.dtype, [STAGES * GROUPS, _GROUP, _BLOCK], ring(2))
    at_x = gl.allocate_shared_memory(weight.dtype, [STAGES, _ROWS, _BLOCK], ring(2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    layouts.barrier()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (at_w, at_x, full, empty, tiles, row_tiles, p_out, p_rows, R, FIRST, SIZES, SWIGLU)),
                (_multiply, (at_w, at_x, full, empty, tiles, row_tiles, p_out, p_rows, R, SECOND, SIZES, SWIGLU)),
                (_multiply, (at_w, at_x, full, empty, tiles, row_tiles, p_out, p_rows, R, THIRD, SIZES, SWIGLU)),
                (_ask, (x, weight, at_w, at_x, full, empty, tiles, row_tiles, SIZES, OVERLAP)),
            ],
            [4, 4, 1],  # warps of all but the first
            [152, 152, 40],  # their registers
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (at_w, at_x, full, empty, tiles, row_tiles, p_out, p_rows, R, FIRST, SIZES, SWIGLU)),
                (_multiply, (at_w, at_x, full, empty, tiles, row_tiles, p_out, p_rows, R, SECOND, SIZES, SWIGLU)),
                (_ask, (x, weight, at_w, at_x, full, empty, tiles, row_tiles, SIZES, OVERLAP)),
            ],
            [4, 1],
            [216, 40],
        )


def launch_wide(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    rows: Tensor,
    parts: int,
    tile: WideTile,
    *,
    swiglu: bool,
    overlap: int,
) -> None:
    """`product.product` by this kernel, but for what adds; the arguments are checked there, the tile here.

    Raises:
        ValueError: the tile does not fit the shape.
    """
    (count, inputs), outputs = x.shape, weight.shape[0]
    if tile.outputs not in (128, 192) or tile.outputs > outputs or tile.stages < 2:
        raise ValueError(
            f"{tile} does not fit a weight {list(weight.shape)}: give 128 or 192 outputs, 2 stages or more"
        )
    rows_of_tile, group = _ROWS.value, _GROUP.value
    x_blocks = TensorDescriptor(x, [count, inputs], [inputs, 1], [rows_of_tile, BLOCK], ring(2))
    by_pairs = [outputs // 16, 2, 8, inputs], [16 * inputs, inputs, 2 * inputs, 1]
    weight_blocks = TensorDescriptor(weight, *by_pairs, [group // 16, 2, 8, BLOCK], ring(4))
    row_tiles = triton.cdiv(count, rows_of_tile)
    tiles = row_tiles * parts * triton.cdiv(outputs, tile.outputs)
    product_wide_kernel[(min(tiles, MULTIPROCESSORS),)](
        x_blocks, weight_blocks, out, rows, count, tiles, row_tiles,
        N=outputs, K=inputs, PARTS=parts, GROUPS=tile.outputs // group,
        STAGES=min(tile.stages, inputs // parts // BLOCK), SWIGLU=swiglu, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap > 0,
    )  # fmt: skip
