"""Where numbers lie among lanes in the exact kernels: K in four parts, each in four quarters, one for a lane of a quad.

A tile of the state is [4 parts, 2, 2, keys of a thread, columns], its second and third index the lanes of a quad, and a
thread has an eighth of the columns side by side. It lies so in two ways. *Across* warps, each warp has a part of K and
all columns: what a coalesced load of a tile gives. *Within* warps, each warp has all of K and a quarter of the columns:
sums over K then need no other warp.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu.layouts import powers

PARTS = 4
"""Of K, and warps of a program."""


@constexpr_function
def homes(columns: int, across: bool) -> Any:
    """What the upper three bits of a lane's number and the two of a warp's stand for: (column, part) each."""
    own = columns // 8
    column, part = [(own, 0), (2 * own, 0), (4 * own, 0)], [(0, 1), (0, 2)]
    return (column, part) if across else (column[:1] + part, column[1:])


@constexpr_function
def tile(width: int, columns: int, across: bool) -> Any:
    """S [4 width, columns] as `by_quad` has it, of parts of so many keys."""
    rows = width // 4
    lane, warp = homes(columns, across)
    regs = [[0, x] for x in powers(1, columns // 8)] + [[x, 0] for x in powers(1, rows)]
    lanes = [[rows, 0], [2 * rows, 0], *([part * width, column] for column, part in lane)]
    warps = [[part * width, column] for column, part in warp]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [PARTS * width, columns])


@constexpr_function
def swizzled(width: int, columns: int) -> Any:
    """S [4 width, columns] in shared memory: what the lanes of a quad have lies in banks of their own."""
    return gl.SwizzledSharedLayout(columns // 4, width // 4, 4, order=[1, 0])


@constexpr_function
def by_quad(width: int, columns: int, across: bool) -> Any:
    """S [4, 2, 2, width / 4, columns]."""
    lane, warp = homes(columns, across)
    regs = [[0, 0, 0, 0, x] for x in powers(1, columns // 8)] + [[0, 0, 0, x, 0] for x in powers(1, width // 4)]
    lanes = [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0], *([part, 0, 0, 0, column] for column, part in lane)]
    warps = [[part, 0, 0, 0, column] for column, part in warp]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [PARTS, 2, 2, width // 4, columns])


@constexpr_function
def by_thread(width: int, columns: int) -> Any:
    """A tile as shared memory has it, 16 bytes a thread: [width * columns / 128, 128, 4]."""
    count = width * columns // 128
    regs = [[0, 0, 1], [0, 0, 2]] + [[x, 0, 0] for x in powers(1, count)]
    lanes, warps = [[0, x, 0] for x in powers(1, 32)], [[0, x, 0] for x in powers(32, 128)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [count, 128, 4])


@constexpr_function
def one_key(width: int, columns: int, across: bool, packed: bool) -> Any:
    """k or q of a row [4 width] as numbers, or [2 width] as 32-bit words of two, of parts of `width` keys."""
    lane, warp = homes(columns, across)
    part_of = width // 2 if packed else width
    regs = [[x] for x in powers(1, part_of // 4)]
    lanes = [[part_of // 4], [part_of // 2], *([part * part_of] for _, part in lane)]
    return gl.DistributedLinearLayout(regs, lanes, [[part * part_of] for _, part in warp], [], [PARTS * part_of])


@constexpr_function
def sums(columns: int, across: bool) -> Any:
    """A sum of a quad's four a lane: [4 parts, of k or of q, column of two, pairs of columns]."""
    lane, warp = homes(columns, across)
    regs = [[0, 0, 0, x] for x in powers(1, columns // 16)]
    lanes = [[0, 0, 1, 0], [0, 1, 0, 0], *([part, 0, 0, column // 2] for column, part in lane)]
    warps = [[part, 0, 0, column // 2] for column, part in warp]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [PARTS, 2, 2, columns // 2])


@constexpr_function
def sums_of_all(columns: int) -> Any:
    """The same of all parts, across warps, in every warp: [2, 2, pairs, 4 parts]."""
    lane, _ = homes(columns, True)
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]] + [[0, 0, x, 0] for x in powers(1, columns // 16)]
    lanes = [[0, 1, 0, 0], [1, 0, 0, 0], *([0, 0, column // 2, 0] for column, _ in lane)]
    return gl.DistributedLinearLayout(regs, lanes, [[0] * 4] * 2, [], [2, 2, columns // 2, PARTS])


@constexpr_function
def values(columns: int) -> Any:
    """v of a row [columns / 2, 2], within warps: of the columns that a lane has sums of."""
    lane, warp = homes(columns, False)
    lanes = [[0, 1], [0, 0], *([column // 2, 0] for column, _ in lane)]
    regs = [[x, 0] for x in powers(1, columns // 16)]
    return gl.DistributedLinearLayout(regs, lanes, [[column // 2, 0] for column, _ in warp], [], [columns // 2, 2])


@constexpr_function
def eight_keys(width: int) -> Any:
    """k or q of eight rows [4, 8, width]: two rows a warp; of one row a thread has what it has of S within warps."""
    own = width // 4
    lanes = [[0, 0, own], [0, 0, 2 * own], [0, 1, 0], [1, 0, 0], [2, 0, 0]]
    regs = [[0, 0, x] for x in powers(1, own)]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 2, 0], [0, 4, 0]], [], [PARTS, 8, width])


@constexpr_function
def eight_sums() -> Any:
    """Of a thread's keys of eight rows [4, 2, 2, 8]."""
    lanes = [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [2, 0, 0, 0]]
    return gl.DistributedLinearLayout([], lanes, [[0, 0, 0, 2], [0, 0, 0, 4]], [], [PARTS, 2, 2, 8])


@constexpr_function
def eight_entries() -> Any:
    """Four numbers of each of eight rows [8, 4], where `eight_keys` has the rows."""
    lanes = [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, [[2, 0], [4, 0]], [], [8, 4])


@constexpr_function
def known_to_all(count: int) -> Any:
    """[count] numbers, in every thread."""
    return gl.DistributedLinearLayout([[x] for x in powers(1, count)], [[0]] * 5, [[0]] * 2, [], [count])


@constexpr_function
def by_column(columns: int) -> Any:
    """[rows, columns] of rows' v, u and o, as global memory has them."""
    return gl.BlockedLayout([1, 1], [32 // columns, columns], [PARTS, 1], [1, 0])
