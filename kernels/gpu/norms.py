"""What lies between the matrix products of a pass: residual and norm, gated norm. One launch each.

A program has one row (or a block of its heads), so a row's bits depend on the row alone. Everything is computed in
float32 and rounded to the model's dtype when stored. How many rows count is read on the device; places beyond them are
neither read nor written.

With `overlap` a launch may begin while the kernel before in the stream still runs; weights and the number of rows are
read meanwhile. `admit` says when the kernel behind may begin in its turn.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.overlap import Admit, admit_at_start, overlapping, wait_for_previous

Activation = Literal["silu", "sigmoid"]

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED = 16  # bytes, as in convolution.py
_NORM_WARPS = 8
_GATED_ELEMENTS = 2048  # of a program's heads


@triton.jit(do_not_specialize=["R"])
def add_rms_norm_kernel(
    p_x, p_y, p_weight, p_out, p_rows, R, eps,
    D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (R,)."""
    i_row = tl.program_id(0)
    admit_at_start(OVERLAP)
    n = tl.load(p_rows)
    o_d = tl.arange(0, BD)
    mask = o_d < D
    weight = tl.load(p_weight + o_d, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    if i_row < n:
        o_row = i_row.to(tl.int64) * D
        x = tl.load(p_x + o_row + o_d, mask=mask, other=0.0)
        if PARTS > 0:
            added = tl.load(p_y + o_row + o_d, mask=mask, other=0.0).to(tl.float32)
            for i in tl.static_range(1, PARTS):
                added += tl.load(p_y + R.to(tl.int64) * (i * D) + o_row + o_d, mask=mask, other=0.0).to(tl.float32)
            x += added
            tl.store(p_x + o_row + o_d, x, mask=mask)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
        tl.store(p_out + o_row + o_d, (x * scale * weight).to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_kernel(
    p_o, p_gate, p_weight, p_out, p_rows, gate_stride, eps,
    HV: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, SIGMOID: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (R, blocks of heads)."""
    i_row = tl.program_id(0)
    admit_at_start(OVERLAP)
    n = tl.load(p_rows)
    i_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    i_value = tl.arange(0, BV)[None, :]
    weight = tl.load(p_weight + i_value, mask=i_value < V, other=0.0)
    mask = (i_head < HV) & (i_value < V)
    o_value = i_head * V + i_value  # [HEADS, BV]
    wait_for_previous(OVERLAP)
    if i_row < n:
        o_row = i_row.to(tl.int64) * (HV * V)
        y = tl.load(p_o + o_row + o_value, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(p_gate + i_row.to(tl.int64) * gate_stride + o_value, mask=mask, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(y * y, 1) / V + eps)  # [HEADS]
        y = y * scale[:, None] * weight
        if GATED:
            y = y / (1.0 + tl.exp(-gate))
            if not SIGMOID:
                y = y * gate
        tl.store(p_out + o_row + o_value, y.to(p_out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rows: Tensor,
    *,
    overlap: bool = False,
    admit: Admit = "waited",
) -> None:
    """x += y, then out = x / sqrt(mean x^2 + eps) * weight.

    Args:
        x: float32 [R, D], the residual stream; written if there is a y.
        y: [R, D] in float32 or the model's dtype, what is added; or float32 [P, R, D], summed in order and then added:
            what a product leaves whose sums were cut into P parts; or None, which leaves x as it is.
        weight: float32 [D].
        eps: added to the mean of squares.
        out: model dtype [R, D].
        rows: int32 [1], how many rows count, R at most.
        overlap: whether to begin while the kernel before may still run; that one must write neither `rows` nor
            `weight`.
        admit: when the next launch may begin, if it overlaps.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    if x.dim() != 2:
        raise ValueError(f"x is {list(x.shape)}: give [R, D]")
    shape = tuple(x.shape)
    check_tensor("x", x, shape, (torch.float32,), x.device)
    check_tensor("weight", weight, shape[1:], (torch.float32,), x.device)
    check_tensor("out", out, shape, MODEL_DTYPES, x.device)
    parts = 0
    if y is not None:
        parts = y.shape[0] if y.dim() == 3 else 1
        check_tensor("y", y, (parts, *shape) if y.dim() == 3 else shape, (torch.float32, out.dtype), x.device)
    check_rows(rows, x.device)
    overlaps = overlapping(overlap, admit)
    add_rms_norm_kernel[(shape[0],)](
        x, x if y is None else y, weight, out, rows, shape[0], eps,
        D=shape[1], BD=triton.next_power_of_2(shape[1]), PARTS=parts, OVERLAP=overlaps,
        num_warps=_NORM_WARPS, launch_pdl=overlaps > 0,
    )  # fmt: skip


def gated_norm(
    o: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: Activation,
    out: Tensor,
    rows: Tensor,
    *,
    overlap: bool = False,
    admit: Admit = "waited",
) -> None:
    """out = o / sqrt(mean o^2 + eps) * weight, a head at a time, times silu(gate) or sigmoid(gate).

    Args:
        o: [R, HV, V] in float32 or the model's dtype, the recurrence's outputs.
        gate: model dtype [R, HV V], maybe a slice of wider rows; None for a model without one.
        weight: float32 [V], of every head.
        eps: added to the mean of squares.
        activation: of the gate.
        out: model dtype [R, HV V].
        rows, overlap, admit: as `add_rms_norm`.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together, or the activation is unknown.
    """
    if o.dim() != 3:
        raise ValueError(f"o is {list(o.shape)}: give [R, HV, V]")
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation {activation!r}: give 'silu' or 'sigmoid'")
    count, heads, width = o.shape
    check_tensor("out", out, (count, heads * width), MODEL_DTYPES, o.device)
    check_tensor("o", o, (count, heads, width), (torch.float32, out.dtype), o.device)
    check_tensor("weight", weight, (width,), (torch.float32,), o.device)
    if gate is not None:
        check_tensor("gate", gate, (count, heads * width), (out.dtype,), o.device, strided=True)
    check_rows(rows, o.device)
    overlaps = overlapping(overlap, admit)
    columns = triton.next_power_of_2(width)
    block = max(1, min(_GATED_ELEMENTS // columns, triton.next_power_of_2(heads)))
    gated_norm_kernel[(count, triton.cdiv(heads, block))](
        o, o if gate is None else gate, weight, out, rows, 0 if gate is None else gate.stride(0), eps,
        HV=heads, V=width, HEADS=block, BV=columns, GATED=gate is not None, SIGMOID=activation == "sigmoid",
        OVERLAP=overlaps, num_warps=_NORM_WARPS, launch_pdl=overlaps > 0,
    )  # fmt: skip


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *,
    strided: bool = False,
) -> None:
    """Raises ValueError unless a tensor is as a kernel reads it: aligned, and contiguous or, if `strided`, in rows."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: give {allowed} {list(shape)}")
    dense = tensor.stride(-1) == 1 and tensor.stride(0) >= shape[-1] if strided else tensor.is_contiguous()
    pitch = tensor.stride(0) * tensor.element_size() if strided and shape[0] > 1 else 0
    if not dense or tensor.device != device or tensor.data_ptr() % _ALIGNED or pitch % _ALIGNED:
        raise ValueError(
            f"{name} on {tensor.device} with strides {tensor.stride()}: give a contiguous tensor"
            f"{' (or a slice of columns)' if strided else ''} on {device} whose rows start at multiples of "
            f"{_ALIGNED} bytes"
        )


def check_rows(rows: Tensor, device: torch.device) -> None:
    """Raises ValueError unless `rows` is one int32 on the device."""
    if rows.dtype != torch.int32 or rows.numel() != 1 or rows.device != device:
        raise ValueError(f"rows is {rows.dtype} {list(rows.shape)} on {rows.device}: give int32 [1] on {device}")
