"""Where the elements of a tile lie among threads, for the kernels in Gluon, and how one order becomes another.

These kernels say themselves which thread holds what, so that what one step leaves in a thread's registers is what the
next one reads there, and nothing is exchanged through shared memory but sums over warps. All products are
mma.m16n8k16 of bfloat16 with S^T, u^T or o^T as the left operand: 16 columns of V are the rows of a product, and its
result is, register for register, the left operand of the next one. Only relabelling then lies between a load and a
product: columns 2 g and 2 g + 1 of 16 (a lane loads both at once) are rows g and g + 8 of a product.

`[W, ...]` stands for a tensor whose first index is the warp.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function

LOWEST = gl.constexpr(-40.0)
UNITS = gl.constexpr(262144.0)
"""Of path sums, as in factorised.py."""

TO_LOG2 = gl.constexpr(1.4426950408889634 / 262144.0)
"""From those units to the exponent of 2."""

barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""All threads of a program meet; Triton 3.8 gave it another name."""


@constexpr_function
def powers(first: int, end: int) -> list[int]:
    """first, 2 first, 4 first and so on below end."""
    found = []
    while 0 < first < end:
        found.append(first)
        first *= 2
    return found


@constexpr_function
def products(warps: int) -> Any:
    """Results [W, M, N] of products, one batch a warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@constexpr_function
def column_products(warps: int) -> Any:
    """Results [M, N] of products whose M is shared out over the warps, 16 each."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@constexpr_function
def keys(warps: int, width: int) -> Any:
    """q or k [W, 16 rows, width]: a thread's width / 4 numbers lie side by side."""
    own = width // 4
    regs = [[0, 0, x] for x in powers(1, own)] + [[0, 8, 0]]
    lanes = [[0, 0, own], [0, 0, 2 * own], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[x, 0, 0] for x in powers(1, warps)], [], [warps, 16, width])


@constexpr_function
def state(warps: int, width: int, columns: int) -> Any:
    """S [W, width of K, columns of V]: a thread's width / 4 rows side by side, and columns / 8 columns."""
    rows, own = width // 4, columns // 8
    regs = [[0, 0, x] for x in powers(1, own)] + [[0, x, 0] for x in powers(1, rows)]
    lanes = [[0, rows, 0], [0, 2 * rows, 0], [0, 0, own], [0, 0, 2 * own], [0, 0, 4 * own]]
    return gl.DistributedLinearLayout(regs, lanes, [[x, 0, 0] for x in powers(1, warps)], [], [warps, width, columns])


@constexpr_function
def values(warps: int) -> Any:
    """v, u or o [W, 16 rows, 16 columns]."""
    regs = [[0, 0, 1], [0, 1, 0], [0, 8, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    return gl.DistributedLinearLayout(regs, lanes, [[x, 0, 0] for x in powers(1, warps)], [], [warps, 16, 16])


@gluon.jit
def as_left(x, PRODUCTS: gl.constexpr):
    """[.., M, K] of a product's result as the left operand of the next: nothing moves."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, PRODUCTS, 2), assert_trivial=True)


@gluon.jit
def as_right(x, PRODUCTS: gl.constexpr):
    """x^T for x [W, N, K] of a product's result, as the right operand of the next: nothing moves."""
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), gl.DotOperandLayout(1, PRODUCTS, 2), assert_trivial=True)


@gluon.jit
def as_right_alone(x, PRODUCTS: gl.constexpr):
    """The same for x [N, K], one product for all warps."""
    return gl.convert_layout(gl.permute(x, (1, 0)), gl.DotOperandLayout(1, PRODUCTS, 2), assert_trivial=True)


@gluon.jit
def halves(x):
    """float32 x as the sum of two bfloat16, to 2^-17."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        .reg .f32 x, y;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 a, $0, 16;
        and.b32 b, $0, 0xffff0000;
        sub.f32 x, $2, a;
        sub.f32 y, $3, b;
        cvt.rn.bf16x2.f32 $1, y, x;
        }""",
        "=r,=r,f,f",
        [x],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def right_halves(x, W: gl.constexpr):
    """x^T as right operands, in bfloat16 halves."""
    hi, lo = halves(x)
    return as_right(hi, products(W)), as_right(lo, products(W))


@gluon.jit
def columns_first(x, W: gl.constexpr):
    """v [W, rows, columns] as [W, columns, rows], a product's result."""
    x = gl.permute(gl.reshape(x, [W, 16, 8, 2]), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(x, [W, 16, 16]), products(W), assert_trivial=True)


@gluon.jit
def rows_first(x, W: gl.constexpr):
    """A product's result [W, columns, rows] as [W, rows, columns]."""
    x = gl.permute(gl.reshape(x, [W, 2, 8, 16]), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(x, [W, 16, 16]), values(W), assert_trivial=True)


@gluon.jit
def dot(a, b_hi, b_lo, acc, PRODUCTS: gl.constexpr):
    """acc + a b of float32, as products of bfloat16 halves; b is split already."""
    a_hi, a_lo = halves(a)
    a_hi, a_lo = as_left(a_hi, PRODUCTS), as_left(a_lo, PRODUCTS)
    return mma_v2(a_hi, b_hi, mma_v2(a_hi, b_lo, mma_v2(a_lo, b_hi, acc)))


@gluon.jit
def path_units(g):
    """Log decays as whole multiples of 2^-18."""
    return (gl.maximum(g, LOWEST) * UNITS - 0.5).to(gl.int32)


@gluon.jit
def exp2(x):
    """2^x by the GPU's own instruction, to 2^-22."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@constexpr_function
def along_alone(layout: Any, rank: int, axis: int) -> Any:
    """The layout of a vector along one axis of a tensor of such a layout."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(size: gl.constexpr, layout: gl.constexpr, rank: gl.constexpr, axis: gl.constexpr):
    """0, 1, .. size - 1 along one axis of a tensor of this layout and rank, of size 1 along all others."""
    x = gl.arange(0, size, layout=along_alone(layout, rank, axis))
    for other in gl.static_range(rank):
        if other != axis:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def prefetch(p):
    """Asks for the cache lines at the pointers p."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@constexpr_function
def shares(warps: int, count: int) -> Any:
    """[W parts, count, 32, 4]: a thread has all parts of its warp's share of `count`."""
    own = count // warps
    parts, mine = [[x, 0, 0, 0] for x in powers(1, warps)], [[0, x, 0, 0] for x in powers(1, own)]
    regs, lanes = [[0, 0, 0, 1], [0, 0, 0, 2], *parts, *mine], [[0, 0, x, 0] for x in powers(1, 32)]
    warp = [[0, x, 0, 0] for x in powers(own, count)]
    return gl.DistributedLinearLayout(regs, lanes, warp, [], [warps, count, 32, 4])


@constexpr_function
def known_to_all(warps: int, count: int) -> Any:
    """[count, 32, 4]: a lane has its four of each, in every warp."""
    regs = [[0, 0, 1], [0, 0, 2]] + [[x, 0, 0] for x in powers(1, count)]
    warp = [[0, 0, 0] for _ in powers(1, warps)]
    return gl.DistributedLinearLayout(regs, [[0, x, 0] for x in powers(1, 32)], warp, [], [count, 32, 4])


@constexpr_function
def plain(shape: list[int]) -> Any:
    """Shared memory as it comes, the last index fastest."""
    return gl.SwizzledSharedLayout(1, 1, 1, order=list(range(len(shape) - 1, -1, -1)))


@constexpr_function
def many(count: int, shape: list[int]) -> list[int]:
    """The shape of so many of them."""
    return [count, *shape]


@gluon.jit
def shared(dtype: gl.constexpr, shape: gl.constexpr):
    """Uninitialised shared memory."""
    return gl.allocate_shared_memory(dtype, shape, plain(shape))


@gluon.jit
def shared_blocks(dtype: gl.constexpr, count: gl.constexpr, shape: gl.constexpr):
    """Uninitialised shared memory for so many tensors of a shape, one of which `.index(i)` gives."""
    return gl.allocate_shared_memory(dtype, many(count, shape), plain(shape))
