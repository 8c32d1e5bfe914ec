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

from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.maths import log1p_unit
from specla.kernels.gpu.overlap import Admit, admit_at_start, overlapping, wait_for_previous
from specla.kernels.gpu.pass_batch import PassBatch

# Heads a program, one warp each. One choice for all sizes: the order of the l2-norm's sum hangs on it.
_HEADS = 4
_MANY = 512  # rows: from here on a program takes two, so that it reads its weights half as often
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
def _inputs_in_pool(
    p_pool_x, p_history, b_sessions, b_taps, o_slots, o_channel, masks,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows' inputs before the root, W - 1 a row, oldest first; 0 where a tap is a row of the pass."""
    b_froms = ()  # joined by +, since Triton knows no unpacking
    for j in tl.static_range(ROWS * (W - 1)):
        o_history = b_sessions[j // (W - 1)] * (W - 1) + (W - 1) + b_taps[j]
        b_froms = b_froms + (tl.load(p_history + o_history, mask=b_taps[j] < 0, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    b_before = ()
    for j in tl.static_range(ROWS * (W - 1)):
        p_before = p_pool_x + (o_slots[j // (W - 1)] + tl.maximum(b_froms[j], 0)) * D
        b_x = tl.load(p_before + o_channel, mask=masks[j // (W - 1)] & (b_froms[j] >= 0), other=0.0)  # ZEROS is -1
        b_before = b_before + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return b_before


@triton.jit
def _weights(p_weight, o_channel, mask, D: tl.constexpr, W: tl.constexpr):
    """Of each tap, oldest first."""
    b_weights = ()
    for i in tl.static_range(W):
        b_weights = b_weights + (tl.load(p_weight + i * D + o_channel, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return b_weights


@triton.jit
def _inputs_in_pass(
    p_x, b_taps, i_first, o_channel, masks, X_STRIDE: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The rows' own raw inputs, and those of the taps that are rows of the pass."""
    raws = ()
    b_heres = ()
    for r in tl.static_range(ROWS):
        p_row = p_x + (i_first + r).to(tl.int64) * X_STRIDE
        raws = raws + (tl.load(p_row + o_channel, mask=masks[r], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for j in tl.static_range(ROWS * (W - 1)):
        p_here = p_x + tl.maximum(b_taps[j], 0).to(tl.int64) * X_STRIDE
        b_here = tl.load(p_here + o_channel, mask=masks[j // (W - 1)] & (b_taps[j] >= 0), other=0.0)
        b_heres = b_heres + (b_here,)  # type: ignore[assignment]  # noqa: RUF005
    return raws, b_heres


@triton.jit
def _convolved(b_weights, b_taps, b_before, b_heres, raw, r: tl.constexpr, W: tl.constexpr):
    """silu of row r's convolution, float32."""
    total = tl.zeros_like(raw).to(tl.float32)
    for i in tl.static_range(W - 1):
        b_x = tl.where(b_taps[r * (W - 1) + i] < 0, b_before[r * (W - 1) + i], b_heres[r * (W - 1) + i])
        total += b_weights[i] * b_x.to(tl.float32)
    total += b_weights[W - 1] * raw.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _masks(b_used, real, ROWS: tl.constexpr):
    """Of the channels of each row."""
    masks = ()
    for r in tl.static_range(ROWS):
        masks = masks + (real & b_used[r],)  # type: ignore[assignment]  # noqa: RUF005
    return masks


@triton.jit
def _keys_and_queries(
    p_x, p_weight, p_pool_k, p_pool_x, p_history, p_q, p_k, b_used, b_sessions, b_taps, o_slots, o_pools,
    i_first, i_block,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, X_STRIDE: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr, HEADS: tl.constexpr, Q_SCALE: tl.constexpr, EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A block of the 2 H heads of q and then k."""
    i_head = i_block * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    i_key = tl.arange(0, BK)[None, :]
    real = (i_head < 2 * H) & (i_key < K)
    of_q = i_head < H
    o_channel = i_head * K + i_key  # [HEADS, BK]
    o_key = o_channel - H * K  # within the heads of k
    masks = _masks(b_used, real, ROWS)
    b_weights = _weights(p_weight, o_channel, real, D, W)
    b_before = _inputs_in_pool(p_pool_x, p_history, b_sessions, b_taps, o_slots, o_channel, masks, D, W, ROWS)
    wait_for_previous(OVERLAP)
    raws, b_heres = _inputs_in_pass(p_x, b_taps, i_first, o_channel, masks, X_STRIDE, W, ROWS)
    for r in tl.static_range(ROWS):
        y = _convolved(b_weights, b_taps, b_before, b_heres, raws[r], r, W)
        norm = tl.sqrt(tl.sum(y * y, 1) + EPS)  # [HEADS]
        y = y / norm[:, None]
        y = tl.where(of_q, y * Q_SCALE, y).to(p_k.dtype.element_ty)
        o_row = (i_first + r).to(tl.int64) * (H * K)
        tl.store(p_q + o_row + o_channel, y, mask=masks[r] & of_q)
        tl.store(p_k + o_row + o_key, y, mask=masks[r] & (i_head >= H))
        tl.store(p_pool_k + o_pools[r] * (H * K) + o_key, y, mask=masks[r] & (i_head >= H))
        tl.store(p_pool_x + o_pools[r] * D + o_channel, raws[r], mask=masks[r])


@triton.jit
def _values_and_gates(
    p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_g, p_pool_x, p_history, p_v, p_g, p_beta,
    b_used, b_sessions, b_taps, o_slots, o_pools, i_first, i_block,
    HV: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr, X_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    BV: tl.constexpr, HEADS: tl.constexpr, BETA_SCALE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A block of the HV heads of v, whose channels start at FIRST, with their gates."""
    i_gate = i_block * HEADS + tl.arange(0, HEADS)  # [HEADS]
    of_gate = i_gate < HV
    i_value = tl.arange(0, BV)[None, :]
    real = of_gate[:, None] & (i_value < V)
    o_value = i_gate[:, None] * V + i_value  # [HEADS, BV]
    masks = _masks(b_used, real, ROWS)
    b_weights = _weights(p_weight, FIRST + o_value, real, D, W)
    b_before = _inputs_in_pool(p_pool_x, p_history, b_sessions, b_taps, o_slots, FIRST + o_value, masks, D, W, ROWS)
    b_rate = -tl.exp(tl.load(p_a_log + i_gate, mask=of_gate, other=0.0))
    b_bias = tl.load(p_dt_bias + i_gate, mask=of_gate, other=0.0)
    wait_for_previous(OVERLAP)
    b_as = ()
    b_bs = ()
    for r in tl.static_range(ROWS):
        o_gate = (i_first + r).to(tl.int64) * GATE_STRIDE + i_gate
        b_as = b_as + (tl.load(p_a + o_gate, mask=of_gate & b_used[r], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        b_bs = b_bs + (tl.load(p_b + o_gate, mask=of_gate & b_used[r], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    raws, b_heres = _inputs_in_pass(p_x, b_taps, i_first, FIRST + o_value, masks, X_STRIDE, W, ROWS)
    for r in tl.static_range(ROWS):
        y = _convolved(b_weights, b_taps, b_before, b_heres, raws[r], r, W)
        b_pre = b_as[r].to(tl.float32) + b_bias
        b_g = b_rate * (tl.maximum(b_pre, 0.0) + log1p_unit(tl.exp(-tl.abs(b_pre))))
        b_beta = BETA_SCALE / (1.0 + tl.exp(-b_bs[r].to(tl.float32)))
        m_gate, o_row = of_gate & b_used[r], (i_first + r).to(tl.int64)
        tl.store(p_v + o_row * (HV * V) + o_value, y.to(p_v.dtype.element_ty), mask=masks[r])
        tl.store(p_g + o_row * HV + i_gate, b_g, mask=m_gate)
        tl.store(p_beta + o_row * HV + i_gate, b_beta, mask=m_gate)
        tl.store(p_pool_g + o_pools[r] * HV + i_gate, b_g, mask=m_gate)
        tl.store(p_pool_x + o_pools[r] * D + FIRST + o_value, raws[r], mask=masks[r])


@triton.jit(do_not_specialize=["F", "R"])
def _tree_convolution(
    p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias,
    p_pool_k, p_pool_g, p_pool_x, p_slot, p_row_session, p_pool_row, p_history, p_tap,
    p_q, p_k, p_v, p_g, p_beta,
    F, R,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, HEADS: tl.constexpr, X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    Q_SCALE: tl.constexpr, BETA_SCALE: tl.constexpr, EPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs (block of rows, block of heads): first the blocks of q and k, then those of v.

    All but the pass's own rows is read while the kernel before may still run.
    """
    D: tl.constexpr = 2 * H * K + HV * V
    KEY_BLOCKS: tl.constexpr = (2 * H + HEADS - 1) // HEADS
    admit_at_start(OVERLAP)
    i_first, i_block = tl.program_id(0) * ROWS, tl.program_id(1)
    b_used = ()  # an unused row stores nothing: a branch would make all loads wait for this one
    b_sessions = ()
    b_taps = ()  # W - 1 a row, oldest first
    o_slots = ()
    o_pools = ()
    for r in tl.static_range(ROWS):
        b_session = tl.load(p_row_session + i_first + r, mask=i_first + r < R, other=-1)
        b_used = b_used + (b_session >= 0,)  # type: ignore[assignment]  # noqa: RUF005
        b_sessions = b_sessions + (tl.maximum(b_session, 0),)  # type: ignore[assignment]  # noqa: RUF005
    for j in tl.static_range(ROWS * (W - 1)):
        o_tap = i_first * (W - 1) + (j // (W - 1)) * (W - 1) + (W - 2 - j % (W - 1))
        b_taps = b_taps + (tl.load(p_tap + o_tap, mask=i_first + j // (W - 1) < R, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    for r in tl.static_range(ROWS):
        b_pool_row = tl.load(p_pool_row + i_first + r, mask=i_first + r < R, other=0)
        o_slot = tl.maximum(tl.load(p_slot + b_sessions[r]), 0).to(tl.int64) * F
        o_slots = o_slots + (o_slot,)  # type: ignore[assignment]  # noqa: RUF005
        o_pools = o_pools + (o_slot + b_pool_row,)  # type: ignore[assignment]  # noqa: RUF005
    if i_block < KEY_BLOCKS:
        _keys_and_queries(
            p_x, p_weight, p_pool_k, p_pool_x, p_history, p_q, p_k,
            b_used, b_sessions, b_taps, o_slots, o_pools, i_first, i_block,
            H, K, D, X_STRIDE, W, ROWS, BK, HEADS, Q_SCALE, EPS, OVERLAP,
        )  # fmt: skip
    else:
        _values_and_gates(
            p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_g, p_pool_x, p_history, p_v, p_g, p_beta,
            b_used, b_sessions, b_taps, o_slots, o_pools, i_first, i_block - KEY_BLOCKS,
            HV, V, 2 * H * K, D, X_STRIDE, GATE_STRIDE, W, ROWS, BV, HEADS, BETA_SCALE, OVERLAP,
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
    admit: Admit = "waited",
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
        overlap: whether to begin while the kernel before may still run; that one must write neither what `batch` holds
            nor inputs in the pool.
        admit: when the next launch may begin, if it overlaps.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    _check(x, a, b, parameters, pool, batch, out)
    overlaps = overlapping(overlap, admit)
    rows, heads, key_width = out.q.shape
    value_heads, value_width = out.v.shape[1:]
    rows_each = 1 if rows < _MANY else 2
    blocks = triton.cdiv(2 * heads, _HEADS) + triton.cdiv(value_heads, _HEADS)
    _tree_convolution[(triton.cdiv(rows, rows_each), blocks)](
        x, a, b, parameters.weight, parameters.a_log, parameters.dt_bias,
        pool.k, pool.g, pool.x, batch.slot, batch.row_session, batch.pool_row, batch.history, batch.tap,
        out.q, out.k, out.v, out.g, out.beta,
        pool.x.shape[1], rows,
        H=heads, HV=value_heads, K=key_width, V=value_width, W=parameters.weight.shape[0], ROWS=rows_each,
        BK=triton.next_power_of_2(key_width), BV=triton.next_power_of_2(value_width), HEADS=_HEADS,
        X_STRIDE=x.stride(0), GATE_STRIDE=a.stride(0),
        Q_SCALE=key_width**-0.5, BETA_SCALE=2.0 if parameters.allow_neg_eigval else 1.0, EPS=L2_EPS,
        OVERLAP=overlaps, num_warps=_HEADS, launch_pdl=overlaps > 0,
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
