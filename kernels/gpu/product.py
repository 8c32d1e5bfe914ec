"""x W^T for few rows and many: weights stream from memory once, and no row's bits depend on the others.

Every output is one chain of products over K, in an order that hangs on the shape of the weights alone: the number of
rows only says how many such chains stand side by side. Where a chain would be long and there are few outputs, K is cut
into parts (`product_parts`) that are stored apart; `add_rms_norm` sums them in order. Nothing is added atomically.

Two orders: that of product_streamed.py and product_wide.py, in Gluon, for 16-bit weights of wide shapes on Hopper, and
that of the general form here. Which one a shape takes does not depend on the rows, so that their bits never meet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.norms import MODEL_DTYPES, check_rows, check_tensor
from specla.kernels.gpu.overlap import Admit, admit_at_start, overlapping, wait_for_previous
from specla.kernels.gpu.product_streamed import ProductTile, launch_streamed, on_hopper, streamed_tile, streams
from specla.kernels.gpu.product_wide import WideTile, launch_wide, wide_tile

_ROWS = 16  # of one program: of every height, so that there is one order
_BLOCK_N = 32
_BLOCK_K = 64
_WARPS = 2
_BUSY = 120  # programs that keep memory busy; an H200 has 132 multiprocessors
_MOST_PARTS = 4
_PART = 512  # a part's length in K, at least


@triton.jit(do_not_specialize=["R"])
def product_kernel(
    p_x, p_weight, p_out, p_rows, R,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    SWIGLU: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS rows, tiles of N, parts of K): programs of one tile follow each other and share it in L2."""
    KP: tl.constexpr = K // PARTS
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    admit_at_start(OVERLAP)
    n = tl.load(p_rows)
    wait_for_previous(OVERLAP)
    if tl.program_id(0) * ROWS < n:
        first = tl.program_id(2) * KP
        of_row, of_n = i_row < n, i_n < N
        p_row = p_x + i_row.to(tl.int64)[:, None] * K + first
        p_column = p_weight + i_n.to(tl.int64)[None, :] * K + first
        acc = tl.zeros([ROWS, BN], dtype=tl.float32)
        for k in range(0, KP, BK):
            of_k = k + o_k < KP
            x = tl.load(p_row + k + o_k[None, :], mask=of_row[:, None] & of_k[None, :], other=0.0)
            w = tl.load(p_column + k + o_k[:, None], mask=of_n[None, :] & of_k[:, None], other=0.0)  # [BK, BN]
            if INTERPRETED:  # the interpreter's bfloat16 products are wrong
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if SWIGLU:
            gate, up = tl.split(tl.reshape(acc, [ROWS, BN // 2, 2]))
            i_m = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
            y = gate / (1.0 + tl.exp(-gate)) * up
            p_at = p_out + i_row.to(tl.int64)[:, None] * (N // 2) + i_m[None, :]
            tl.store(p_at, y.to(p_out.dtype.element_ty), mask=of_row[:, None] & (i_m < N // 2)[None, :])
        else:
            mask = of_row[:, None] & of_n[None, :]
            p_at = p_out + (tl.program_id(2).to(tl.int64) * R + i_row.to(tl.int64)[:, None]) * N + i_n[None, :]
            if ADD:
                acc += tl.load(p_at, mask=mask, other=0.0)
            tl.store(p_at, acc.to(p_out.dtype.element_ty), mask=mask)


def product_parts(outputs: int, inputs: int) -> int:
    """How many parts K is best cut into for a weight [outputs, inputs] whose consumer sums parts (`add_rms_norm`).

    The largest power of two that divides K evenly, leaves parts of 512 or more and is needed to keep memory busy. It
    depends on the shape alone, as the order of sums must.
    """
    parts = 1
    while (
        parts < _MOST_PARTS
        and triton.cdiv(outputs, 64) * parts < _BUSY
        and inputs % (parts * 256) == 0
        and inputs // (2 * parts) >= _PART
    ):
        parts *= 2
    return parts


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    rows: Tensor,
    *,
    swiglu: bool = False,
    add: bool = False,
    overlap: bool = False,
    admit: Admit = "waited",
    tile: ProductTile | WideTile | None = None,
) -> None:
    """out = x weight^T for the rows that count; products of the model's dtype, sums in float32.

    A row's bits depend on the row, the weights and P alone: not on R, the row's place, its neighbours or the tile.

    Args:
        x: model dtype [R, K].
        weight: of the same dtype [N, K].
        out: [R, N] in float32 or the model's dtype; or float32 [P, R, N], the sums over each of P parts of K (P divides
            K), for a consumer that adds them up. Places of rows that do not count are left alone.
        rows: int32 [1], how many rows count, R at most.
        swiglu: rows 2 m and 2 m + 1 of the weights are the gate and what it gates of channel m; out is silu(gate) up,
            [R, N / 2]. K stays whole.
        add: out, float32 [R, N], is added to: the residual on the way out. K stays whole.
        overlap: whether to begin while the kernel before may still run; that one must not write `rows` or `weight`.
            The first weights are then on their way before it ends.
        admit: when the next launch may begin, if it overlaps.
        tile: how the streamed form cuts the work; None chooses. Changes no bits.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together, or options exclude each other.
    """
    parts = _checked_parts(x, weight, out, rows, swiglu, add)
    (count, inputs), outputs = x.shape, weight.shape[0]
    interpreted = triton.knobs.runtime.interpret
    overlaps = overlapping(overlap, admit)
    streamed = not interpreted and on_hopper(x.device) and streams(outputs, inputs, parts, x.dtype)
    if streamed:
        tile = tile or _tile(outputs, inputs, parts, count, add)
        if isinstance(tile, WideTile):
            if add:
                raise ValueError(f"{tile} does not add to what is there: give a ProductTile")
            launch_wide(x, weight, out, rows, parts, tile, swiglu=swiglu, overlap=overlaps)
            return
        launch_streamed(x, weight, out, rows, parts, tile, swiglu=swiglu, add=add, overlap=overlaps)
        return
    if tile is not None and not interpreted:
        raise ValueError(f"weight {weight.dtype} {list(weight.shape)} in {parts} parts is not streamed: give no tile")
    product_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(outputs, _BLOCK_N), parts)](
        x, weight, out, rows, count,
        N=outputs, K=inputs, PARTS=parts, BN=_BLOCK_N, BK=_BLOCK_K, ROWS=_ROWS, SWIGLU=swiglu, ADD=add,
        OVERLAP=overlaps, INTERPRETED=interpreted, num_warps=_WARPS, num_stages=4, launch_pdl=overlaps > 0,
    )  # fmt: skip


def _tile(outputs: int, inputs: int, parts: int, rows: int, add: bool) -> ProductTile | WideTile:
    """How the streamed forms cut a product's work."""
    tile = streamed_tile(outputs, inputs, parts, rows)
    return tile if add else wide_tile(outputs, parts, rows, tile) or tile


def _checked_parts(x: Tensor, weight: Tensor, out: Tensor, rows: Tensor, swiglu: bool, add: bool) -> int:
    """How many parts K is cut into; raises ValueError as `product` says."""
    if x.dim() != 2 or weight.dim() != 2 or out.dim() not in (2, 3):
        raise ValueError(
            f"x {list(x.shape)}, weight {list(weight.shape)}, out {list(out.shape)}: give [R, K], [N, K] and [R, N] "
            "or [P, R, N]"
        )
    (count, inputs), outputs = x.shape, weight.shape[0]
    parts = out.shape[0] if out.dim() == 3 else 1
    check_tensor("x", x, (count, inputs), MODEL_DTYPES, x.device)
    check_tensor("weight", weight, (outputs, inputs), (x.dtype,), x.device)
    if (swiglu or add) and (out.dim() == 3 or (swiglu and add)):
        raise ValueError("swiglu and add exclude each other and parts of K: give out [R, N / 2] or [R, N], and one")
    if parts < 1 or inputs % parts:
        raise ValueError(f"{parts} parts of K = {inputs}: give a number of parts that divides K")
    if swiglu and outputs % 2:
        raise ValueError(f"weight has {outputs} rows: give gates and what they gate in turns, an even number")
    width = outputs // 2 if swiglu else outputs
    shape = (parts, count, width) if out.dim() == 3 else (count, width)
    single = (torch.float32,)
    check_tensor("out", out, shape, single if add or out.dim() == 3 else (*single, x.dtype), x.device)
    check_rows(rows, x.device)
    return parts
