"""The sampler's noise on a GPU: the rule of `philox.py` word for word, its logarithms in float32.

The words are the same bit for bit. The noise differs from `philox.gumbel_noise`, which takes its logarithms in float64,
by less than 1e-6 of itself or of 1: about the last place of the scores it is added to.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_words(b_seed_low, b_seed_high, b_position, i_quad, IDS: tl.constexpr):
    """uint32 [IDS], the words of ids 4 i_quad[0] and on: i_quad, int32 [IDS / 4], counts up; the rest are scalars."""
    c0, c1 = i_quad.to(tl.uint32, bitcast=True), (i_quad * 0 + b_position).to(tl.uint32, bitcast=True)
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = b_seed_low.to(tl.uint32, bitcast=True), b_seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57  # one instruction has both words
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (IDS,))


@triton.jit
def _log2(x, INTERPRETED: tl.constexpr):
    """The device's own logarithm: off by 2^-22 between 1/2 and 2, by 2^-22 of itself elsewhere. Triton's is exact to
    the last place, which the sum with a logit loses again, at five times the instructions."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def gumbel_noise(b_word, INTERPRETED: tl.constexpr):
    """-log(-log1p(-u)) with u = min((word + 1/2) 2^-32, 1 - 2^-24): uint32 to float32 blocks.

    Near 0 the inner logarithm is a polynomial in u (relative minimax on [0, 1/4], error 2.4e-9); elsewhere it is that
    of 1 - u, whose distance from 1 is taken from the complement of the word, so that no digit is lost at either end.
    """
    low = b_word < 0x80000000
    b_odd = (tl.where(low, b_word, b_word ^ 0xFFFFFFFF) << 1) | 1  # 2 word + 1, or that of the complement
    near = b_odd.to(tl.float32) * 1.1641532182693481e-10  # 2^-33: u or 1 - u, whichever is smaller
    rest = tl.where(low, 1.0 - near, tl.maximum(near, 5.9604644775390625e-08))  # 1 - u, at least 2^-24
    p = tl.fma(near, 0.3337753492342952, 0.08962064694701766)
    p = tl.fma(near, p, 0.21422427630893523)
    p = tl.fma(near, p, 0.2486938403117501)
    p = tl.fma(near, p, 0.33338954092341755)
    p = tl.fma(near, p, 0.4999991014692442)
    by_series = tl.fma(near * near, p, near)
    exponential = tl.where(low & (near < 0.25), by_series, _log2(rest, INTERPRETED) * -0.6931471805599453)
    return _log2(exponential, INTERPRETED) * -0.6931471805599453
