"""From a layer's projections to the rows of the recurrence: convolution over ancestors, silu, l2-norm and gates.

One launch a layer. A row's taps are itself and its ancestors; above the root they go on through the raw inputs of
committed tokens, which lie in the pool where earlier passes left them. Everything that later passes need of a row (raw
inputs, k, g) goes to its pool row at once, so that accepting a row later copies nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.maths import log1p_unit
from specla.kernels.gpu.pass_batch import PassBatch

# Heads a program, one warp each. One choice for all sizes: the order of the l2-norm's sum hangs on it.
_HEADS = 4
L2_EPS = 1e-6
"""Added to a sum of squares before its root."""
_ALIGNED = 16  # bytes: what the widest loads want, and what keeps every compiled form the same


class ConvolutionParameters(NamedTuple):
    """A layer's weights of the convolution and the gates."""

    weight: Tensor
    """float32 [W, D], oldest tap first; the last multiplies the row itself."""
    a_log: Tensor
    """float32 [HV]."""
    dt_bias: Tensor
    """float32 [HV]."""
    allow_neg_eigval: bool = False
    """Whether beta goes up to 2."""


@triton.jit
def _convolved(
    p_x, p_weight, p_pool_x, p_history, p_tap, b_session, o_slot, i_row, o_channel, mask,
    D: tl.constexpr, X_STRIDE: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at channels `o_channel` of one row, in float32, and the row's raw inputs.

    Loads of a kind stand together, so that the chain is three loads long: tap and session, history, input.
    """
    b_taps = ()  # oldest first; joined by +, since Triton knows no unpacking
    for i in tl.static_range(W - 1):
        b_tap = tl.load(p_tap + i_row * (W - 1) + (W - 2 - i))
        b_taps = b_taps + (b_tap,)  # type: ignore[assignment]  # noqa: RUF005
    raw = tl.load(p_x + i_row.to(tl.int64) * X_STRIDE + o_channel, mask=mask, other=0.0)
    b_froms = ()
    for i in tl.static_range(W - 1):
        o_history = b_session * (W - 1) + (W - 1) + b_taps[i]
        b_from = tl.load(p_history + o_history, mask=b_taps[i] < 0, other=-1)
        b_froms = b_froms + (b_from,)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros_like(raw).to(tl.float32)
    for i in tl.static_range(W - 1):
        p_here = p_x + tl.maximum(b_taps[i], 0).to(tl.int64) * X_STRIDE
        p_before = p_pool_x + (o_slot + tl.maximum(b_froms[i], 0)) * D
        b_here = tl.load(p_here + o_channel, mask=mask & (b_taps[i] >= 0), other=0.0)
        b_before = tl.load(p_before + o_channel, mask=mask & (b_froms[i] >= 0), other=0.0)  # ZEROS is -1
        b_weight = tl.load(p_weight + i * D + o_channel, mask=mask, other=0.0)
        total += b_weight * tl.where(b_taps[i] < 0, b_before, b_here).to(tl.float32)
    b_weight = tl.load(p_weight + (W - 1) * D + o_channel, mask=mask, other=0.0)
    total += b_weight * raw.to(tl.float32)
    return total / (1.0 + tl.exp(-total)), raw


@triton.jit
def _keys_and_queries(
    p_x, p_weight, p_pool_k, p_pool_x, p_history, p_tap, p_q, p_k,
    b_session, o_slot, o_pool, i_row, i_block, used,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, X_STRIDE: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, HEADS: tl.constexpr, Q_SCALE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A block of the 2 H heads of q and then k."""
    i_head = i_block * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    i_key = tl.arange(0, BK)[None, :]
    mask = (i_head < 2 * H) & (i_key < K)
    of_q = i_head < H
    o_channel = i_head * K + i_key  # [HEADS, BK]
    y, raw = _convolved(
        p_x, p_weight, p_pool_x, p_history, p_tap, b_session, o_slot, i_row, o_channel, mask, D, X_STRIDE, W
    )  # fmt: skip
    mask = mask & used
    norm = tl.sqrt(tl.sum(y * y, 1) + EPS)  # [HEADS]
    y = y / norm[:, None]
    y = tl.where(of_q, y * Q_SCALE, y).to(p_k.dtype.element_ty)
    o_row = i_row.to(tl.int64) * (H * K)
    o_key = o_channel - H * K  # within the heads of k
    tl.store(p_pool_x + o_pool * D + o_channel, raw, mask=mask)
    tl.store(p_q + o_row + o_channel, y, mask=mask & of_q)
    tl.store(p_k + o_row + o_key, y, mask=mask & (i_head >= H))
    tl.store(p_pool_k + o_pool * (H * K) + o_key, y, mask=mask & (i_head >= H))


@triton.jit
def _values_and_gates(
    p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_g, p_pool_x, p_history, p_tap, p_v, p_g, p_beta,
    b_session, o_slot, o_pool, i_row, i_block, used,
    HV: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr, X_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr, W: tl.constexpr,
    BV: tl.constexpr, HEADS: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """A block of the HV heads of v, whose channels start at FIRST, with their gates."""
    i_gate = i_block * HEADS + tl.arange(0, HEADS)  # [HEADS]
    of_gate = i_gate < HV
    b_a = tl.load(p_a + i_row.to(tl.int64) * GATE_STRIDE + i_gate, mask=of_gate, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + i_row.to(tl.int64) * GATE_STRIDE + i_gate, mask=of_gate, other=0.0).to(tl.float32)
    b_rate = tl.load(p_a_log + i_gate, mask=of_gate, other=0.0)
    b_bias = tl.load(p_dt_bias + i_gate, mask=of_gate, other=0.0)
    i_value = tl.arange(0, BV)[None, :]
    mask = of_gate[:, None] & (i_value < V)
    o_value = i_gate[:, None] * V + i_value  # [HEADS, BV]
    y, raw = _convolved(
        p_x, p_weight, p_pool_x, p_history, p_tap, b_session, o_slot, i_row, FIRST + o_value, mask, D, X_STRIDE, W
    )  # fmt: skip
    mask = mask & used
    of_gate = of_gate & used
    b_pre = b_a + b_bias
    b_g = -tl.exp(b_rate) * (tl.maximum(b_pre, 0.0) + log1p_unit(tl.exp(-tl.abs(b_pre))))
    b_beta = BETA_SCALE / (1.0 + tl.exp(-b_b))
    tl.store(p_pool_x + o_pool * D + FIRST + o_value, raw, mask=mask)
    tl.store(p_v + i_row.to(tl.int64) * (HV * V) + o_value, y.to(p_v.dtype.element_ty), mask=mask)
    tl.store(p_g + i_row * HV + i_gate, b_g, mask=of_gate)
    tl.store(p_beta + i_row * HV + i_gate, b_beta, mask=of_gate)
    tl.store(p_pool_g + o_pool * HV + i_gate, b_g, mask=of_gate)


@triton.jit(do_not_specialize=["F"])
def _tree_convolution(
    p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias,
    p_pool_k, p_pool_g, p_pool_x, p_slot, p_row_session, p_pool_row, p_history, p_tap,
    p_q, p_k, p_v, p_g, p_beta,
    F,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, HEADS: tl.constexpr, X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    Q_SCALE: tl.constexpr, BETA_SCALE: tl.constexpr, EPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs (row, block of heads): first the blocks of q and k, then those of v."""
    D: tl.constexpr = 2 * H * K + HV * V
    KEY_BLOCKS: tl.constexpr = (2 * H + HEADS - 1) // HEADS
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    b_session = tl.load(p_row_session + i_row)
    used = b_session >= 0  # an unused row computes and stores nothing: a branch would make all loads wait for this one
    b_session = tl.maximum(b_session, 0)
    o_slot = tl.maximum(tl.load(p_slot + b_session), 0).to(tl.int64) * F
    o_pool = o_slot + tl.load(p_pool_row + i_row)
    if OVERLAP:  # all programs wait, used or not: whoever ends has waited
        gdc_wait()
        gdc_launch_dependents()
    if i_block < KEY_BLOCKS:
        _keys_and_queries(
            p_x, p_weight, p_pool_k, p_pool_x, p_history, p_tap, p_q, p_k,
            b_session, o_slot, o_pool, i_row, i_block, used,
            H, K, D, X_STRIDE, W, BK, HEADS, Q_SCALE, EPS,
        )  # fmt: skip
    else:
        _values_and_gates(
            p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_g, p_pool_x, p_history, p_tap, p_v, p_g, p_beta,
            b_session, o_slot, o_pool, i_row, i_block - KEY_BLOCKS, used,
            HV, V, 2 * H * K, D, X_STRIDE, GATE_STRIDE, W, BV, HEADS, BETA_SCALE,
        )  # fmt: skip


def tree_convolution(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parameters: ConvolutionParameters,
    pool: FactorPool,
    batch: PassBatch,
    out: LayerRows,
    *,
    overlap: bool = False,
) -> None:
    """Fills `out` and the rows' places in the pool: k, g and x. A row's bits depend on its own path alone.

    y = silu(sum over taps of weight x); q = K^-1/2 y_q / |y_q|, k = y_k / |y_k| with |y| = sqrt(sum y^2 + 1e-6),
    v = y_v; g = -exp(a_log) softplus(a + dt_bias); beta = sigmoid(b), doubled where negative eigenvalues are allowed.
    All in float32, rounded to the model's dtype only when stored. Rows that no session uses change nothing.

    Args:
        x: model dtype [R, D], raw inputs of q, k and v side by side; rows may stand apart, by multiples of 16 bytes.
        a, b: model dtype or float32 [R, HV], the projections for decay and writing strength; rows may stand apart
            equally.
        parameters: the layer's weights.
        pool: the layer's pool; its x is read at `batch.history`.
        batch: the pass.
        out: where the rows go.
        overlap: whether to begin while the kernel before may still run; that one must not write what `batch` holds.
            The next launch may begin once this one has waited for the kernel before.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    _check(x, a, b, parameters, pool, batch, out)
    overlap = overlap and not triton.knobs.runtime.interpret
    rows, heads, key_width = out.q.shape
    value_heads, value_width = out.v.shape[1:]
    blocks = triton.cdiv(2 * heads, _HEADS) + triton.cdiv(value_heads, _HEADS)
    _tree_convolution[(rows, blocks)](
        x, a, b, parameters.weight, parameters.a_log, parameters.dt_bias,
        pool.k, pool.g, pool.x, batch.slot, batch.row_session, batch.pool_row, batch.history, batch.tap,
        out.q, out.k, out.v, out.g, out.beta,
        pool.x.shape[1],
        H=heads, HV=value_heads, K=key_width, V=value_width, W=parameters.weight.shape[0],
        BK=triton.next_power_of_2(key_width), BV=triton.next_power_of_2(value_width), HEADS=_HEADS,
        X_STRIDE=x.stride(0), GATE_STRIDE=a.stride(0),
        Q_SCALE=key_width**-0.5, BETA_SCALE=2.0 if parameters.allow_neg_eigval else 1.0, EPS=L2_EPS,
        OVERLAP=overlap, num_warps=_HEADS, launch_pdl=overlap,
    )  # fmt: skip


def _check(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parameters: ConvolutionParameters,
    pool: FactorPool,
    batch: PassBatch,
    out: LayerRows,
) -> None:
    rows, taps = batch.bucket.rows, batch.bucket.taps
    heads, key_width = out.q.shape[1:]
    value_heads, value_width = out.v.shape[1:]
    channels = 2 * heads * key_width + value_heads * value_width
    slots, factors = pool.x.shape[:2]
    model, single = (x.dtype,), (torch.float32,)
    wanted = {
        "x": (x, (rows, channels), (torch.bfloat16, torch.float16, torch.float32)),
        "a": (a, (rows, value_heads), (*model, *single)),
        "b": (b, (rows, value_heads), (*model, *single)),
        "weight": (parameters.weight, (taps, channels), single),
        "a_log": (parameters.a_log, (value_heads,), single),
        "dt_bias": (parameters.dt_bias, (value_heads,), single),
        "pool.k": (pool.k, (slots, factors, heads, key_width), model),
        "pool.g": (pool.g, (slots, factors, value_heads), single),
        "pool.x": (pool.x, (slots, factors, channels), model),
        "out.q": (out.q, (rows, heads, key_width), model),
        "out.k": (out.k, (rows, heads, key_width), model),
        "out.v": (out.v, (rows, value_heads, value_width), model),
        "out.g": (out.g, (rows, value_heads), single),
        "out.beta": (out.beta, (rows, value_heads), single),
    }
    if value_heads % heads or key_width % 16 or value_width % 16:
        raise ValueError(
            f"{heads} key heads of {key_width} and {value_heads} value heads of {value_width}: "
            "give value heads as a multiple of the key heads, and widths that are multiples of 16"
        )
    for name, (tensor, shape, dtypes) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: give {allowed} {list(shape)}")
        apart, aligned = name in ("x", "a", "b"), name not in ("a", "b")
        lies = tensor.stride(-1) == 1 if apart else tensor.is_contiguous()
        if aligned:
            lies &= not (tensor.data_ptr() % _ALIGNED or tensor.stride(0) * tensor.element_size() % _ALIGNED * apart)
        if not lies or tensor.device != batch.device:
            raise ValueError(
                f"{name} on {tensor.device} with strides {tensor.stride()}: give a contiguous tensor on "
                f"{batch.device} that starts at a multiple of {_ALIGNED} bytes (rows of x, a and b may stand apart)"
            )
    if a.stride(0) != b.stride(0):
        raise ValueError(f"rows of a and b stand {a.stride(0)} and {b.stride(0)} apart: give the same")
    batch.bind(slots=slots, pool_rows=factors)
