"""The first launch of a pass: rows of the embedding table, in float32, as the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.norms import MODEL_DTYPES, check_rows, check_tensor
from specla.kernels.gpu.overlap import overlapping, wait_for_previous

_BLOCK = 1024


@triton.jit
def embed_kernel(p_tokens, p_table, p_out, p_rows, VOCAB, D: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (R, blocks of D)."""
    i_row = tl.program_id(0)
    wait_for_previous(OVERLAP)
    n = tl.load(p_rows)
    b_token = tl.load(p_tokens + i_row)  # with n, not after it
    if i_row < n:
        o_d = tl.program_id(1) * BD + tl.arange(0, BD)
        mask = (o_d < D) & (b_token >= 0) & (b_token < VOCAB)
        x = tl.load(p_table + b_token.to(tl.int64) * D + o_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_out + i_row.to(tl.int64) * D + o_d, x, mask=o_d < D)


def embed(tokens: Tensor, table: Tensor, out: Tensor, rows: Tensor, *, overlap: bool = False) -> None:
    """out[r] = table[tokens[r]] for the rows that count; a token outside the table gives zeros.

    Args:
        tokens: int32 [R].
        table: model dtype [vocab, D].
        out: float32 [R, D]; rows that do not count are left alone.
        rows: int32 [1], how many rows count, R at most.
        overlap: whether to begin while the kernel before, which may write tokens and rows, still runs. The next launch
            may begin once this one has waited; it must wait for this one before it reads `out`.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    if out.dim() != 2 or table.dim() != 2:
        raise ValueError(f"table {list(table.shape)}, out {list(out.shape)}: give [vocab, D] and [R, D]")
    count, width = out.shape
    check_tensor("tokens", tokens, (count,), (torch.int32,), out.device)
    check_tensor("table", table, (table.shape[0], width), MODEL_DTYPES, out.device)
    check_tensor("out", out, (count, width), (torch.float32,), out.device)
    check_rows(rows, out.device)
    overlaps = overlapping(overlap)
    block = min(_BLOCK, triton.next_power_of_2(width))
    embed_kernel[(count, triton.cdiv(width, block))](
        tokens,
        table,
        out,
        rows,
        table.shape[0],
        D=width,
        BD=block,
        OVERLAP=overlaps,
        num_warps=4,
        launch_pdl=overlaps > 0,
    )
