"""Where the elements of a chunk of blocks lie among threads and in shared memory, for held_blocks.py.

A block is 16 rows of a tree, a chunk one block a warp. S^T, the k of all blocks and their u lie in shared memory in the
order in which products take them as left operands: a lane's share of a step of 16 is 16 bytes side by side, [.., 32
lanes, 8], so that a load is an operand, and nothing is exchanged. Names of the parts of K = 32 t + 8 c + 4 s + 2 h + e:
a lane's quarter c of 32 keys side by side serves two steps s of a product, which takes its keys in an order of its own.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import along, as_left, as_right, halves, powers

LANES = [1, 2, 4, 8, 16]


@constexpr_function
def _dealt(warps: int, width: int) -> tuple[list[int], list[int]]:
    """Bits of K that a thread goes through, and those that its warp stands for."""
    bits, of_warps = [2, 4, *powers(32, width)], len(powers(1, warps))
    return bits[: len(bits) - of_warps], bits[len(bits) - of_warps :]


@constexpr_function
def state(warps: int, width: int) -> Any:
    """S [1, K, 16]: a lane has columns 2 g and 2 g + 1 and its keys of some steps."""
    mine, of_warps = _dealt(warps, width)
    regs = [[0, 0, 1], [0, 1, 0]] + [[0, x, 0] for x in mine]
    lanes = [[0, 8, 0], [0, 16, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, x, 0] for x in of_warps], [], [1, width, 16])


@constexpr_function
def state_by_operand(warps: int, width: int) -> Any:
    """The same numbers of the same threads as [K / 16, 32, 8], the last index (h, half of the columns, e)."""
    mine, of_warps = _dealt(warps, width)
    places = {x: [0, 0, 4] if x == 2 else [1, 0, 0] if x == 4 else [x // 16, 0, 0] for x in mine + of_warps}
    regs = [[0, 0, 1], [0, 0, 2]] + [places[x] for x in mine]
    lanes = [[0, x, 0] for x in LANES]
    return gl.DistributedLinearLayout(regs, lanes, [places[x] for x in of_warps], [], [width // 16, 32, 8])


@constexpr_function
def state_of_all(warps: int, width: int) -> Any:
    """[K / 16, 32, 8], known to every warp."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[x, 0, 0] for x in powers(1, width // 16)]
    lanes = [[0, x, 0] for x in LANES]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 0, 0] for _ in powers(1, warps)], [], [width // 16, 32, 8])


@constexpr_function
def rows(warps: int, width: int) -> Any:
    """q or k of each warp's block [W, 16, K]: 16 bytes a load, four lanes side by side."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]] + [[0, 0, x] for x in powers(32, width)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[x, 0, 0] for x in powers(1, warps)], [], [warps, 16, width])


@constexpr_function
def lines(warps: int, width: int) -> Any:
    """The cache lines of the same, [W, 16, K / 64]."""
    lanes = [[0, 0, x] for x in powers(1, width // 64)]
    lanes += [[0, 0, 0]] * (2 - len(lanes)) + [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp = [[x, 0, 0] for x in powers(1, warps)]
    return gl.DistributedLinearLayout([[0, 8, 0]], lanes, warp, [], [warps, 16, width // 64])


@constexpr_function
def chunk(warps: int, width: int) -> Any:
    """k of a chunk as it is loaded, dealt out to all warps: [W blocks, K / 32, half of the rows, 32, 8]."""
    bits = [[0, 0, 1, 0, 0]] + [[0, x, 0, 0, 0] for x in powers(1, width // 32)]
    bits += [[x, 0, 0, 0, 0] for x in powers(1, warps)]
    cut = len(bits) - len(powers(1, warps))
    regs, lanes = [[0, 0, 0, 0, x] for x in (1, 2, 4)] + bits[:cut], [[0, 0, 0, x, 0] for x in LANES]
    return gl.DistributedLinearLayout(regs, lanes, bits[cut:], [], [warps, width // 32, 2, 32, 8])


@gluon.jit
def chunk_places(W: gl.constexpr, K: gl.constexpr):
    """Row in the chunk and key of what `chunk` has."""
    C: gl.constexpr = chunk(W, K)
    block, part, half = along(W, C, 5, 0), along(K // 32, C, 5, 1), along(2, C, 5, 2)
    lane, number = along(32, C, 5, 3), along(8, C, 5, 4)
    return block * 16 + half * 8 + lane // 4, part * 32 + lane % 4 * 8 + number


@constexpr_function
def block_of_all(warps: int, width: int) -> Any:
    """k of one block [K / 32, s, 32, 8], known to every warp."""
    regs = [[0, 0, 0, x] for x in (1, 2, 4)] + [[0, 1, 0, 0]] + [[x, 0, 0, 0] for x in powers(1, width // 32)]
    lanes = [[0, 0, x, 0] for x in LANES]
    return gl.DistributedLinearLayout(regs, lanes, [[0] * 4 for _ in powers(1, warps)], [], [width // 32, 2, 32, 8])


@constexpr_function
def own_block(warps: int, width: int) -> Any:
    """k of each warp's own block, [W, K / 32, s, 32, 8]."""
    regs = [[0, 0, 0, 0, x] for x in (1, 2, 4)] + [[0, 0, 1, 0, 0]]
    regs += [[0, x, 0, 0, 0] for x in powers(1, width // 32)]
    lanes, warp = [[0, 0, 0, x, 0] for x in LANES], [[x, 0, 0, 0, 0] for x in powers(1, warps)]
    return gl.DistributedLinearLayout(regs, lanes, warp, [], [warps, width // 32, 2, 32, 8])


@constexpr_function
def path_bits(warps: int) -> Any:
    """[16 W rows, W blocks, 16]: a thread has the 16 bits that say which rows of a block lie above one row."""
    lanes, row = [[0, x, 0] for x in powers(1, warps)], powers(1, 16 * warps)
    cut = 5 - len(lanes)
    lanes += [[x, 0, 0] for x in row[:cut]]
    warp = [[x, 0, 0] for x in row[cut:]]
    of_warps = len(powers(1, warps))
    regs = [[0, 0, x] for x in (1, 2, 4, 8)] + warp[of_warps:]
    warp += [[0, 0, 0]] * (of_warps - len(warp))
    return gl.DistributedLinearLayout(regs, lanes, warp[:of_warps], [], [16 * warps, warps, 16])


@constexpr_function
def own_factors(warps: int) -> Any:
    """u of each warp's own block as bfloat16 halves, [W, 2, 32, 8]."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0]]
    lanes, warp = [[0, 0, x, 0] for x in LANES], [[x, 0, 0, 0] for x in powers(1, warps)]
    return gl.DistributedLinearLayout(regs, lanes, warp, [], [warps, 2, 32, 8])


@constexpr_function
def factors_of_all(warps: int) -> Any:
    """u of one block [2, 32, 8], known to every warp."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0]]
    return gl.DistributedLinearLayout(
        regs, [[0, x, 0] for x in LANES], [[0] * 3 for _ in powers(1, warps)], [], [2, 32, 8]
    )


@constexpr_function
def pieces_of_all(warps: int) -> Any:
    """Results of all warps [W, 2, 32, 4], known to every warp."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0]] + [[x, 0, 0, 0] for x in powers(1, warps)]
    lanes = [[0, 0, x, 0] for x in LANES]
    return gl.DistributedLinearLayout(regs, lanes, [[0] * 4 for _ in powers(1, warps)], [], [warps, 2, 32, 4])


@gluon.jit
def known(x, W: gl.constexpr, COLUMNS: gl.constexpr):
    """x [16, COLUMNS], known to every warp, as [W, 16, COLUMNS] of a product."""
    P: gl.constexpr = layouts.products(W)
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, P), assert_trivial=True), 0)
    return gl.broadcast(x, gl.zeros([W, 16, COLUMNS], x.dtype, P))[0]


@gluon.jit
def to_warps(x, W: gl.constexpr, L: gl.constexpr):
    """A number for each row of a block, known to every warp, as [W, 16]."""
    return gl.broadcast(gl.expand_dims(x, 0), gl.zeros([W, 16], x.dtype, L))[0]


@gluon.jit
def left_halves(x, W: gl.constexpr):
    """A product's result as left operands, in bfloat16 halves."""
    hi, lo = halves(x)
    return as_left(hi, layouts.products(W)), as_left(lo, layouts.products(W))


@gluon.jit
def _as_right_itself(x, W: gl.constexpr):
    """bfloat16 x [W, 16, 16] of a product's result as the right operand x: each 8 x 8 is transposed within its warp."""
    P: gl.constexpr = layouts.products(W)
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )
    x = gl.reshape(gl.permute(gl.reshape(x, [W, 2, 8, 2, 8]), (0, 3, 2, 1, 4)), [W, 16, 16])
    return as_right(gl.convert_layout(x, P, assert_trivial=True), P)


@gluon.jit
def right_halves_itself(x, W: gl.constexpr):
    """x as right operands, in bfloat16 halves."""
    hi, lo = halves(x)
    return _as_right_itself(hi, W), _as_right_itself(lo, W)


@gluon.jit
def leave_state(s, at_hi, at_lo, W: gl.constexpr, K: gl.constexpr):
    """Leaves the halves of S [1, K, 16] where `held_state` finds S^T."""
    s = gl.permute(gl.reshape(s, [K // 32, 4, 2, 2, 2, 8, 2]), (0, 2, 5, 1, 3, 6, 4))  # t s column c h half e
    s = gl.convert_layout(gl.reshape(s, [K // 16, 32, 8]), state_by_operand(W, K), assert_trivial=True)
    hi, lo = halves(s)
    at_hi.store(hi)
    at_lo.store(lo)


@gluon.jit
def held_state(at, W: gl.constexpr, K: gl.constexpr):
    """Half of S^T as left operand of every warp."""
    x = gl.permute(gl.reshape(at.load(state_of_all(W, K)), [K // 16, 8, 4, 2, 2, 2]), (4, 1, 0, 3, 2, 5))
    return as_left(known(gl.reshape(x, [16, K]), W, K), layouts.products(W))


@gluon.jit
def by_product(x, W: gl.constexpr, K: gl.constexpr):
    """q or k as it is loaded [W, 16, K] as a right operand."""
    P: gl.constexpr = layouts.products(W)
    x = gl.permute(gl.reshape(x, [W, 16, K // 32, 4, 2, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
    return as_right(gl.convert_layout(gl.reshape(x, [W, 16, K]), P, assert_trivial=True), P)


@gluon.jit
def leave_keys(k, at, W: gl.constexpr, K: gl.constexpr):
    """Leaves k of a chunk, [W, K / 32, half, 32, (s, h, e)] as it is loaded, where `keys_of_block` finds it."""
    k = gl.permute(gl.reshape(k, [W, K // 32, 2, 32, 2, 2, 2]), (0, 1, 4, 3, 5, 2, 6))
    at.store(gl.reshape(k, [W, K // 32, 2, 32, 8]))


@gluon.jit
def keys_of_block(at, W: gl.constexpr, K: gl.constexpr):
    """k of one block as left operand of every warp."""
    x = gl.permute(gl.reshape(at.load(block_of_all(W, K)), [K // 32, 2, 8, 4, 2, 2, 2]), (5, 2, 0, 1, 4, 3, 6))
    return as_left(known(gl.reshape(x, [16, K]), W, K), layouts.products(W))


@gluon.jit
def own_keys(at, W: gl.constexpr, K: gl.constexpr):
    """k of each warp's own block as left operand."""
    P: gl.constexpr = layouts.products(W)
    x = gl.permute(gl.reshape(at.load(own_block(W, K)), [W, K // 32, 2, 8, 4, 2, 2, 2]), (0, 6, 3, 1, 2, 5, 4, 7))
    return as_left(gl.convert_layout(gl.reshape(x, [W, 16, K]), P, assert_trivial=True), P)


@gluon.jit
def leave_factors(u, at, W: gl.constexpr):
    """Leaves u of all warps, a product's result, in halves."""
    hi, lo = halves(u)
    x = gl.permute(gl.reshape(gl.join(hi, lo), [W, 2, 8, 2, 4, 2, 2]), (0, 6, 2, 4, 3, 1, 5))
    at.store(gl.reshape(x, [W, 2, 32, 8]))


@gluon.jit
def factors_of_block(at, W: gl.constexpr):
    """u of one block as left operands of every warp, in halves."""
    P: gl.constexpr = layouts.products(W)
    x = gl.permute(gl.reshape(at.load(factors_of_all(W)), [2, 8, 4, 2, 2, 2]), (4, 1, 3, 2, 5, 0))
    hi, lo = gl.split(gl.reshape(x, [16, 16, 2]))
    return as_left(known(hi, W, 16), P), as_left(known(lo, W, 16), P)


@gluon.jit
def factors_of_own_block(at, W: gl.constexpr):
    """u of each warp's own block as left operands, in halves."""
    P: gl.constexpr = layouts.products(W)
    x = gl.permute(gl.reshape(at.load(own_factors(W)), [W, 2, 8, 4, 2, 2, 2]), (0, 5, 2, 4, 3, 6, 1))
    hi, lo = gl.split(gl.reshape(x, [W, 16, 16, 2]))
    hi, lo = gl.convert_layout(hi, P, assert_trivial=True), gl.convert_layout(lo, P, assert_trivial=True)
    return as_left(hi, P), as_left(lo, P)


@gluon.jit
def over_warps(x, at, W: gl.constexpr):
    """A product's result summed over warps, known to all; at: [W, 2, 32, 4]."""
    x = gl.permute(gl.reshape(x, [W, 2, 8, 2, 4, 2]), (0, 1, 2, 4, 3, 5))
    at.store(gl.reshape(x, [W, 2, 32, 4]))
    x = gl.permute(gl.reshape(gl.sum(at.load(pieces_of_all(W)), 0), [2, 8, 4, 2, 2]), (0, 1, 3, 2, 4))
    return known(gl.reshape(x, [16, 16]), W, 16)
