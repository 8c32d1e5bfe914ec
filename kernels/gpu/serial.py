"""The serial verification kernels: chains, and trees decomposed into chains. The only ones that exact mode uses.

A program owns one head's tile of the state, [K, BV], in registers. It applies the pending factors, stores the tile if
the pass says so, then walks rows: s <- alpha s; r = S^T k and y = S^T q, summed over K in one fixed order;
u = beta (v - r); s <- fma(k, u, s); o = y + (q . k) u. Nothing is written between rows but outputs and factors.

Trees. A bucket with one group walks the whole tree in a program, keeping a state where the tree branches and fetching
it for later children. With more groups, each is a program that walks its share of the leaves from the root on (see
schedule.py); all of them read the stored tile, and the last to have read it stores it with the pending factors.

Exactness. Every form that a layer's widths may take has the same arithmetic in the same order, so a row's bits depend
on its path alone: not on the tree, the batch, the groups, or whether its ancestors were candidates or committed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.commit import (
    AT_ONCE,
    apply_pending,
    check_places,
    check_state,
    key_order,
    load_key,
    outer_step,
    prefetch_pending,
)
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.overlap import Admit, admit_at_start, overlapping, wait_for_previous
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.schedule import EMIT_BIT, FETCH_SHIFT, KEEP_SHIFT, LEAF_BIT, PLACE_MASK, ROW_BITS, kept_places
from specla.kernels.gpu.serial_batch import BatchForm, batch_form, launch_batch, programs_of
from specla.kernels.gpu.serial_layouts import PARTS
from specla.kernels.gpu.serial_split import COLUMNS, NEAR, WIDTHS, columns_of, launch_split

_PREFETCHED = 8  # pending factors that are asked for as early as the state


class Tile(NamedTuple):
    """What a program of the serial kernels owns. Pinned: it decides the order of the sums over K."""

    block_k: int
    block_v: int
    warps: int


def serial_tile(key_width: int, value_width: int) -> Tile:
    """The tile for a layer's widths, whatever the batch. With one warp no sum crosses warps."""
    if splits(key_width, value_width):
        return Tile(key_width, COLUMNS, PARTS)
    block_k = triton.next_power_of_2(key_width)
    # Of 16 keys and 8 values a lane had a single row of S, and its product would be fused into the sum over lanes,
    # which then is another in each of them.
    return Tile(block_k, 16 if block_k == 16 else 8 if block_k <= 256 else 4, 1)


def splits(key_width: int, value_width: int) -> bool:
    """Whether layers of these widths take the form of serial_split.py."""
    return key_width in WIDTHS and value_width % COLUMNS == 0 and not triton.knobs.runtime.interpret


@dataclass
class SerialWorkspace:
    """What the serial kernels keep during one launch; one serves all layers and passes of a bucket, in one stream."""

    kept: Tensor
    """float32, the states kept where trees branch: [B, groups, HV, tiles of V, places, BK, BV].

    A place is 2 MiB a session and group with 8 heads of 256 x 256; trees of 16, 32, 64 and 129 rows have 2, 3, 4 and 5,
    of which the form of serial_split.py has the first two on chip. The form for batches has [programs, places, K, BV]
    instead, less the one on chip.
    """
    arrived: Tensor
    """int32 [2, B, HV, tiles of V], programs that have read a tile in a launch; 0 between launches.

    Launches take turns: with overlap one may count while the one before sets its own back to 0.
    """
    turn: int = 0

    @classmethod
    def empty(
        cls, bucket: Bucket, value_heads: int, key_width: int, value_width: int, device: torch.device | str
    ) -> SerialWorkspace:
        """For a bucket and a layer's shape."""
        kept, arrived = cls.shapes(bucket, value_heads, key_width, value_width)
        return cls(torch.empty(kept, device=device), torch.zeros(arrived, dtype=torch.int32, device=device))

    def take_turn(self) -> Tensor:
        """The counters of the next launch."""
        self.turn ^= 1
        return self.arrived[self.turn]

    @staticmethod
    def shapes(
        bucket: Bucket, value_heads: int, key_width: int, value_width: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `kept` and `arrived`."""
        tile = serial_tile(key_width, value_width)
        tiles, places = triton.cdiv(value_width, tile.block_v), kept_places(bucket.tree_rows)
        lead, arrived = (bucket.sessions, bucket.groups, value_heads), (2, bucket.sessions, value_heads, tiles)
        form = _batch_form(bucket, value_heads, key_width, value_width)
        if form is not None:
            programs = programs_of(bucket, value_heads, value_width, form)
            return (programs, max(0, places - form.near), key_width, form.columns), arrived
        if not splits(key_width, value_width):
            return (*lead, tiles, places, tile.block_k, tile.block_v), arrived
        columns = columns_of(bucket, value_heads, key_width, value_width)
        tiles = value_width // columns
        return (*lead, tiles, max(0, places - NEAR), key_width, columns), (2, bucket.sessions, value_heads, tiles)


@triton.jit
def _store_tile(p_tile, s, mask, p_arrived, n_groups, GROUPS: tl.constexpr):
    """Stores the committed tile; with several groups the last program that has read the old one does.

    The release orders every program's reads before its arrival; the winner's store depends on the count it was told.
    """
    if GROUPS == 1:
        tl.store(p_tile, s, mask=mask)
    else:
        tl.debug_barrier()  # all threads have read the tile before this program counts as arrived
        if tl.atomic_add(p_arrived, 1, sem="release") == n_groups - 1:
            tl.store(p_tile, s, mask=mask)
            tl.store(p_arrived, 0)


@triton.jit
def _operands(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_pool_row,
    row,
    i_h,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
):
    """k, q, v, g, beta and the pool's row of one row and head."""
    k = load_key(p_k + (row * H + i_h // (HV // H)) * K, K, BK, LANES)
    q = load_key(p_q + (row * H + i_h // (HV // H)) * K, K, BK, LANES)
    v = tl.load(p_v + (row * HV + i_h) * V + o_v, mask=o_v < V, other=0.0)
    g = tl.load(p_g + row * HV + i_h)
    beta = tl.load(p_beta + row * HV + i_h)
    return k, q, v, g, beta, tl.load(p_pool_row + row)


@triton.jit
def verify_serial_kernel(
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
    POOL: tl.constexpr,
    PENDING: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROW_MASK: tl.constexpr,
    EMIT_BIT: tl.constexpr,
    LEAF_BIT: tl.constexpr,
    KEEP_SHIFT: tl.constexpr,
    FETCH_SHIFT: tl.constexpr,
    PLACE_MASK: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (tiles of V, HV, sessions * groups)."""
    i_v, i_h, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    admit_at_start(OVERLAP)
    i_b = i_bg // GROUPS
    slot = tl.load(p_slot + i_b).to(tl.int64)
    n_steps = tl.load(p_schedule_len + i_bg)
    if (slot < 0) | (n_steps == 0):
        wait_for_previous(OVERLAP)
        return
    start = tl.load(p_row_start + i_b)
    n_pending = tl.load(p_pending_len + i_b)
    o_k, o_v = key_order(BK, LANES), i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    mask = (o_k < K)[:, None] & m_v[None, :]
    p_tile = p_state + (slot * HV + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    s = tl.load(p_tile, mask=mask, other=0.0)

    pool = slot * POOL
    if (not INTERPRETED) and BK >= 64:
        prefetch_pending(
            p_pending + i_b * PENDING,
            n_pending,
            p_pool_k + pool * H * K,
            p_pool_u + pool * HV * V,
            p_pool_g + pool * HV,
            i_v,
            i_h,
            H,
            HV,
            K,
            V,
            BK,
            BV,
            PREFETCHED,
        )

    p_steps = p_schedule + i_bg * STEPS
    word = tl.load(p_steps)
    next_word = tl.load(p_steps + 1, mask=n_steps > 1, other=0)
    row = start + (word & ROW_MASK)
    if not OVERLAP:  # the first row's operands are on their way while the pending factors are applied
        k, q, v, g, beta, pool_row = _operands(
            p_q, p_k, p_v, p_g, p_beta, p_pool_row, row, i_h, o_v, H, HV, K, V, BK, LANES
        )

    if n_pending > 0:
        s = apply_pending(
            s,
            p_pending + i_b * PENDING,
            n_pending,
            p_pool_k + pool * H * K,
            p_pool_u + pool * HV * V,
            p_pool_g + pool * HV,
            o_v,
            i_h,
            H,
            HV,
            K,
            V,
            BK,
            LANES,
            AT_ONCE,
        )
        if tl.load(p_write_state + i_b) != 0:
            n_groups = tl.load(p_groups + i_b)
            _store_tile(p_tile, s, mask, p_arrived + (i_b * HV + i_h) * tl.num_programs(0) + i_v, n_groups, GROUPS)

    if OVERLAP:  # all above needs nothing of the kernel before
        wait_for_previous(OVERLAP)
        k, q, v, g, beta, pool_row = _operands(
            p_q, p_k, p_v, p_g, p_beta, p_pool_row, row, i_h, o_v, H, HV, K, V, BK, LANES
        )

    p_own_u = p_pool_u + pool * HV * V
    p_own = p_kept + ((i_bg * HV + i_h) * tl.num_programs(0) + i_v).to(tl.int64) * (PLACES * BK * BV)
    p_own += tl.arange(0, BK)[:, None] * BV + tl.arange(0, BV)[None, :]
    for i in range(n_steps):
        row_after = start + (next_word & ROW_MASK)
        k_after, q_after, v_after, g_after, beta_after, pool_row_after = _operands(
            p_q, p_k, p_v, p_g, p_beta, p_pool_row, row_after, i_h, o_v, H, HV, K, V, BK, LANES
        )
        word_after = tl.load(p_steps + i + 2, mask=i + 2 < n_steps, other=0)

        if PLACES > 0:
            fetch = (word >> FETCH_SHIFT) & PLACE_MASK
            if fetch > 0:
                s = tl.load(p_own + (fetch - 1) * (BK * BV))
        b_k, b_q = k.to(tl.float32), q.to(tl.float32)
        alpha = tl.exp(g)
        recalled = alpha * tl.sum(s * b_k[:, None], 0)
        y = alpha * tl.sum(s * b_q[:, None], 0)
        u = beta * (v.to(tl.float32) - recalled)
        if (word >> LEAF_BIT) & 1 == 0:  # nothing goes on from a leaf's state
            s = outer_step(s, alpha, b_k, u)
        o = tl.fma(tl.broadcast_to(tl.sum(b_q * b_k, 0), u.shape), u, y)
        m_emit = m_v & (((word >> EMIT_BIT) & 1) > 0)
        tl.store(p_o + (row * HV + i_h) * V + o_v, o.to(p_o.dtype.element_ty), mask=m_emit)
        tl.store(p_own_u + (pool_row * HV + i_h) * V + o_v, u, mask=m_emit)
        if PLACES > 0:
            keep = (word >> KEEP_SHIFT) & PLACE_MASK
            if keep > 0:
                tl.store(p_own + (keep - 1) * (BK * BV), s)
                tl.debug_barrier()  # whichever thread fetches an element, it has been stored

        word, next_word, row, pool_row = next_word, word_after, row_after, pool_row_after
        k, q, v, g, beta = k_after, q_after, v_after, g_after, beta_after


def verify_serial(
    rows: LayerRows,
    state: Tensor,
    pool: FactorPool,
    batch: PassBatch,
    o: Tensor,
    workspace: SerialWorkspace,
    *,
    overlap: bool = False,
    admit: Admit = "waited",
) -> None:
    """Outputs and factors of all rows, each continuing the state of its parent; exact.

    Args:
        rows: the layer's inputs, over the batch's row places.
        state: float32 [slots, HV, K, V]; read, and where `batch.write_state` says so stored with the pending factors.
        pool: its pending rows are read, the rows' u are written at `batch.pool_row`.
        batch: which rows, sessions and pending factors; its bucket's `groups` programs share each tree.
        o: [R, HV, V], float32 or the model's dtype; written for rows of sessions alone.
        workspace: made for the batch's bucket and this shape.
        overlap: the launch may begin while the kernel before in the stream still runs; that one must not write this
            layer's state, its pending pool rows or the batch, nor may the one before that if it admits at its start.
            Without it the launch waits, as others do.
        admit: when the next launch may begin, if it overlaps.

    Raises:
        ValueError: shapes, types or devices do not belong together.
    """
    check_layer(rows, state, pool, batch, o)
    bucket, (_, value_heads, key_width, value_width) = batch.bucket, state.shape
    tile = serial_tile(key_width, value_width)
    tiles = triton.cdiv(value_width, tile.block_v)
    shapes = tuple(workspace.kept.shape), tuple(workspace.arrived.shape)
    if shapes != SerialWorkspace.shapes(bucket, value_heads, key_width, value_width):
        raise ValueError(
            f"workspace {list(workspace.kept.shape)} was not made for {bucket} and {value_heads} heads of "
            f"{key_width} x {value_width}"
        )
    check_places(workspace.kept, workspace.arrived, state=state)
    overlaps = overlapping(overlap, admit)
    sizes, places = layer_sizes(state, pool, batch), kept_places(bucket.tree_rows)
    form = _batch_form(bucket, value_heads, key_width, value_width)
    if form is not None:
        launch_batch(_by_name(rows, state, pool, batch, o, workspace), sizes, bucket, places, form, overlaps)
        return
    tensors = (
        *(*rows, state, pool.k, pool.u, pool.g, o, workspace.kept, workspace.take_turn(), batch.slot, batch.row_start),
        *(batch.pending_len, batch.write_state, batch.groups, batch.pending, batch.pool_row),
        *(batch.schedule_len, batch.schedule),
    )
    if splits(key_width, value_width):
        launch_split(tensors, sizes, bucket, places, columns_of(bucket, value_heads, key_width, value_width), overlaps)
        return
    verify_serial_kernel[(tiles, value_heads, bucket.sessions * bucket.groups)](
        *tensors,
        **sizes,
        STEPS=bucket.tree_rows,
        GROUPS=bucket.groups,
        PLACES=places,
        ROW_MASK=(1 << ROW_BITS) - 1,
        EMIT_BIT=EMIT_BIT,
        LEAF_BIT=LEAF_BIT,
        KEEP_SHIFT=KEEP_SHIFT,
        FETCH_SHIFT=FETCH_SHIFT,
        PLACE_MASK=PLACE_MASK,
        BK=tile.block_k,
        BV=tile.block_v,
        LANES=min(128 // tile.block_v, tile.block_k),
        AT_ONCE=AT_ONCE,
        PREFETCHED=_PREFETCHED,
        OVERLAP=overlaps,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=tile.warps,
        num_stages=1,
        enable_fp_fusion=True,
        launch_pdl=overlaps > 0,
    )


def _batch_form(bucket: Bucket, value_heads: int, key_width: int, value_width: int) -> BatchForm | None:
    """How serial_batch.py does it, None if another kernel does."""
    if not splits(key_width, value_width):
        return None
    return batch_form(bucket, value_heads, value_width)


def _by_name(
    rows: LayerRows, state: Tensor, pool: FactorPool, batch: PassBatch, o: Tensor, workspace: SerialWorkspace
) -> dict[str, Tensor]:
    """What serial_batch.py reads and writes, by the names of its parameters."""
    named = {f"p_{name}": x for name, x in rows._asdict().items()}
    named |= {"p_state": state, "p_pool_k": pool.k, "p_pool_u": pool.u, "p_pool_g": pool.g, "p_o": o}
    named["p_kept"] = workspace.kept
    data = ("slot", "row_start", "pending_len", "write_state", "pending", "pool_row", "schedule_len", "schedule")
    return named | {f"p_{name}": getattr(batch, name) for name in data}


def layer_sizes(state: Tensor, pool: FactorPool, batch: PassBatch) -> dict[str, int]:
    """What every verification kernel is compiled for, by the names of its parameters."""
    _, value_heads, key_width, value_width = state.shape
    return {
        "POOL": pool.k.shape[1],
        "PENDING": batch.bucket.pending,
        "H": pool.k.shape[2],
        "HV": value_heads,
        "K": key_width,
        "V": value_width,
    }


def check_layer(rows: LayerRows, state: Tensor, pool: FactorPool, batch: PassBatch, o: Tensor) -> None:
    """Raises ValueError unless a layer's tensors fit each other and the batch's bucket."""
    check_state(state, pool)
    R, heads = batch.bucket.rows, pool.k.shape[2]
    _, value_heads, key_width, value_width = state.shape
    fits = (
        rows.q.shape == rows.k.shape == (R, heads, key_width)
        and rows.v.shape == o.shape == (R, value_heads, value_width)
        and rows.g.shape == rows.beta.shape == (R, value_heads)
        and rows.q.dtype == rows.k.dtype == rows.v.dtype == pool.k.dtype
        and rows.g.dtype == rows.beta.dtype == torch.float32
    )
    if not fits:
        raise ValueError(
            f"q {list(rows.q.shape)}, k {list(rows.k.shape)}, v {list(rows.v.shape)} {rows.v.dtype}, g "
            f"{list(rows.g.shape)}, beta {list(rows.beta.shape)}, o {list(o.shape)} do not fit {R} rows and state "
            f"{list(state.shape)}: want q, k [R, H, K] and v [R, HV, V] in the pool's dtype, g, beta [R, HV] in "
            "float32, o [R, HV, V]"
        )
    check_places(*rows[:3], o, batch.buffer, state=state)
    check_places(*rows[3:], state=state, aligned=False)
    batch.bind(slots=state.shape[0], pool_rows=pool.k.shape[1])
