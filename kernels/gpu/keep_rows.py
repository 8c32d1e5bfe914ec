"""Rows that somebody wants on the host, copied to where an address on the device says: captured once, for anybody."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.chunk_batch import CHUNK, ChunkBatch
from specla.kernels.gpu.norms import MODEL_DTYPES, check_tensor

_PROGRAMS = 264  # two a multiprocessor of an H200
_BLOCK = 2048


@triton.jit
def keep_rows_kernel(
    p_x, p_places, p_rows, p_owner, p_texts, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
    TEXTS: tl.constexpr,
):  # fmt: skip
    """Grid (programs,)."""
    wanted = tl.zeros([], dtype=tl.int64)
    for i in tl.static_range(TEXTS):
        wanted |= tl.load(p_places + i)
    if wanted == 0:
        return
    o_d = tl.arange(0, BD)
    for i_row in range(tl.program_id(0), tl.load(p_rows), tl.num_programs(0)):
        owner = tl.maximum(tl.load(p_owner + i_row // BLOCK), 0)
        place = tl.load(p_places + owner)
        start = tl.load(p_texts + 3 * owner)
        i_token = i_row - start
        if (place != 0) & (i_token < tl.load(p_texts + 3 * owner + 1)):
            o_row = (start + i_token).to(tl.int64) * D
            p_out = place.to(tl.pointer_type(tl.float32)) + i_token.to(tl.int64) * D
            for first in tl.static_range(0, D, BD):
                mask = first + o_d < D
                x = tl.load(p_x + o_row + first + o_d, mask=mask)
                tl.store(p_out + first + o_d, x.to(tl.float32), mask=mask)


def keep_rows(x: Tensor, places: Tensor, batch: ChunkBatch) -> None:
    """Copies the rows of each text that has a place.

    Args:
        x: float32 or the model's dtype [R, D].
        places: int64 [S], of each text the address of float32 [T, D] that the device can write (its own memory, or
            pinned memory of the host); 0 where nobody asks.
        batch: whose rows are whose.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    rows, width = x.shape
    check_tensor("x", x, (rows, width), MODEL_DTYPES, x.device)
    batch.check(rows, x.device)
    texts = len(batch.texts)
    if places.dtype != torch.int64 or tuple(places.shape) != (texts,) or places.device != x.device:
        raise ValueError(
            f"places is {places.dtype} {list(places.shape)} on {places.device}: give int64 [{texts}] on {x.device}"
        )
    keep_rows_kernel[(min(_PROGRAMS, rows),)](
        x, places, batch.rows, batch.owner, batch.texts,
        D=width, BD=min(_BLOCK, triton.next_power_of_2(width)), BLOCK=CHUNK, TEXTS=texts, num_warps=8,
    )  # fmt: skip
