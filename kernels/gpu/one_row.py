"""The kernel of between_mixers.py: four products of one row and two norms, on all multiprocessors at once; in Gluon.

One warp asks for the program's weights, block by block through all four products, another for the rows that come from
memory, and four multiply and norm. Units of work are tiles of 64 outputs, of which wgmma multiplies no fewer, times
parts of K; where the last round would keep few programs busy, half tiles are shared out, whose other half of sums is
of whatever lay in the ring and is not stored.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import powers
from specla.kernels.gpu.product_streamed import finished, first_output, result, ring, warpgroup_products

TILE = 64
"""Outputs of a unit of work."""
BLOCK = 128
"""Of K, asked for and multiplied at a time."""
HALF_BLOCK = 64
"""Of K: what lies together in shared memory."""
PLACES = 8
"""For rows in a product, of which one counts."""
WARPS = 4
"""That multiply and norm."""

_TILE, _BLOCK, _HALF_BLOCK = gl.constexpr(TILE), gl.constexpr(BLOCK), gl.constexpr(HALF_BLOCK)
_PLACES, _WARPS = gl.constexpr(PLACES), gl.constexpr(WARPS)
_SHARES = gl.constexpr(8)  # of the row: the warps that norms.py gives it


@constexpr_function
def _row(width: int) -> Any:
    """A row [8 shares, width / 8] as norms.py's eight warps have it, two shares a warp."""
    each = width // 256
    regs = [[0, x] for x in powers(1, each)] + [[4, 0]]
    lanes = [[0, x] for x in powers(each, width // 8)]
    return gl.DistributedLinearLayout(regs, lanes, [[1, 0], [2, 0]], [], [8, width // 8])


@constexpr_function
def _across() -> Any:
    """[8], one a lane, in every warp."""
    return gl.DistributedLinearLayout([], [[1], [2], [4], [0], [0]], [[0], [0]], [], [8])


@constexpr_function
def _repeated(width: int) -> Any:
    """[width / 64, 8 places, 64]: a thread has runs of 8 columns in all places."""
    runs = [[x, 0, 0] for x in powers(1, width // 64)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], *runs[:2]]
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0], *runs[4:]]
    warps = (runs[2:4] + [[0, 0, 0]] * 2)[:2]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [width // 64, 8, 64])


@constexpr_function
def _steps(sizes: tuple[int, int, int]) -> int:
    """Blocks of K of one unit."""
    return sizes[1] // sizes[2] // 128


@constexpr_function
def _units(sizes: tuple[int, int, int]) -> int:
    """Tiles of outputs times parts of K."""
    return -(-sizes[0] // 64) * sizes[2]


@constexpr_function
def _whole(sizes: tuple[int, int, int], programs: int) -> int:
    """Units that stay whole: of a last round with few, halves are shared out."""
    units: int = _units(sizes)
    rest = units % programs
    halved = sizes[2] == 1 and sizes[0] % 64 == 0 and units > programs and 2 * rest <= programs
    return units - rest if halved else units


@constexpr_function
def _early(number: int, pace: tuple[int, ...]) -> int:
    """After how many of a product's blocks the first one's row is waited for: gate-up alone need not have it."""
    return pace[4] if number == 1 else -1


@constexpr_function
def _ahead(number: int, pace: tuple[int, ...]) -> int:
    """How many blocks a product with no more of them has had asked for when its row is waited for; the first has not
    to wait at its end."""
    return pace[3] if number > 0 else -1


@gluon.jit
def _mine(SIZES: gl.constexpr, PROGRAMS: gl.constexpr):
    """How many units this program has, halves among them."""
    WHOLE: gl.constexpr = _whole(SIZES, PROGRAMS)
    count = (WHOLE - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS
    return count + (gl.program_id(0) < 2 * (_units(SIZES) - WHOLE)).to(gl.int32)


@gluon.jit
def _arrived(p_arrived):
    """How many programs have arrived; who sees that sees what they wrote before."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [p_arrived.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def _meet(p_arrived, all_there):
    """Waits until all programs are here; returns how many arrivals the next meeting waits for."""
    layouts.barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.release.gpu.global.add.u64 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l",
        [p_arrived.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    seen = _arrived(p_arrived)
    while seen < all_there:
        seen = _arrived(p_arrived)
    layouts.barrier()
    return all_there + gl.num_programs(0)


@gluon.jit
def _ask_unit(
    weight, first, key, at_w, full, empty, ready, block, done,
    STEPS: gl.constexpr, OUTPUTS: gl.constexpr, NUMBER: gl.constexpr, PACE: gl.constexpr,
):  # fmt: skip
    """Has a unit's blocks on their way, each once there is a place and few enough others are.

    `block` counts all of the program's blocks, `done` those of this product.
    """
    STAGES: gl.constexpr = PACE[0]
    for step in range(STEPS):
        if done == _early(NUMBER, PACE):
            mbarrier.wait(ready.index(0), 0)
        if done == PACE[3]:
            mbarrier.wait(ready.index(NUMBER), 0)
        slot = block % STAGES
        mbarrier.wait(empty.index(slot), (block // STAGES + 1) & 1)
        landed = block - gl.where(done < PACE[3], PACE[2], PACE[1])
        if landed >= 0:
            mbarrier.wait(full.index(landed % STAGES), landed // STAGES & 1)
        mbarrier.expect(full.index(slot), OUTPUTS * _BLOCK * 2)
        for i in gl.static_range(2):
            place = at_w.index(slot * 2 + i)
            at = place._reinterpret(at_w.dtype, [_TILE // OUTPUTS, OUTPUTS // 16, 2, 8, _HALF_BLOCK], ring(4)).index(0)
            at_key = key + step * _BLOCK + i * _HALF_BLOCK
            tma.async_copy_global_to_shared(weight, [first // 16, 0, 0, at_key], full.index(slot), at)
        block += 1
        done += 1
    return block, done


@gluon.jit
def _ask_weights(
    weight, half, at_w, full, empty, ready, block,
    SIZES: gl.constexpr, NUMBER: gl.constexpr, PROGRAMS: gl.constexpr, PACE: gl.constexpr,
):  # fmt: skip
    """Has the program's blocks of a product on their way, most of them once the product's row is there."""
    PARTS: gl.constexpr = SIZES[2]
    STEPS: gl.constexpr = _steps(SIZES)
    WHOLE: gl.constexpr = _whole(SIZES, PROGRAMS)
    block, done = gl.to_tensor(block), gl.to_tensor(0)
    for unit in range(gl.program_id(0), WHOLE, PROGRAMS):
        first, key = first_output(unit // PARTS, SIZES[0], _TILE), unit % PARTS * (SIZES[1] // PARTS)
        block, done = _ask_unit(weight, first, key, at_w, full, empty, ready, block, done, STEPS, _TILE, NUMBER, PACE)
    if _units(SIZES) > WHOLE:  # noqa: SIM102 - known when compiled
        if gl.program_id(0) < 2 * (_units(SIZES) - WHOLE):
            first = WHOLE * _TILE + gl.program_id(0) * (_TILE // 2)
            block, done = _ask_unit(
                half, first, 0, at_w, full, empty, ready, block, done, STEPS, _TILE // 2, NUMBER, PACE
            )
    if done <= _early(NUMBER, PACE):
        mbarrier.wait(ready.index(0), 0)
    if done <= _ahead(NUMBER, PACE):
        mbarrier.wait(ready.index(NUMBER), 0)
    return block


@gluon.jit
def _ask_all_weights(
    weights, half, at_w, full, empty, ready, ALL: gl.constexpr, PROGRAMS: gl.constexpr, PACE: gl.constexpr
):
    """Through all four products; only those of gate-up and what follows, whose K is whole, are ever halved."""
    OUTPUT: gl.constexpr = ALL[0]
    GATE_UP: gl.constexpr = ALL[1]
    DOWN: gl.constexpr = ALL[2]
    NEXT: gl.constexpr = ALL[3]
    block = _ask_weights(weights[0], half[0], at_w, full, empty, ready, 0, OUTPUT, 0, PROGRAMS, PACE)
    block = _ask_weights(weights[1], half[1], at_w, full, empty, ready, block, GATE_UP, 1, PROGRAMS, PACE)
    block = _ask_weights(weights[2], half[2], at_w, full, empty, ready, block, DOWN, 2, PROGRAMS, PACE)
    if NEXT[0] > 0:
        _ask_weights(weights[3], half[3], at_w, full, empty, ready, block, NEXT, 3, PROGRAMS, PACE)


@gluon.jit
def _ask_row(x, at_x, there, ready, SIZES: gl.constexpr, NUMBER: gl.constexpr):
    """Has the part of a row that the program's unit multiplies on its way, once the row is there."""
    PARTS: gl.constexpr = SIZES[2]
    LENGTH: gl.constexpr = SIZES[1] // PARTS
    mbarrier.wait(ready.index(NUMBER), 0)
    # What other programs stored is read by the copy engine: another way to memory.
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    mbarrier.expect(there, _PLACES * LENGTH * 2)
    for i in gl.static_range(LENGTH // _HALF_BLOCK):
        key = gl.program_id(0) % PARTS * LENGTH + i * _HALF_BLOCK
        tma.async_copy_global_to_shared(x, [0, key], there, at_x.index(i))


@gluon.jit
def _ask_rows(mixed, activated, at_x, there, ready, ALL: gl.constexpr):
    """The rows that come from elsewhere: the two others are normed in place."""
    OUTPUT: gl.constexpr = ALL[0]
    DOWN: gl.constexpr = ALL[2]
    _ask_row(mixed, at_x, there.index(0), ready, OUTPUT, 0)
    _ask_row(activated, at_x, there.index(1), ready, DOWN, 2)


@gluon.jit
def _store(acc, p_out, n, output, own, end, N: gl.constexpr, SWIGLU: gl.constexpr):
    """Stores a tile's sums that begin at an output, those from `own` to `end`."""
    y = finished(acc, _TILE, _PLACES, _WARPS, SWIGLU)
    EACH: gl.constexpr = 2 if SWIGLU else 1
    OUT: gl.constexpr = result(_WARPS, _TILE, _PLACES, SWIGLU)
    i_output = output // EACH + gl.arange(0, _TILE // EACH, layout=gl.SliceLayout(1, OUT))
    place = gl.arange(0, _PLACES, layout=gl.SliceLayout(0, OUT))
    mask = gl.expand_dims(place < n, 0) & gl.expand_dims((i_output >= own // EACH) & (i_output < end // EACH), 1)
    at = p_out + gl.expand_dims(place * (N // EACH), 0) + gl.expand_dims(i_output, 1)
    gl.store(at, y.to(p_out.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(
    p_out, n, block, at_w, full, empty, at_x,
    SIZES: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    """One product of the row that lies at `at_x`; returns the number of the program's next block."""
    N: gl.constexpr = SIZES[0]
    PARTS: gl.constexpr = SIZES[2]
    STEPS: gl.constexpr = _steps(SIZES)
    WHOLE: gl.constexpr = _whole(SIZES, PROGRAMS)
    block = gl.to_tensor(block)
    for i_unit in range(_mine(SIZES, PROGRAMS)):
        acc = gl.zeros([_TILE, _PLACES], gl.float32, warpgroup_products(_WARPS, _PLACES))
        for step in range(STEPS):
            slot = (block + step) % STAGES
            mbarrier.wait(full.index(slot), (block + step) // STAGES & 1)
            for i in gl.static_range(2):
                acc = warpgroup_mma(
                    at_w.index(slot * 2 + i), at_x.index(step * 2 + i).permute((1, 0)), acc, is_async=True
                )
            acc = warpgroup_mma_wait(2, deps=[acc])
            layouts.barrier()
            mbarrier.arrive(empty.index((block + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        block += STEPS
        layouts.barrier()
        mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
        unit = gl.program_id(0) + i_unit * PROGRAMS
        if unit < WHOLE:
            tile = unit // PARTS
            _store(acc, p_out + unit % PARTS * N, n, first_output(tile, N, _TILE), tile * _TILE, N, N, SWIGLU)
        elif _units(SIZES) > WHOLE:  # the other half of the sums is of whatever lay in the ring
            first = WHOLE * _TILE + gl.program_id(0) * (_TILE // 2)
            _store(acc, p_out, n, first, first, first + _TILE // 2, N, SWIGLU)
    return block


@gluon.jit
def _add_and_norm(
    p_stream, p_added, p_sum, p_weight, p_final, at_x, n, eps,
    D: gl.constexpr, PARTS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """stream + added, normed, in all places of `at_x`, or behind the last layer in memory; the first program stores
    the sum."""
    SHARE: gl.constexpr = D // _SHARES
    ROW: gl.constexpr = _row(D)
    i_share = gl.arange(0, _SHARES, layout=gl.SliceLayout(1, ROW))
    i_own = gl.arange(0, SHARE, layout=gl.SliceLayout(0, ROW))
    o_d = gl.expand_dims(i_share * SHARE, 1) + gl.expand_dims(i_own, 0)
    weight = gl.load(p_weight + o_d)
    x = gl.load(p_stream + o_d)
    added = gl.load(p_added + o_d)
    for i in gl.static_range(1, PARTS):
        added += gl.load(p_added + i * D + o_d)
    x += added
    squares = gl.convert_layout(gl.sum(x * x, 1), _across())
    scale = 1.0 / gl.sqrt(gl.sum(squares, 0) / D + eps)
    y = (x * scale * weight).to(at_x.dtype)
    if (gl.program_id(0) == 0) & (n > 0):
        gl.store(p_sum + o_d, x)
        if LAST:
            gl.store(p_final + o_d, y)
    if not LAST:
        EVERYWHERE: gl.constexpr = _repeated(D)
        once = gl.convert_layout(gl.reshape(y, [D // _HALF_BLOCK, _HALF_BLOCK]), gl.SliceLayout(1, EVERYWHERE))
        places = gl.zeros([D // _HALF_BLOCK, _PLACES, _HALF_BLOCK], y.dtype, EVERYWHERE)
        repeated, _ = gl.broadcast(gl.expand_dims(once, 1), places)
        every = at_x._reinterpret(at_x.dtype, at_x.shape, ring(3))
        every.slice(0, D // _HALF_BLOCK).store(repeated)
        fence_async_shared()
    layouts.barrier()


@gluon.jit
def _work(
    at_w, full, empty, at_x, there, ready,
    p_stream, p_sum, p_from_mixer, p_from_mlp, p_mlp_norm, p_next_norm, p_activated, p_next, p_final, p_rows,
    p_arrived, eps,
    ALL: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The program's products and norms."""
    OUTPUT: gl.constexpr = ALL[0]
    GATE_UP: gl.constexpr = ALL[1]
    DOWN: gl.constexpr = ALL[2]
    NEXT: gl.constexpr = ALL[3]
    D: gl.constexpr = OUTPUT[0]
    OUTPUT_PARTS: gl.constexpr = OUTPUT[2]
    DOWN_PARTS: gl.constexpr = DOWN[2]
    LAST: gl.constexpr = NEXT[0] == 0
    n = gl.load(p_rows)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # Fewer than all can have arrived while this program has not: whole rounds are of launches before.
    all_there = (_arrived(p_arrived) // PROGRAMS + 1) * PROGRAMS
    mbarrier.arrive(ready.index(0), count=1)
    mbarrier.wait(there.index(0), 0)
    block = _multiply(p_from_mixer, n, 0, at_w, full, empty, at_x, OUTPUT, PROGRAMS, STAGES, False)
    all_there = _meet(p_arrived, all_there)
    _add_and_norm(p_stream, p_from_mixer, p_sum, p_mlp_norm, p_final, at_x, n, eps, D, OUTPUT_PARTS, False)
    mbarrier.arrive(ready.index(1), count=1)
    block = _multiply(p_activated, n, block, at_w, full, empty, at_x, GATE_UP, PROGRAMS, STAGES, True)
    all_there = _meet(p_arrived, all_there)
    mbarrier.arrive(ready.index(2), count=1)
    mbarrier.wait(there.index(1), 0)
    block = _multiply(p_from_mlp, n, block, at_w, full, empty, at_x, DOWN, PROGRAMS, STAGES, False)
    _meet(p_arrived, all_there)
    _add_and_norm(p_sum, p_from_mlp, p_stream, p_next_norm, p_final, at_x, n, eps, D, DOWN_PARTS, LAST)
    if not LAST:
        mbarrier.arrive(ready.index(3), count=1)
        _multiply(p_next, n, block, at_w, full, empty, at_x, NEXT, PROGRAMS, STAGES, False)


@gluon.jit
def between_mixers_kernel(
    mixed, activated, w_output, w_gate_up, w_down, w_next, h_gate_up, h_next,
    p_stream, p_sum, p_from_mixer, p_from_mlp, p_mlp_norm, p_next_norm, p_activated, p_next, p_final, p_rows,
    p_arrived, eps,
    ALL: gl.constexpr, PROGRAMS: gl.constexpr, PACE: gl.constexpr, BLOCKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid: all programs at once. ALL are (N, K, parts of K) of the products, BLOCKS the row's half blocks of K."""
    STAGES: gl.constexpr = PACE[0]
    at_w = gl.allocate_shared_memory(w_output.dtype, [STAGES * 2, _TILE, _HALF_BLOCK], ring(2))
    at_x = gl.allocate_shared_memory(w_output.dtype, [BLOCKS, _PLACES, _HALF_BLOCK], ring(2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(there.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    layouts.barrier()
    weights, halves = (w_output, w_gate_up, w_down, w_next), (w_output, h_gate_up, w_down, h_next)
    gl.warp_specialize(
        [
            (
                _work,
                (
                    at_w, full, empty, at_x, there, ready, p_stream, p_sum, p_from_mixer, p_from_mlp, p_mlp_norm,
                    p_next_norm, p_activated, p_next, p_final, p_rows, p_arrived, eps, ALL, PROGRAMS, STAGES, OVERLAP,
                ),
            ),
            (_ask_all_weights, (weights, halves, at_w, full, empty, ready, ALL, PROGRAMS, PACE)),
            (_ask_rows, (mixed, activated, at_x, there, ready, ALL)),
        ],
        [1, 1],  # warps of all but the first
        [40, 40],  # their registers
    )  # fmt: skip
