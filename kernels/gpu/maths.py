"""Elementary functions that Triton lacks or computes too coarsely, from additions and multiplications alone.

They run alike on a GPU and in Triton's interpreter, which knows no device library.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log1p_unit(x):
    """log(1 + x) of x in [0, 1], float32, right to two units in the last place however small x is.

    The series of 2 artanh(s) at s = x / (2 + x) <= 1/3.
    """
    s = x / (2.0 + x)
    z = s * s
    p = z * (1.0 / 17.0) + (1.0 / 15.0)
    p = p * z + (1.0 / 13.0)
    p = p * z + (1.0 / 11.0)
    p = p * z + (1.0 / 9.0)
    p = p * z + (1.0 / 7.0)
    p = p * z + (1.0 / 5.0)
    p = p * z + (1.0 / 3.0)
    return 2.0 * tl.fma(s * z, p, s)
