"""x W^T with weights and rows of x streaming through shared memory, for 16-bit weights on Hopper; in Gluon.

A program has a tile of BN outputs by RT rows of x and sweeps over K in blocks that the copy engine is asked for several
ahead, into a ring of shared memory, so that memory works whatever the products do. These are wgmma: weights are the
left operand, rows of x the right one, both as they lie in the ring. A tensor core adds up an output in steps of 16
along K, in one order, however many rows a product has.

Outputs 2 g and 2 g + 1 of 16 are rows g and g + 8 of a product: the copy engine lays them so. A lane then ends up with
two neighbours: a wider store, or a gate and what it gates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
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
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import powers
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED

BLOCK = 64
"""K, and each of its parts, must be a multiple of it."""
_OUTPUTS = 16  # a multiple of it
_FEWEST_OUTPUTS = 64
MULTIPROCESSORS = 132
_NO_LIMIT = gl.constexpr(1 << 30)


class ProductTile(NamedTuple):
    """How the work is cut. No part of it changes the order of sums."""

    outputs: int
    """BN, 64 or 128."""
    block_k: int
    """64, 128 or 256."""
    stages: int
    """Blocks of the ring, 2 or more; no more are taken than K has."""
    rows: int
    """8, 16, 32, 64, 128 or 256."""
    warps: int
    """4, or 8 for tiles of 128 outputs, which many rows need."""
    early: int = 1 << 10
    """Blocks of weights asked for before the kernel before has ended, at most the ring."""


def streams(outputs: int, inputs: int, parts: int, dtype: torch.dtype) -> bool:
    """Whether weights of this shape take this form, on Hopper."""
    fits = inputs % (parts * BLOCK) == 0 and outputs >= _FEWEST_OUTPUTS and outputs % _OUTPUTS == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def on_hopper(device: torch.device) -> bool:
    """Whether a device has wgmma: no other generation does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def streamed_tile(outputs: int, inputs: int, parts: int, rows: int) -> ProductTile:
    """A tile for a shape and R row places: the fastest, or nearly, of those timed on an H200."""
    height: int = min(256, max(8, triton.next_power_of_2(rows)))
    row_tiles = math.ceil(rows / height)

    def rounds(width: int) -> int:
        """How often the multiprocessors take a program each."""
        return math.ceil(math.ceil(outputs / width) * parts * row_tiles / MULTIPROCESSORS)

    # Few rows wait for memory, and are best spread out; many wait for products, of which wide tiles do more at a time.
    wide = height > 64 and outputs >= 128 and 2 * rounds(128) <= rounds(64)
    width = 128 if wide else 64
    block_k = 128 if height <= 64 and inputs % (parts * 128) == 0 else 64
    together = rounds(width) > 1 and height <= 128  # two programs on a multiprocessor, or three
    kilobytes = 96 if together else {128: 160, 256: 200}.get(height, 144)
    stages = kilobytes * 1024 // ((width + height) * block_k * 2)
    # What the kernel before still waits for comes late behind a deep queue of weights.
    early = {16: 6, 32: 2, 64: 2}.get(height, stages)
    return ProductTile(width, block_k, stages, height, 8 if wide else 4, early)


@constexpr_function
def ring(rank: int) -> Any:
    """Blocks in shared memory as wgmma reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@constexpr_function
def warpgroup_products(warps: int, rows: int) -> Any:
    """Results [outputs, rows] of products, 16 outputs a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, rows, 16])


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
def first_output(tile, N: gl.constexpr, BN: gl.constexpr):
    """Where a tile begins; the last one is moved back to end with the outputs and stores its own alone."""
    if N % BN == 0:
        return tile * BN
    else:
        return gl.minimum(tile * BN, N - BN)


@gluon.jit
def _ask_weights(
    weight, at_w, full, step, slot,
    N: gl.constexpr, KP: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, RT: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Has a block of weights on its way to a place, which is full when as much of x is there too."""
    first, key = first_output(gl.program_id(1) // PARTS, N, BN) // 16, gl.program_id(1) % PARTS * KP + step * BK
    at = at_w.index(slot)._reinterpret(at_w.dtype, [BN // 16, 2, 8, BK], ring(4))
    mbarrier.expect(full.index(slot), (BN + RT) * BK * 2)
    tma.async_copy_global_to_shared(weight, [first, 0, 0, key], full.index(slot), at)


@gluon.jit
def _ask_rows(x, at_x, full, step, slot, KP: gl.constexpr, BK: gl.constexpr, RT: gl.constexpr, PARTS: gl.constexpr):
    """Has a block of x on its way; rows past the last place are zeros."""
    key = gl.program_id(1) % PARTS * KP + step * BK
    tma.async_copy_global_to_shared(x, [gl.program_id(0) * RT, key], full.index(slot), at_x.index(slot))


@gluon.jit
def finished(acc, BN: gl.constexpr, RT: gl.constexpr, WARPS: gl.constexpr, SWIGLU: gl.constexpr):
    """Sums in the order of the outputs, or what they gate; as `result` lays them out."""
    by_output = gl.permute(gl.reshape(acc, [BN // 16, 2, 8, RT]), (0, 2, 1, 3))
    by_output = gl.reshape(by_output, [BN // 2, 2, RT])
    OUT: gl.constexpr = result(WARPS, BN, RT, SWIGLU)
    if SWIGLU:
        gate, up = gl.split(gl.permute(by_output, (0, 2, 1)))
        return gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, OUT, assert_trivial=True)
    else:
        return gl.convert_layout(gl.reshape(by_output, [BN, RT]), OUT, assert_trivial=True)


@gluon.jit
def store_products(
    acc, p_out, n, first_row, output, own,
    N: gl.constexpr, TILE: gl.constexpr, BN: gl.constexpr, RT: gl.constexpr, WARPS: gl.constexpr,
    SWIGLU: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Stores what counts of sums that begin at an output, of a tile of TILE whose own ones are those from `own` on."""
    y = finished(acc, BN, RT, WARPS, SWIGLU)
    EACH: gl.constexpr = 2 if SWIGLU else 1
    OUT: gl.constexpr = result(WARPS, BN, RT, SWIGLU)
    COUNT: gl.constexpr = N // EACH
    i_output = output // EACH + gl.arange(0, BN // EACH, layout=gl.SliceLayout(1, OUT))
    row = first_row + gl.arange(0, RT, layout=gl.SliceLayout(0, OUT))
    mask = gl.expand_dims(row < n, 0)
    if N % TILE != 0:
        mask = mask & gl.expand_dims(i_output >= own // EACH, 1)
    at = p_out + gl.expand_dims(row.to(gl.int64) * COUNT, 0) + gl.expand_dims(i_output, 1)
    if ADD:
        y += gl.load(at, mask=mask, other=0.0)
    gl.store(at, y.to(p_out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["R"])
def product_streamed_kernel(
    x,
    weight,
    p_out,
    p_rows,
    R,
    N: gl.constexpr,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    RT: gl.constexpr,
    WARPS: gl.constexpr,
    SWIGLU: gl.constexpr,
    ADD: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (tiles of rows, tiles of outputs times parts of K): programs that share weights follow each other."""
    KP: gl.constexpr = K // PARTS
    STEPS: gl.constexpr = KP // BK
    n = gl.load(p_rows)
    # Whether there are rows for this program. The first ones do not ask: they would wait for the answer.
    first_row = gl.program_id(0) * RT
    if first_row >= gl.load(p_rows, mask=first_row > 0, other=_NO_LIMIT):
        if OVERLAP:
            gdc_wait()
        return
    at_w = gl.allocate_shared_memory(weight.dtype, [STAGES, BN, BK], ring(2))
    at_x = gl.allocate_shared_memory(weight.dtype, [STAGES, RT, BK], ring(2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    layouts.barrier()
    for i in gl.static_range(EARLY):
        _ask_weights(weight, at_w, full, i, i, N, KP, BN, BK, RT, PARTS)
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
    if OVERLAP:
        gdc_wait()
    for i in gl.static_range(STAGES):
        if i >= EARLY:
            _ask_weights(weight, at_w, full, i, i, N, KP, BN, BK, RT, PARTS)
        _ask_rows(x, at_x, full, i, i, KP, BK, RT, PARTS)
    if OVERLAP == ADMITS_ONCE_WAITED:  # memory is busier with both kernels' weights under way
        gdc_launch_dependents()
    acc = gl.zeros([BN, RT], gl.float32, warpgroup_products(WARPS, RT))
    for step in range(STEPS):
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        w, x_t = at_w.index(step % STAGES), at_x.index(step % STAGES).permute((1, 0))
        acc = warpgroup_mma_wait(1, deps=[warpgroup_mma(w, x_t, acc, is_async=True)])
        layouts.barrier()
        ahead = step - 1 + STAGES  # in the place of the step before, whose products are done
        if (step > 0) & (ahead < STEPS):
            _ask_weights(weight, at_w, full, ahead, ahead % STAGES, N, KP, BN, BK, RT, PARTS)
            _ask_rows(x, at_x, full, ahead, ahead % STAGES, KP, BK, RT, PARTS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    p_out += (gl.program_id(1) % PARTS).to(gl.int64) * R * N
    tile = gl.program_id(1) // PARTS
    first = first_output(tile, N, BN)
    store_products(acc, p_out, n, first_row, first, tile * BN, N, BN, BN, RT, WARPS, SWIGLU, ADD)


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
    overlap: int,
) -> None:
    """`product.product` by this kernel; the arguments are checked there, the tile here.

    Raises:
        ValueError: the tile does not fit the shape.
    """
    (count, inputs), outputs = x.shape, weight.shape[0]
    whole = inputs % (parts * tile.block_k) == 0 and tile.outputs % (16 * tile.warps) == 0
    if not whole or tile.outputs > outputs or tile.warps not in (4, 8) or tile.stages < 2 or tile.early < 0:
        raise ValueError(f"{tile} does not fit a weight {list(weight.shape)} in {parts} parts")
    x_blocks = TensorDescriptor(x, [count, inputs], [inputs, 1], [tile.rows, tile.block_k], ring(2))
    by_pairs = [outputs // 16, 2, 8, inputs], [16 * inputs, inputs, 2 * inputs, 1]
    weight_blocks = TensorDescriptor(weight, *by_pairs, [tile.outputs // 16, 2, 8, tile.block_k], ring(4))
    stages = min(tile.stages, inputs // parts // tile.block_k)
    product_streamed_kernel[(triton.cdiv(count, tile.rows), triton.cdiv(outputs, tile.outputs) * parts)](
        x_blocks,
        weight_blocks,
        out,
        rows,
        count,
        N=outputs,
        K=inputs,
        PARTS=parts,
        BN=tile.outputs,
        BK=tile.block_k,
        STAGES=stages,
        EARLY=min(tile.early, stages),
        RT=tile.rows,
        WARPS=tile.warps,
        SWIGLU=swiglu,
        ADD=add,
        OVERLAP=overlap,
        num_warps=tile.warps,
        launch_pdl=overlap > 0,
    )
