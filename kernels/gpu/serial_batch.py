"""The serial verification kernel for batches: programs that stay, each walking through many tiles of many sessions.

What it computes and with which operations, in which order, is what serial_split.py does: the same bits. With more tiles
than the GPU holds at once, programs there would load, walk and end in step, and memory would rest while they walk. Here
as many programs as fit take turns over all tiles, and each has the next tile of S and its pending factors on their way
to shared memory (cp.async) while it walks through a tree. So what lies behind the ring of shared memory is read at the
speed of memory, and what a tile costs is its instructions.

A program's tile has 32 columns where V allows it: what a thread does to unpack k and q and to exchange sums is for four
columns then, not for two, and S is read in whole lines of 128 bytes. States that find no place in shared memory are
kept in the workspace, which has room for each program, not for each tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu import layouts
from specla.kernels.gpu.layouts import along
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.serial_layouts import PARTS, by_quad, known_to_all, one_key, swizzled
from specla.kernels.gpu.serial_layouts import tile as tile_layout
from specla.kernels.gpu.serial_split import COLUMNS, PROGRAMS
from specla.kernels.gpu.serial_walk import (
    ask_eight,
    eight_rows,
    load_key,
    numbers,
    only_operands,
    only_row,
    quad_places,
    quads,
    walk,
)
from specla.kernels.gpu.tile_commit import outer_step

_MULTIPROCESSORS = 132  # of an H100 or H200, as in serial_split.py


class BatchForm(NamedTuple):
    """How the work is cut."""

    columns: int
    stages: int
    """Tiles of S that have room in shared memory, those on their way among them."""
    near: int
    """Places for kept states in shared memory."""
    asked: int
    """Pending factors that come with the tile; others are read when they are applied."""
    programs: int
    """On a multiprocessor."""
    registers: int


@gluon.jit
def _named(
    unit,
    units,
    p_slot,
    p_pending_len,
    p_pending,
    PENDING: gl.constexpr,
    TILES: gl.constexpr,
    ASKED: gl.constexpr,
    K_ROWS: gl.constexpr,
    U_ROWS: gl.constexpr,
    G_ROWS: gl.constexpr,
):
    """What must be known of a unit before its loads can begin: slot (-1 past the last), pending factors, their rows."""
    i_b = gl.minimum(unit, units - 1) // TILES
    slot = gl.where(unit < units, gl.load(p_slot + i_b), -1)
    p_pending += i_b * PENDING
    o_k, o_u = gl.arange(0, ASKED, layout=K_ROWS), gl.arange(0, ASKED, layout=U_ROWS)
    o_g = gl.arange(0, ASKED, layout=G_ROWS)
    k_row = gl.load(p_pending + o_k, mask=o_k < PENDING, other=0)
    u_row = gl.load(p_pending + o_u, mask=o_u < PENDING, other=0)
    g_row = gl.load(p_pending + o_g, mask=o_g < PENDING, other=0)
    return slot, gl.load(p_pending_len + i_b), k_row, u_row, g_row


@gluon.jit
def _ask(
    unit,
    slot,
    n_pending,
    k_row,
    u_row,
    g_row,
    p_state,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    at_s,
    at_k,
    at_u,
    at_g,
    POOL: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    ASKED: gl.constexpr,
    COPY_S: gl.constexpr,
    COPY_K: gl.constexpr,
    COPY_U: gl.constexpr,
):
    """Has a unit's tile of S and its pending factors on their way."""
    own = slot.to(gl.int64)
    i_h, i_v = unit // (V // C) % HV, unit % (V // C)
    i_hk, pool = i_h // (HV // H), own * POOL
    WIDTH: gl.constexpr = at_k.shape[1]
    p_s = p_state + (own * HV + i_h) * K * V + i_v * C
    p_k = p_pool_k + (pool * H + i_hk) * WIDTH + gl.expand_dims(k_row, 1) * (H * WIDTH)
    p_u = p_pool_u + (pool * HV + i_h) * V + i_v * C + gl.expand_dims(u_row, 1) * (HV * V)
    p_g = p_pool_g + pool * HV + i_h + g_row * HV
    if slot >= 0:
        async_copy.async_copy_global_to_shared(at_s, p_s + along(K, COPY_S, 2, 0) * V + along(C, COPY_S, 2, 1))
        if n_pending > 0:
            m_k, m_u = along(ASKED, COPY_K, 2, 0) < n_pending, along(ASKED, COPY_U, 2, 0) < n_pending
            async_copy.async_copy_global_to_shared(at_k, p_k + along(WIDTH, COPY_K, 2, 1), mask=m_k)
            async_copy.async_copy_global_to_shared(at_u, p_u + along(C, COPY_U, 2, 1), mask=m_u)
            o_g = gl.arange(0, ASKED, layout=g_row.type.layout)
            async_copy.async_copy_global_to_shared(at_g, p_g, mask=o_g < n_pending)
    async_copy.commit_group()


@gluon.jit
def _committed(s, g, key, u, K: gl.constexpr, C: gl.constexpr, ACROSS: gl.constexpr):
    """The tile after a factor: its key as loaded, u [C]."""
    for axis in gl.static_range(4):
        u = gl.expand_dims(u, axis)
    return outer_step(s, gl.exp(g), numbers(key, K, C, ACROSS), u)


@gluon.jit
def verify_batch_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_state,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    p_o,
    p_kept,
    p_slot,
    p_row_start,
    p_pending_len,
    p_write_state,
    p_pending,
    p_pool_row,
    p_schedule_len,
    p_schedule,
    units,
    POOL: gl.constexpr,
    PENDING: gl.constexpr,
    STEPS: gl.constexpr,
    STEPS_2: gl.constexpr,
    PLACES: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    STAGES: gl.constexpr,
    NEAR: gl.constexpr,
    ASKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid of programs; each takes every so many-th of `units` tiles, V / C for each head and session."""
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
    ACROSS: gl.constexpr = STEPS == 1
    Q: gl.constexpr = by_quad(K // 4, C, ACROSS)
    TILES: gl.constexpr = HV * (V // C)  # of a session
    PACKED: gl.constexpr = p_k.dtype.element_ty == gl.bfloat16
    WIDTH: gl.constexpr = K // 2 if PACKED else K  # of a pending k as it is copied
    KEY: gl.constexpr = gl.int32 if PACKED else p_k.dtype.element_ty
    VECTOR: gl.constexpr = 128 // KEY.primitive_bitwidth
    LANES: gl.constexpr = 32 if WIDTH // VECTOR > 32 else WIDTH // VECTOR
    COPY_S: gl.constexpr = gl.BlockedLayout([1, 4], [128 // C, C // 4], [4, 1], [1, 0])
    COPY_K: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    COPY_U: gl.constexpr = gl.BlockedLayout([1, 4], [128 // C, C // 4], [4, 1], [1, 0])
    COPY_G: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    K_ROWS: gl.constexpr = gl.SliceLayout(1, COPY_K)
    U_ROWS: gl.constexpr = gl.SliceLayout(1, COPY_U)
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FAR: gl.constexpr = PLACES - NEAR if PLACES > NEAR else 0
    p_far = p_kept + gl.program_id(0).to(gl.int64) * (FAR * K * C)
    p_pool_words = p_pool_k.to(gl.pointer_type(gl.int32)) if PACKED else p_pool_k

    at_s = gl.allocate_shared_memory(gl.float32, [STAGES, K, C], swizzled(K // 4, C))
    at_k = layouts.shared_blocks(KEY, STAGES * ASKED, [WIDTH])
    at_u = layouts.shared_blocks(gl.float32, STAGES * ASKED, [C])
    at_g = layouts.shared_blocks(gl.float32, STAGES * ASKED, [1])
    ring_k = at_k._reinterpret(KEY, [STAGES, ASKED, WIDTH], layouts.plain([ASKED, WIDTH]))
    ring_u = at_u._reinterpret(gl.float32, [STAGES, ASKED, C], layouts.plain([ASKED, C]))
    ring_g = at_g._reinterpret(gl.float32, [STAGES, ASKED], layouts.plain([ASKED]))
    if STEPS > 1:
        at_words = layouts.shared_blocks(gl.int32, 2 * STEPS_2, [1])
        all_words = at_words._reinterpret(gl.int32, [2 * STEPS_2], layouts.plain([2 * STEPS_2]))

    programs = gl.num_programs(0)
    ahead = gl.program_id(0)
    for stage in gl.static_range(STAGES - 1 if STAGES > 1 else 1):
        slot, n_pending, k_row, u_row, g_row = _named(
            ahead, units, p_slot, p_pending_len, p_pending, PENDING, TILES, ASKED, K_ROWS, U_ROWS, COPY_G
        )
        _ask(
            *(ahead, slot, n_pending, k_row, u_row, g_row, p_state, p_pool_words, p_pool_u, p_pool_g),
            *(at_s.index(stage), ring_k.index(stage), ring_u.index(stage), ring_g.index(stage)),
            *(POOL, H, HV, K, V, C, ASKED, COPY_S, COPY_K, COPY_U),
        )
        ahead += programs
    slot, n_pending, k_row, u_row, g_row = _named(
        ahead, units, p_slot, p_pending_len, p_pending, PENDING, TILES, ASKED, K_ROWS, U_ROWS, COPY_G
    )
    if OVERLAP:  # all above needs nothing of the kernel before
        gdc_wait()
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()
    stage = 0
    for unit in range(gl.program_id(0), units, programs):
        i_b, i_h, i_v = unit // TILES, unit // (V // C) % HV, unit % (V // C)
        own_slot = gl.load(p_slot + i_b).to(gl.int64)
        n_steps = gl.load(p_schedule_len + i_b)
        alive = (own_slot >= 0) & (n_steps > 0)
        start = gl.where(alive, gl.load(p_row_start + i_b), 0)
        waiting = gl.where(own_slot < 0, 0, gl.load(p_pending_len + i_b))
        write_state = gl.load(p_write_state + i_b)
        i_hk, pool = i_h // (HV // H), own_slot * POOL
        p_steps = p_schedule + i_b * STEPS
        o_key, o_head = (start * H + i_hk) * K, start * HV + i_h
        o_value = o_head * V + i_v * C
        if STEPS == 1:
            row = only_operands(
                *(p_q + o_key, p_k + o_key, p_v + o_value, p_g + o_head, p_beta + o_head, p_pool_row + start, K, C)
            )
        else:
            each = gl.arange(0, 2 * STEPS_2, layout=EACH)
            b_words = gl.load(p_steps + each, mask=each < n_steps, other=0)
            word = gl.load(p_steps)
            next_word = gl.load(p_steps + 1)
            inputs = (p_q + o_key, p_k + o_key, p_v + o_value, p_g + o_head, p_beta + o_head)
            rows = eight_rows(p_steps, p_pool_row + start, 0, gl.where(alive, n_steps, 0), K, C)
            eight = ask_eight(*rows, *inputs, H, HV, K, V, C)
            rows = eight_rows(p_steps, p_pool_row + start, 8, gl.where(alive, n_steps, 0), K, C)
            eight_more = ask_eight(*rows, *inputs, H, HV, K, V, C)
        if STAGES > 1:
            at = (stage + STAGES - 1) % STAGES
            _ask(
                *(ahead, slot, n_pending, k_row, u_row, g_row, p_state, p_pool_words, p_pool_u, p_pool_g),
                *(at_s.index(at), ring_k.index(at), ring_u.index(at), ring_g.index(at)),
                *(POOL, H, HV, K, V, C, ASKED, COPY_S, COPY_K, COPY_U),
            )
        async_copy.wait_group(STAGES - 1)
        s = quads(at_s.index(stage).load(tile_layout(K // 4, C, ACROSS)), K, C, ACROSS)
        for i in range(0, gl.minimum(waiting, ASKED)):
            i_ring = stage * ASKED + i
            key = at_k.index(i_ring).load(one_key(K // 4, C, ACROSS, PACKED))
            u = at_u.index(i_ring).load(layouts.along_alone(Q, 5, 4))
            g = gl.sum(at_g.index(i_ring).load(known_to_all(1)), 0)
            s = _committed(s, g, key, u, K, C, ACROSS)
        if STAGES == 1:
            _ask(
                *(ahead, slot, n_pending, k_row, u_row, g_row, p_state, p_pool_words, p_pool_u, p_pool_g),
                *(at_s.index(0), ring_k.index(0), ring_u.index(0), ring_g.index(0)),
                *(POOL, H, HV, K, V, C, ASKED, COPY_S, COPY_K, COPY_U),
            )
        ahead += programs
        slot, n_pending, k_row, u_row, g_row = _named(
            ahead, units, p_slot, p_pending_len, p_pending, PENDING, TILES, ASKED, K_ROWS, U_ROWS, COPY_G
        )
        stage = (stage + 1) % STAGES
        p_own_u = p_pool_u + (pool * HV + i_h) * V + i_v * C
        for i in range(ASKED, waiting):
            pool_row = gl.load(p_pending + i_b * PENDING + i)
            key = load_key(p_pool_k + (pool * H + i_hk + pool_row * H) * K, K, C, ACROSS)
            u = gl.load(p_own_u + pool_row * (HV * V) + gl.arange(0, C, layout=layouts.along_alone(Q, 5, 4)))
            s = _committed(s, gl.load(p_pool_g + (pool + pool_row) * HV + i_h), key, u, K, C, ACROSS)
        if (waiting > 0) & (write_state != 0):
            gl.store(p_state + (own_slot * HV + i_h) * K * V + i_v * C + quad_places(K, C, ACROSS, V), s)
        if alive:
            if STEPS == 1:
                only_row(s, *row, p_o + o_value, p_own_u, HV, K, V, C)
            else:
                all_words.store(b_words)
                walk(
                    *(s, at_words, word, next_word, n_steps),
                    *inputs,
                    *(p_pool_row + start, p_o + o_value, p_own_u, p_steps, p_far, eight, eight_more),
                    *(p_state, p_slot, 0, 0, False, PLACES, NEAR, H, HV, K, V, C),
                )


def batch_form(bucket: Bucket, value_heads: int, value_width: int) -> BatchForm | None:
    """How a bucket's launches are cut; None where they are fewer programs of serial_split.py than fit at once."""
    if bucket.groups > 1 or bucket.sessions * value_heads * (value_width // COLUMNS) <= PROGRAMS:
        return None
    columns = 32 if value_width % 32 == 0 else 16
    if bucket.tree_rows == 1:
        return BatchForm(columns, 2, 0, 4, 3, 168)
    return BatchForm(columns, 1, 1, 8, 3, 168)


def programs_of(bucket: Bucket, value_heads: int, value_width: int, form: BatchForm) -> int:
    """Programs of a launch."""
    return min(_units(bucket, value_heads, value_width, form), _MULTIPROCESSORS * form.programs)


def _units(bucket: Bucket, value_heads: int, value_width: int, form: BatchForm) -> int:
    return bucket.sessions * value_heads * (value_width // form.columns)


def launch_batch(
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    bucket: Bucket,
    places: int,
    form: BatchForm,
    overlap: int,
) -> None:
    """`serial.verify_serial` by this kernel; the arguments are checked and laid out there.

    `tensors` are by the names of the kernel's parameters, `sizes` those of the layer, `places` how many states a walk
    keeps at most.
    """
    verify_batch_kernel[(programs_of(bucket, sizes["HV"], sizes["V"], form),)](
        **tensors,
        units=_units(bucket, sizes["HV"], sizes["V"], form),
        **sizes,
        STEPS=bucket.tree_rows,
        STEPS_2=1 << (bucket.tree_rows - 1).bit_length(),
        PLACES=places,
        C=form.columns,
        STAGES=form.stages,
        NEAR=form.near,
        ASKED=form.asked,
        OVERLAP=overlap,
        num_warps=PARTS,
        maxnreg=form.registers,
        launch_pdl=overlap > 0,
    )
