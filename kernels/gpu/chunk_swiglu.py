"""SwiGLU of many rows, over products whose columns are each channel's gate and then what it gates."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.norms import MODEL_DTYPES, check_rows, check_tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def chunk_swiglu_kernel(p_x, p_out, p_rows, M: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of all rows, one behind the other).

    A pair is read as one number of twice the width: both then lie in one thread, with nothing to exchange.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    PAIR: tl.constexpr = tl.int64 if BITS == 32 else tl.int32
    HALF: tl.constexpr = tl.int32 if BITS == 32 else tl.int16
    count = tl.load(p_rows).to(tl.int64) * M
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first < count:
        o = first + tl.arange(0, BLOCK)
        pair = tl.load(p_x.to(tl.pointer_type(PAIR)) + o, mask=o < count, other=0)
        gate = pair.to(HALF).to(DTYPE, bitcast=True).to(tl.float32)
        up = (pair >> BITS).to(HALF).to(DTYPE, bitcast=True).to(tl.float32)
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(p_out + o, y.to(DTYPE), mask=o < count)


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
    chunk_swiglu_kernel[(triton.cdiv(count * width, _BLOCK),)](x, out, rows, M=width, BLOCK=_BLOCK, num_warps=_WARPS)
