"""Random inputs of the recurrence as layers have them, seeded."""

from __future__ import annotations

import torch
from torch import Tensor

from specla.benchmarks.kernels.shapes import Shape
from specla.kernels.gpu.layer_rows import LayerRows

SLOWEST, FASTEST = 1e-4, 0.9
"""Typical -log decays of the most and the least persistent head; those between are spread evenly over their logs."""


class Inputs:
    """Draws of one shape: q and k of length 1 (q scaled by K^-1/2), decays by head, beta in (0, 1)."""

    def __init__(self, shape: Shape, *, dtype: torch.dtype, device: torch.device | str, seed: int):
        """`dtype` is the model's."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._draw = torch.Generator(device=device).manual_seed(seed)
        head = torch.linspace(0, 1, shape.value_heads, device=device)
        self._pace = -SLOWEST * (FASTEST / SLOWEST) ** head

    def normal(self, *size: int) -> Tensor:
        """float32, standard normal."""
        return torch.randn(*size, generator=self._draw, device=self._device)

    def keys(self, *lead: int, scale: float = 1.0) -> Tensor:
        """[*lead, H, K] of length `scale`, model dtype."""
        x = self.normal(*lead, self._shape.heads, self._shape.key_width)
        unit: Tensor = scale * x / x.norm(dim=-1, keepdim=True)
        return unit.to(self._dtype)

    def decays(self, *lead: int) -> Tensor:
        """Log decays [*lead, HV], float32, half to one and a half times a head's own."""
        spread = torch.rand(*lead, self._shape.value_heads, generator=self._draw, device=self._device)
        found: Tensor = self._pace * (0.5 + spread)
        return found

    def rows(self, *lead: int) -> LayerRows:
        """q, k, v, g, beta over [*lead, ...]."""
        shape = self._shape
        return LayerRows(
            self.keys(*lead, scale=shape.key_width**-0.5),
            self.keys(*lead),
            self.normal(*lead, shape.value_heads, shape.value_width).to(self._dtype),
            self.decays(*lead),
            torch.sigmoid(self.normal(*lead, shape.value_heads)),
        )

    def states(self, *lead: int) -> Tensor:
        """float32 [*lead, HV, K, V]."""
        shape = self._shape
        return 0.3 * self.normal(*lead, shape.value_heads, shape.key_width, shape.value_width)
