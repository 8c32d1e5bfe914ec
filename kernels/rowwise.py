"""Elementwise and per-row maths whose bits for one row do not depend on the other rows of a pass.

PyTorch computes most of a tensor with vector instructions and the end of each thread's share with scalar ones, and for
sigmoid, softplus and silu the two differ in the last bit. Which elements fall into the end depends on the number of
rows. The forms here keep every row inside whole vectors: rows are a multiple of `_LANES` wide, and no call is large
enough to be split over threads. `exactness.py` checks the build at hand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_LANES = 32  # elements that one round of a vectorised loop takes, at most: two AVX-512 registers of float32
_SERIAL = 32768  # elements up to which PyTorch does not split an elementwise loop over threads


class GateParameters(NamedTuple):
    """A layer's gate parameters, padded once to whole vectors (see `gate_parameters`)."""

    bias: Tensor
    """float32 [P]: dt_bias, then zeros."""
    decay_rate: Tensor
    """float32 [HV]: -exp(a_log)."""
    beta_scale: float
    """The largest beta: 1, or 2 where negative eigenvalues are allowed."""


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), float32 [R, D]; x may be a slice of wider rows."""
    rows, width = x.shape
    if width % _LANES or width > _SERIAL:
        return x / x.neg().exp_().add_(1)  # exp alone has one form for every element
    block = _SERIAL // width
    if rows <= block:
        return functional.silu(x)
    return torch.cat([functional.silu(part) for part in torch.split(x, block)])


def l2_normalise(qk: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalises q and k and scales q by K^-1/2: x / sqrt(sum x^2 + eps) per head, as fla's kernels define it.

    Args:
        qk: float32 [R, 2, H, K], a row's q and k side by side.

    Returns:
        float32 [R, 2, H, K], contiguous.
    """
    squares = (qk * qk).sum(-1, keepdim=True)  # [R, 2, H, 1]
    factor, offset = _l2_constants(qk.shape[-1], eps)
    return qk * torch.addcmul(offset, squares, factor).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight x / sqrt(mean x^2 + eps) over the last dimension: float32, x [..., D] and weight [D]."""
    scale = (x * x).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def gate_parameters(a_log: Tensor, dt_bias: Tensor, allow_neg_eigval: bool = False) -> GateParameters:
    """Prepares a layer's a_log and dt_bias (both [HV]) for `gates`."""
    heads = a_log.shape[0]
    bias = torch.zeros(-(-2 * heads // _LANES) * _LANES)
    bias[:heads] = dt_bias.float()
    return GateParameters(bias, -torch.exp(a_log.float()), 2.0 if allow_neg_eigval else 1.0)


def gates(ab: Tensor, parameters: GateParameters) -> tuple[Tensor, Tensor]:
    """Log decay and writing strength: g = -exp(a_log) softplus(a + dt_bias), beta = beta_scale sigmoid(b).

    Args:
        ab: float32 [R, 2 HV], the projections a and b side by side; or already [R, P] with anything behind them, which
            saves a copy.
        parameters: from `gate_parameters`.

    Returns:
        g and beta, both float32 [R, HV]; g <= 0.
    """
    heads, width = parameters.decay_rate.shape[0], parameters.bias.shape[0]
    if ab.shape[1] < width:
        ab = functional.pad(ab, (0, width - ab.shape[1]))
    x = ab + parameters.bias  # [R, P]
    parts = (x,) if x.numel() <= _SERIAL else torch.split(x, _SERIAL // width)
    softplus = _joined([functional.softplus(part) for part in parts])
    sigmoid = _joined([torch.sigmoid(part) for part in parts])
    beta = sigmoid[:, heads : 2 * heads]
    if parameters.beta_scale != 1.0:
        beta = beta * parameters.beta_scale
    return softplus[:, :heads] * parameters.decay_rate, beta


@lru_cache(maxsize=64)
def _l2_constants(width: int, eps: float) -> tuple[Tensor, Tensor]:
    """For q and k, [2, 1, 1] each, what sum x^2 is multiplied by and what is added: q's K^-1/2 moved under the root."""
    factor = torch.tensor([float(width), 1.0]).view(2, 1, 1)
    return factor, factor * eps


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
