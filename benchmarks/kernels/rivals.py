"""Rival kernels, written from public descriptions: a whole state is stored for every node.

`SNAPSHOT` serial: one program walks a chain with its tile of the state on chip and stores the state after every row.
`RELOAD`: the same for trees, where every row first reads its parent's stored state. After the verdict the accepted
row's state is copied to the session's slot. Tiles are 32 columns of V, as is usual, or 16, which suits few sessions
better; both with as many warps as keep the state in 32 registers a thread, since a single warp spills.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import PassBatch

COLUMNS = (32, 16)
"""Tiles of V that are timed."""

_COPY_BLOCK = 4096
_WARP_ELEMENTS = 1024  # of a tile: 32 registers a thread


@triton.jit
def snapshot_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_state,
    p_snapshots,
    p_o,
    p_slot,
    p_row_start,
    p_parent,
    TAPS: tl.constexpr,
    TREE: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (tiles of V, HV, sessions)."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_hk = i_h // (HV // H)
    slot = tl.load(p_slot + i_b).to(tl.int64)
    start, end = tl.load(p_row_start + i_b), tl.load(p_row_start + i_b + 1)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    mask = m_k[:, None] & m_v[None, :]
    o_tile = i_h * K * V + o_k[:, None] * V + o_v[None, :]
    s = tl.load(p_state + slot * HV * K * V + o_tile, mask=mask, other=0.0)
    p_own = p_snapshots + start.to(tl.int64) * HV * K * V + o_tile
    for row in range(start, end):
        k = tl.load(p_k + (row * H + i_hk) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        q = tl.load(p_q + (row * H + i_hk) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        v = tl.load(p_v + (row * HV + i_h) * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        g = tl.load(p_g + row * HV + i_h)
        beta = tl.load(p_beta + row * HV + i_h)
        if TREE:
            parent = tl.load(p_parent + row * TAPS).to(tl.int64)
            if parent >= 0:
                s = tl.load(p_snapshots + parent * HV * K * V + o_tile, mask=mask, other=0.0)
        s *= tl.exp(g)
        u = beta * (v - tl.sum(s * k[:, None], 0))
        s += k[:, None] * u[None, :]
        tl.store(p_o + (row * HV + i_h) * V + o_v, tl.sum(s * q[:, None], 0).to(p_o.dtype.element_ty), mask=m_v)
        tl.store(p_own, s, mask=mask)
        p_own += HV * K * V
        if TREE:
            tl.debug_barrier()  # children read it, whichever thread stored it


@triton.jit
def scatter_kernel(
    p_state, p_snapshots, p_slot, p_accepted, sessions, slots, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (blocks of a state, layers * sessions): copies the accepted row's state to the session's slot."""
    i_b, i_l = tl.program_id(1) % sessions, tl.program_id(1) // sessions
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = i_l.to(tl.int64) * rows + tl.load(p_accepted + i_b)
    target = i_l.to(tl.int64) * slots + tl.load(p_slot + i_b)
    tl.store(p_state + target * SIZE + at, tl.load(p_snapshots + source * SIZE + at, mask=at < SIZE), mask=at < SIZE)


def verify_snapshot(
    rows: LayerRows, state: Tensor, snapshots: Tensor, batch: PassBatch, o: Tensor, *, tree: bool, columns: int
) -> None:
    """Outputs and the state after every row.

    Args:
        rows: the layer's inputs.
        state: float32 [slots, HV, K, V]; read.
        snapshots: float32 [R, HV, K, V]; written.
        batch: slots, rows and (for trees) parents.
        o: [R, HV, V]; written.
        tree: whether every row reads its parent's state again; if not, the rows must form chains.
        columns: of V, a program's tile.
    """
    _, value_heads, key_width, value_width = state.shape
    block_k = triton.next_power_of_2(key_width)
    block_v = min(columns, triton.next_power_of_2(value_width))
    snapshot_kernel[(triton.cdiv(value_width, block_v), value_heads, batch.bucket.sessions)](
        *rows,
        state,
        snapshots,
        o,
        batch.slot,
        batch.row_start,
        batch.tap,
        TAPS=batch.tap.shape[1],
        TREE=tree,
        H=rows.k.shape[1],
        HV=value_heads,
        K=key_width,
        V=value_width,
        BK=block_k,
        BV=block_v,
        num_warps=max(1, block_k * block_v // _WARP_ELEMENTS),
    )


def scatter_accepted(state: Tensor, snapshots: Tensor, slot: Tensor, accepted: Tensor) -> None:
    """Copies accepted snapshots to their slots, all layers in one launch.

    Args:
        state: float32 [L, slots, HV, K, V]; the named slots are written.
        snapshots: float32 [L, R, HV, K, V].
        slot: int32 [B].
        accepted: int32 [B], the last accepted row of each session, counted over all rows.
    """
    layers, slots, *size = state.shape
    elements = size[0] * size[1] * size[2]
    block = min(_COPY_BLOCK, triton.next_power_of_2(elements))
    scatter_kernel[(triton.cdiv(elements, block), layers * slot.shape[0])](
        state, snapshots, slot, accepted, slot.shape[0], slots, snapshots.shape[1], SIZE=elements, BLOCK=block
    )
