"""The serial verification kernel with K shared out over four warps: the pinned form for the usual widths.

What it computes, how trees become groups and why bits are fixed stands in serial.py. Here a program owns 16 columns of
one head's state and each warp a quarter of K: a thread has 16 rows of S by 2 columns (K = 256). How it walks through a
tree stands in serial_walk.py. For batches of more programs than the GPU holds at once there is serial_batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu import layouts
from specla.kernels.gpu.commit import AT_ONCE
from specla.kernels.gpu.layouts import along, barrier, prefetch
from specla.kernels.gpu.overlap import ADMITS_AT_START, ADMITS_ONCE_WAITED
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.serial_layouts import PARTS, swizzled
from specla.kernels.gpu.serial_layouts import tile as tile_layout
from specla.kernels.gpu.serial_walk import ROW_MASK, ask_eight, eight_rows, only_operands, only_row, quads, walk
from specla.kernels.gpu.tile_commit import committed

COLUMNS = 16
WIDTHS = (64, 128, 256)
"""Of keys; others go the way of serial.py."""

NEAR = 2
"""Places in shared memory; others lie in the workspace."""

PROGRAMS = 4 * 132
"""Of 16 columns that an H100 or H200 holds at once; others hold fewer or more, which costs time and nothing else."""

_NEAR = gl.constexpr(NEAR)
_REGISTERS = {16: 128, 32: 168}
_RESIDENT = {16: 4, 32: 3}  # programs on a multiprocessor, by their registers


@gluon.jit
def _arrive(p_count, like):
    """Counts this program, by its first thread, which alone is told how many came before; `like` has an entry each."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.u32 $0, $2;
        @first atom.add.release.gpu.global.u32 $0, [$1], 1;
        }""",
        "=&r,l,r",
        [p_count.to(gl.int64), like],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def verify_split_kernel(
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
    p_arrived,
    p_slot,
    p_row_start,
    p_pending_len,
    p_write_state,
    p_groups,
    p_pending,
    p_pool_row,
    p_schedule_len,
    p_schedule,
    POOL: gl.constexpr,
    PENDING: gl.constexpr,
    STEPS: gl.constexpr,
    STEPS_2: gl.constexpr,
    GROUPS: gl.constexpr,
    PLACES: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    C: gl.constexpr,
    AT_ONCE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Grid (V / C, HV, sessions * groups)."""
    KP: gl.constexpr = K // W
    S: gl.constexpr = layouts.state(W, KP, C)
    S_K: gl.constexpr = gl.SliceLayout(2, S)
    S_V: gl.constexpr = gl.SliceLayout(1, S)
    i_v, i_h, i_bg = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()
    i_b = i_bg // GROUPS
    slot = gl.load(p_slot + i_b).to(gl.int64)
    n_steps = gl.load(p_schedule_len + i_bg)
    start = gl.load(p_row_start + i_b)
    n_pending = gl.load(p_pending_len + i_b)
    write_state = gl.load(p_write_state + i_b)
    if (slot < 0) | (n_steps == 0):
        if OVERLAP:  # as in held.py
            gdc_wait()
        return
    i_hk = i_h // (HV // H)
    pool = slot * POOL
    p_pending += i_b * PENDING
    p_state += (slot * HV + i_h) * K * V + i_v * C
    p_pool_k += (pool * H + i_hk) * K
    p_pool_u += (pool * HV + i_h) * V + i_v * C
    p_pool_g += pool * HV + i_h
    p_q += (start * H + i_hk) * K
    p_k += (start * H + i_hk) * K
    p_v += (start * HV + i_h) * V + i_v * C
    p_o += (start * HV + i_h) * V + i_v * C
    p_g += start * HV + i_h
    p_beta += start * HV + i_h
    p_pool_row += start
    p_steps = p_schedule + i_bg * STEPS
    tile = (i_b * HV + i_h) * gl.num_programs(0) + i_v
    FAR: gl.constexpr = PLACES - _NEAR if PLACES > _NEAR else 0
    p_far = p_kept + ((i_bg * HV + i_h) * gl.num_programs(0) + i_v).to(gl.int64) * (FAR * K * C)

    o_k = along(KP, S_K, 2, 1) + along(W, S_K, 2, 0) * KP
    o_v = along(C, S_V, 2, 1)
    o_s = gl.expand_dims(o_k, 2) * V + gl.expand_dims(o_v, 1)
    s = gl.load(p_state + o_s)
    if STEPS > 1:
        word = gl.load(p_steps)
        next_word = gl.load(p_steps + 1, mask=n_steps > 1, other=0)
        EACH: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
        LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32 * 64 // K, K // 64], [W, 1], [1, 0])
        i_step = gl.minimum(gl.arange(0, STEPS_2, layout=gl.SliceLayout(1, LINES)), n_steps - 1)
        line_row = gl.expand_dims(gl.load(p_steps + i_step) & ROW_MASK, 1)
        o_line = line_row * (H * K) + along(K // 64, LINES, 2, 1) * 64
        each = gl.arange(0, 2 * STEPS_2, layout=EACH)
        at_words = layouts.shared_blocks(gl.int32, 2 * STEPS_2, [1])
        words = at_words._reinterpret(gl.int32, [2 * STEPS_2], layouts.plain([2 * STEPS_2]))
        words.store(gl.load(p_steps + each, mask=each < n_steps, other=0))
        rows = eight_rows(p_steps, p_pool_row, 0, n_steps, K, C)
        more_rows = eight_rows(p_steps, p_pool_row, 8, n_steps, K, C)

    s = committed(s, p_pending, n_pending, p_pool_k, p_pool_u, p_pool_g, o_k, o_v, H, HV, K, V, AT_ONCE)
    # With several groups the last program that has read the tile stores it: see serial.py. With 32 columns it does so
    # once its rows are ready and the answer has come; with 16 that would write halves of sectors.
    STORES: gl.constexpr = GROUPS > 1 and STEPS > 1 and C == 32
    arrived = gl.full([32 * W], -1, gl.int32, gl.BlockedLayout([1], [32], [W], [0]))
    n_groups = gl.load(p_groups + i_b)
    if (n_pending > 0) & (write_state != 0):
        if STORES:
            barrier()
            arrived = _arrive(p_arrived + tile, arrived)
        elif GROUPS > 1:
            barrier()
            if gl.atomic_add(p_arrived + tile, 1, sem="release") == n_groups - 1:
                gl.store(p_state + o_s, s)
                gl.store(p_arrived + tile, 0)
        else:
            gl.store(p_state + o_s, s)
    if OVERLAP:  # all above needs nothing of the kernel before
        gdc_wait()
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()
    if STEPS == 1:
        row = only_operands(p_q, p_k, p_v, p_g, p_beta, p_pool_row, K, C)
        only_row(quads(s, K, C, True), *row, p_o, p_pool_u, HV, K, V, C)
    else:
        eight = ask_eight(*rows, p_q, p_k, p_v, p_g, p_beta, H, HV, K, V, C)
        eight_more = ask_eight(*more_rows, p_q, p_k, p_v, p_g, p_beta, H, HV, K, V, C)
        prefetch(p_k + o_line)
        prefetch(p_q + o_line)
        at_s = gl.allocate_shared_memory(gl.float32, [K, C], swizzled(KP, C))
        at_s.store(gl.convert_layout(gl.reshape(s, [K, C]), tile_layout(KP, C, True), assert_trivial=True))
        walk(
            quads(at_s.load(tile_layout(KP, C, False)), K, C, False),
            at_words,
            word,
            next_word,
            n_steps,
            p_q,
            p_k,
            p_v,
            p_g,
            p_beta,
            p_pool_row,
            p_o,
            p_pool_u,
            p_steps,
            p_far,
            eight,
            eight_more,
            p_state,
            p_arrived + tile,
            arrived,
            n_groups,
            STORES,
            PLACES,
            _NEAR,
            H,
            HV,
            K,
            V,
            C,
        )


def columns_of(bucket: Bucket, value_heads: int, key_width: int, value_width: int) -> int:
    """Of V that a program owns: 32 where the programs of 16 would not all be there at once.

    With narrow keys, where unpacking them weighs more, from half as many programs on if each walks a whole tree.
    """
    programs = bucket.sessions * bucket.groups * value_heads * (value_width // COLUMNS)
    few = PROGRAMS if key_width > 128 or bucket.groups > 1 else PROGRAMS // 2
    return 2 * COLUMNS if programs > few and value_width % (2 * COLUMNS) == 0 else COLUMNS


def fit_at_once(bucket: Bucket, value_heads: int, key_width: int, value_width: int) -> bool:
    """Whether an H100 or H200 holds all programs of a launch at once."""
    columns = columns_of(bucket, value_heads, key_width, value_width)
    programs = bucket.sessions * bucket.groups * value_heads * (value_width // columns)
    return programs <= PROGRAMS * _RESIDENT[columns] // _RESIDENT[COLUMNS]


def launch_split(
    tensors: Sequence[Tensor], sizes: Mapping[str, int], bucket: Bucket, places: int, columns: int, overlap: int
) -> None:
    """`serial.verify_serial` by this kernel; the arguments are checked and laid out there.

    `sizes` are those of the layer, `places` how many states a walk keeps at most, `columns` what `columns_of` gives.
    """
    verify_split_kernel[(sizes["V"] // columns, sizes["HV"], bucket.sessions * bucket.groups)](
        *tensors,
        **sizes,
        STEPS=bucket.tree_rows,
        STEPS_2=1 << (bucket.tree_rows - 1).bit_length(),
        GROUPS=bucket.groups,
        PLACES=places,
        W=PARTS,
        C=columns,
        AT_ONCE=AT_ONCE,
        OVERLAP=overlap,
        num_warps=PARTS,
        maxnreg=_REGISTERS[columns],
        launch_pdl=overlap > 0,
    )
