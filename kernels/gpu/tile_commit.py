"""The deferred commit of a tile in registers, for kernels in Gluon: the steps of commit.py, bit for bit."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def outer_step(s, alpha, k, u):
    """The tile s after one token: fma(k, u, alpha s), as `commit.spread_step`; k and u are repeated to its shape."""
    return gl.fma(gl.broadcast(k, s)[0], gl.broadcast(u, s)[0], s * alpha)


@gluon.jit
def committed(
    s,
    p_pending,
    n_pending,
    p_pool_k,
    p_pool_u,
    p_pool_g,
    o_k,
    o_v,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """The tile [W, KP, columns] after n_pending factors, as `commit.apply_pending`.

    p_pool_* point at the head's place in the session's pool; o_k [W, KP] and o_v [W, columns] say which keys and
    columns a warp has.
    """
    for first in range(0, n_pending, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            used = first + i < n_pending
            row = gl.load(p_pending + first + i, mask=used, other=0)
            k = gl.load(p_pool_k + row * (H * K) + o_k, mask=used, other=0.0).to(gl.float32)
            u = gl.load(p_pool_u + row * (HV * V) + o_v, mask=used, other=0.0)
            g = gl.load(p_pool_g + row * HV, mask=used, other=0.0)
            s = outer_step(s, gl.exp(g), gl.expand_dims(k, 2), gl.expand_dims(u, 1))
    return s
