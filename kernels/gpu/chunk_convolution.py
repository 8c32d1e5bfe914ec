"""The convolution, norms and gates of many consecutive tokens: what convolution.py does for a tree's rows.

A row's taps are the rows before it; above a text's first row they go on through the raw inputs that the session's pool
keeps. The last W - 1 rows' raw inputs go to the pool, where they are the next rows' history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.chunk_batch import CHUNK, ChunkBatch
from specla.kernels.gpu.convolution import L2_EPS, ConvolutionParameters
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.maths import log1p_unit
from specla.kernels.gpu.norms import MODEL_DTYPES
from specla.kernels.gpu.overlap import overlapping, wait_for_previous

_ELEMENTS = 4096  # of a program's tile
_FEWEST_ROWS = 16  # of a program, all of one block and so of one text
_WARPS = 16  # more threads than columns: else rows change hands between threads before their weights meet them
_ALIGNED = 16  # bytes


@triton.jit
def _convolved(
    p_x, p_weight, p_pool_x, p_history, i_row, o_channel, used, within,
    D: tl.constexpr, X_STRIDE: tl.constexpr, W: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of rows [ROWS, 1] at channels [1, B], in float32, and the rows' raw inputs.

    0 in rows that are not `used` and in columns that are not `within` their head. Without EDGE all rows are used, and
    so are the W - 1 rows before each.
    """
    mask = used & within if EDGE else within
    total = tl.zeros_like(i_row + o_channel).to(tl.float32)
    for i in tl.static_range(W - 1):
        i_tap = i_row - (W - 1 - i)
        weight = tl.load(p_weight + i * D + o_channel, mask=within, other=0.0)
        if EDGE:
            pool_row = tl.load(p_history + i_tap + (W - 1), mask=i_tap < 0, other=-1)  # -1: zeros before the prompt
            here = tl.load(p_x + i_tap.to(tl.int64) * X_STRIDE + o_channel, mask=mask & (i_tap >= 0), other=0.0)
            before = tl.load(p_pool_x + pool_row.to(tl.int64) * D + o_channel, mask=mask & (pool_row >= 0), other=0.0)
            total += weight * tl.where(i_tap < 0, before, here).to(tl.float32)
        else:
            here = tl.load(p_x + i_tap.to(tl.int64) * X_STRIDE + o_channel, mask=mask, other=0.0)
            total += weight * here.to(tl.float32)
    raw = tl.load(p_x + i_row.to(tl.int64) * X_STRIDE + o_channel, mask=mask, other=0.0)
    total += tl.load(p_weight + (W - 1) * D + o_channel, mask=within, other=0.0) * raw.to(tl.float32)
    return total / (1.0 + tl.exp(-total)), raw


@triton.jit
def _sum_of_squares(y, ROWS: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr):
    """Of each row of [ROWS, B], as [ROWS], in one order however the tile lies among threads.

    Of RUN numbers side by side one after the other; then, of 32 such sums, those 16 apart, 8 apart and so on; then the
    rest likewise.
    """
    RUNS: tl.constexpr = B // RUN
    GROUP: tl.constexpr = RUNS if RUNS < 32 else 32
    GROUPS: tl.constexpr = RUNS // GROUP
    if RUN == 1:
        runs = y * y
    elif RUN == 2:
        first, second = tl.split(tl.reshape(y, [ROWS, RUNS, 2]))
        runs = tl.fma(first, first, second * second)
    elif RUN == 4:
        runs = _of_four(*tl.split(tl.reshape(y, [ROWS, RUNS, 2, 2])))
    else:
        tl.static_assert(RUN == 8)
        even, odd = tl.split(tl.reshape(y, [ROWS, RUNS, 2, 2, 2]))
        even, even_later = _split_first(even)
        odd, odd_later = _split_first(odd)
        runs = _four_more(even_later, odd_later, _of_four(even, odd))
    groups = _halved(tl.reshape(runs, [ROWS * GROUPS, GROUP]), ROWS * GROUPS, GROUP)
    return _halved(tl.reshape(groups, [ROWS, GROUPS]), ROWS, GROUPS)


@triton.jit
def _split_first(x):
    """[R, S, 2, N] as the two [R, S, N]."""
    return tl.split(tl.permute(x, [0, 1, 3, 2]))


@triton.jit
def _of_four(even, odd):
    """The squares of [R, S, 2] and [R, S, 2], one of each in turn, one onto the other."""
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return tl.fma(d, d, tl.fma(c, c, tl.fma(a, a, b * b)))


@triton.jit
def _four_more(even, odd, total):
    """Likewise, onto a total."""
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return tl.fma(d, d, tl.fma(c, c, tl.fma(b, b, tl.fma(a, a, total))))


@triton.jit
def _halved(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of each row of [ROWS, WIDTH]: its second half onto the first until one number is left."""
    if WIDTH == 1:
        return tl.reshape(x, [ROWS])
    else:
        return _halved(tl.sum(tl.reshape(x, [ROWS, 2, WIDTH // 2]), 1), ROWS, WIDTH // 2)


@triton.jit
def _keep(p_pool_x, p_kept, kept, i_kept, o_channel, raw, mask, D: tl.constexpr):
    """Raw inputs of the chunk's last rows to their pool rows."""
    of_kept = (i_kept >= 0) & (i_kept < kept)
    pool_row = tl.load(p_kept + i_kept, mask=of_kept, other=0).to(tl.int64)
    tl.store(p_pool_x + pool_row * D + o_channel, raw, mask=mask & of_kept)


@triton.jit
def _keys_and_queries(
    p_x, p_weight, p_pool_x, p_history, p_kept, p_q, p_k, i_row, i_head, T, kept,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, W: tl.constexpr, PITCH: tl.constexpr, BK: tl.constexpr,
    X_STRIDE: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, Q_SCALE: tl.constexpr, EPS: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """One of the 2 H heads of q and then k."""
    o_k = tl.arange(0, BK)[None, :]
    o_channel = i_head * K + o_k  # [1, BK]
    y, raw = _convolved(
        p_x, p_weight, p_pool_x, p_history, i_row, o_channel, i_row < T, o_k < K, D, X_STRIDE, W, EDGE
    )  # fmt: skip
    y = y / tl.sqrt(_sum_of_squares(y, ROWS, BK, RUN) + EPS)[:, None]
    o_key = i_row.to(tl.int64) * (H * PITCH) + o_k
    mask = o_k < PITCH
    if i_head < H:
        tl.store(p_q + o_key + i_head * PITCH, (y * Q_SCALE).to(p_q.dtype.element_ty), mask=mask)
    else:
        tl.store(p_k + o_key + (i_head - H) * PITCH, y.to(p_k.dtype.element_ty), mask=mask)
    if EDGE:
        _keep(p_pool_x, p_kept, kept, i_row - (T - kept), o_channel, raw, o_k < K, D)


@triton.jit
def _values(
    p_x, p_weight, p_pool_x, p_history, p_kept, p_v, i_row, i_head, T, kept,
    HV: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BV: tl.constexpr,
    X_STRIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One of the HV heads of v, whose channels start at FIRST."""
    o_v = tl.arange(0, BV)[None, :]
    o_value = i_head * V + o_v  # [1, BV]
    y, raw = _convolved(
        p_x, p_weight, p_pool_x, p_history, i_row, FIRST + o_value, i_row < T, o_v < V, D, X_STRIDE, W, EDGE
    )  # fmt: skip
    mask = o_v < V
    tl.store(p_v + i_row.to(tl.int64) * (HV * V) + o_value, y.to(p_v.dtype.element_ty), mask=mask)
    if EDGE:
        _keep(p_pool_x, p_kept, kept, i_row - (T - kept), FIRST + o_value, raw, o_v < V, D)


@triton.jit
def _gates(
    p_a, p_b, p_a_log, p_dt_bias, p_g, p_beta, i_row, T,
    HV: tl.constexpr, BH: tl.constexpr, GATE_STRIDE: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """All heads' gates."""
    o_h = tl.arange(0, BH)[None, :]
    used = i_row < T
    o_gate = i_row.to(tl.int64) * GATE_STRIDE + o_h
    a = tl.load(p_a + o_gate, mask=used & (o_h < HV), other=0.0).to(tl.float32)
    b = tl.load(p_b + o_gate, mask=used & (o_h < HV), other=0.0).to(tl.float32)
    rate = tl.load(p_a_log + o_h, mask=o_h < HV, other=0.0)
    pre = a + tl.load(p_dt_bias + o_h, mask=o_h < HV, other=0.0)
    g = -tl.exp(rate) * (tl.maximum(pre, 0.0) + log1p_unit(tl.exp(-tl.abs(pre))))
    beta = BETA_SCALE / (1.0 + tl.exp(-b))
    mask = o_h < HV
    tl.store(p_g + i_row * HV + o_h, tl.where(used, g, 0.0), mask=mask)
    tl.store(p_beta + i_row * HV + o_h, tl.where(used, beta, 0.0), mask=mask)


@triton.jit
def _rows(
    p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_x, p_history, p_kept, p_q, p_k, p_v, p_g, p_beta,
    i_head, i_row, first, T, kept,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    PITCH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    Q_SCALE: tl.constexpr, BETA_SCALE: tl.constexpr, EPS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """A program's rows of the text that begins at row `first`; EDGE: maybe its first, last or none of its own."""
    D: tl.constexpr = 2 * H * K + HV * V
    if i_head < 2 * H:
        _keys_and_queries(
            p_x + first * X_STRIDE, p_weight, p_pool_x, p_history, p_kept, p_q + first * (H * PITCH),
            p_k + first * (H * PITCH), i_row, i_head, T, kept, H, K, D, W, PITCH, BK, X_STRIDE, ROWS, RUN,
            Q_SCALE, EPS, EDGE,
        )  # fmt: skip
    elif i_head < 2 * H + HV:
        _values(
            p_x + first * X_STRIDE, p_weight, p_pool_x, p_history, p_kept, p_v + first * (HV * V),
            i_row, i_head - 2 * H, T, kept, HV, V, 2 * H * K, D, W, BV, X_STRIDE, EDGE,
        )  # fmt: skip
    else:
        _gates(
            p_a + first * GATE_STRIDE, p_b + first * GATE_STRIDE, p_a_log, p_dt_bias, p_g + first * HV,
            p_beta + first * HV, i_row, T, HV, BH, GATE_STRIDE, BETA_SCALE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pool_rows"])
def chunk_convolution_kernel(
    p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_x, p_history, p_kept, p_owner, p_texts,
    p_q, p_k, p_v, p_g, p_beta, pool_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    PITCH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr, X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    Q_SCALE: tl.constexpr, BETA_SCALE: tl.constexpr, EPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (2 H + HV + 1, ROWS rows each): heads of q, of k and of v, then all heads' gates.

    Columns past a head's width, up to the pitch of q and k, are zeros, and so are rows of a block behind its text.
    """
    D: tl.constexpr = 2 * H * K + HV * V
    i_head, i_first = tl.program_id(0), tl.program_id(1) * ROWS
    owner = tl.load(p_owner + i_first // BLOCK)
    wait_for_previous(OVERLAP)
    if owner < 0:
        return
    first, T = tl.load(p_texts + 3 * owner).to(tl.int64), tl.load(p_texts + 3 * owner + 1)
    p_pool_x += tl.load(p_texts + 3 * owner + 2).to(tl.int64) * pool_rows * D
    p_history += owner * (W - 1)
    p_kept += owner * (W - 1)
    kept = tl.minimum(T, W - 1)
    i_first -= first.to(tl.int32)
    i_row = i_first + tl.arange(0, ROWS)[:, None]  # [ROWS, 1], from the text's first on
    if (i_first < W - 1) | (i_first + ROWS > T - kept):
        _rows(
            p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_x, p_history, p_kept, p_q, p_k, p_v, p_g, p_beta,
            i_head, i_row, first, T, kept, H, HV, K, V, W, PITCH, BK, BV, BH, ROWS, RUN, X_STRIDE, GATE_STRIDE,
            Q_SCALE, BETA_SCALE, EPS, True,
        )  # fmt: skip
    else:
        _rows(
            p_x, p_a, p_b, p_weight, p_a_log, p_dt_bias, p_pool_x, p_history, p_kept, p_q, p_k, p_v, p_g, p_beta,
            i_head, i_row, first, T, kept, H, HV, K, V, W, PITCH, BK, BV, BH, ROWS, RUN, X_STRIDE, GATE_STRIDE,
            Q_SCALE, BETA_SCALE, EPS, False,
        )  # fmt: skip


def chunk_convolution(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parameters: ConvolutionParameters,
    pool_x: Tensor,
    batch: ChunkBatch,
    out: LayerRows,
    *,
    overlap: bool = False,
) -> None:
    """Fills `out` with consecutive tokens of each text, by the formulas of `tree_convolution`.

    Args:
        x: model dtype [R, D], raw inputs of q, k and v side by side; rows may stand apart, by multiples of 16 bytes.
        a, b: model dtype or float32 [R, HV], projections for decay and writing strength; rows may stand apart equally.
        parameters: the layer's weights.
        pool_x: model dtype [slots, F, D], the raw inputs in the sessions' pools.
        batch: which rows belong to which slot's text, what comes before it, and where its last raw inputs go.
        out: where the rows go. Of a text's last block the rows behind the text become zeros, and so do columns of q
            and k past the key width, which x tells; blocks of no text are left alone.
        overlap: whether to begin while the kernel before, which must not write `batch`, may still run. The next
            launch may begin once this one has waited.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    _check(x, a, b, parameters, pool_x, batch, out)
    rows, heads, pitch = out.q.shape
    value_heads, value_width = out.v.shape[1:]
    key_width = (x.shape[1] - value_heads * value_width) // (2 * heads)
    overlaps = overlapping(overlap)
    columns, value_columns = triton.next_power_of_2(pitch), triton.next_power_of_2(value_width)
    of_program = min(max(_ELEMENTS // max(columns, value_columns), _FEWEST_ROWS), CHUNK)
    chunk_convolution_kernel[(2 * heads + value_heads + 1, rows // of_program)](
        x, a, b, parameters.weight, parameters.a_log, parameters.dt_bias, pool_x,
        batch.history, batch.places, batch.owner, batch.texts, *out, pool_x.shape[1],
        H=heads, HV=value_heads, K=key_width, V=value_width, W=parameters.weight.shape[0],
        PITCH=pitch, BK=columns, BV=value_columns,
        BH=triton.next_power_of_2(value_heads), ROWS=of_program, RUN=_run(columns, x.dtype), BLOCK=CHUNK,
        X_STRIDE=x.stride(0), GATE_STRIDE=a.stride(0),
        Q_SCALE=key_width**-0.5, BETA_SCALE=2.0 if parameters.allow_neg_eigval else 1.0, EPS=L2_EPS,
        OVERLAP=overlaps, num_warps=_WARPS, launch_pdl=overlaps > 0,
    )  # fmt: skip


def _run(columns: int, dtype: torch.dtype) -> int:
    """Columns whose squares are summed first: as many as share a thread where four warps have a row, or 16 bytes."""
    return columns // 128 if columns >= 128 else min(columns, _ALIGNED // dtype.itemsize)


def _check(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parameters: ConvolutionParameters,
    pool_x: Tensor,
    batch: ChunkBatch,
    out: LayerRows,
) -> None:
    (rows, heads, pitch), taps = out.q.shape, parameters.weight.shape[0]
    value_heads, value_width = out.v.shape[1:]
    key_width = (x.shape[1] - value_heads * value_width) // (2 * heads)
    channels = 2 * heads * key_width + value_heads * value_width
    model, single = (x.dtype,), (torch.float32,)
    wanted = {
        "x": (x, (rows, channels), MODEL_DTYPES),
        "a": (a, (rows, value_heads), (*model, *single)),
        "b": (b, (rows, value_heads), (*model, *single)),
        "weight": (parameters.weight, (taps, channels), single),
        "a_log": (parameters.a_log, (value_heads,), single),
        "dt_bias": (parameters.dt_bias, (value_heads,), single),
        "pool_x": (pool_x, (*pool_x.shape[:2], channels), model),
        "out.q": (out.q, (rows, heads, pitch), model),
        "out.k": (out.k, (rows, heads, pitch), model),
        "out.v": (out.v, (rows, value_heads, value_width), model),
        "out.g": (out.g, (rows, value_heads), single),
        "out.beta": (out.beta, (rows, value_heads), single),
    }
    if not 0 < key_width <= pitch:
        raise ValueError(f"x is {list(x.shape)} for {heads} heads of q and k of {pitch}: give them their width or more")
    batch.check(rows, x.device, taps)
    for name, (tensor, shape, dtypes) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: give {allowed} {list(shape)}")
        apart = name in ("x", "a", "b")
        lies = tensor.stride(-1) == 1 if apart else tensor.is_contiguous()
        if name not in ("a", "b"):
            step = tensor.stride(0) * tensor.element_size() if apart else 0
            lies &= not (tensor.data_ptr() % _ALIGNED or step % _ALIGNED)
        if not lies or tensor.device != x.device:
            raise ValueError(
                f"{name} on {tensor.device} with strides {tensor.stride()}: give a contiguous tensor on {x.device} "
                f"that starts at a multiple of {_ALIGNED} bytes (rows of x, a and b may stand apart)"
            )
    if a.stride(0) != b.stride(0):
        raise ValueError(f"rows of a and b stand {a.stride(0)} and {b.stride(0)} apart: give the same")
