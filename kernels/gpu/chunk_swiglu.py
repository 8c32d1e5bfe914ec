"""SwiGLU of many rows, over products whose columns are each channel's gate and then what it gates."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.norms import MODEL_DTYPES, check_rows, check_tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def chunk_swiglu_kernel(p_x, p_out, p_rows, M: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of M, rows)."""
    if tl.program_id(1) >= tl.load(p_rows):
        return
    first, o_row = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64) * M
    o_pair, o = 2 * first + tl.arange(0, 2 * BLOCK), first + tl.arange(0, BLOCK)
    pairs = tl.load(p_x + 2 * o_row + o_pair, mask=o_pair < 2 * M, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(p_out + o_row + o, y.to(p_out.dtype.element_ty), mask=o < M)


def chunk_swiglu(x: Tensor, out: Tensor, rows: Tensor) -> None:
    """out = silu(gate) up, in float32 and rounded when stored.

    Args:
        x: model dtype [T, 2 M]: of each channel its gate, then what it gates.
        out: model dtype [T, M].
        rows: int32 [1], how many rows count, T at most; places of others are left alone.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    count, width = out.shape
    check_tensor("x", x, (count, 2 * width), MODEL_DTYPES, out.device)
    check_tensor("out", out, (count, width), (x.dtype,), out.device)
    check_rows(rows, out.device)
    chunk_swiglu_kernel[(triton.cdiv(width, _BLOCK), count)](x, out, rows, M=width, BLOCK=_BLOCK, num_warps=_WARPS)
