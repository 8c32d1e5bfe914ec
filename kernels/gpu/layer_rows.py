"""What one layer's rows bring to verification: the convolved, normalised and gated inputs of the recurrence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerRows(NamedTuple):
    """Contiguous tensors over the R row places of a bucket; rows that no session uses may hold anything."""

    q: Tensor
    """model dtype [R, H, K], normalised and scaled by K^-1/2."""
    k: Tensor
    """model dtype [R, H, K], normalised."""
    v: Tensor
    """model dtype [R, HV, V], HV a multiple of H."""
    g: Tensor
    """float32 [R, HV], log decay, -inf to 0."""
    beta: Tensor
    """float32 [R, HV], 0 to 2."""

    @classmethod
    def empty(
        cls,
        rows: int,
        heads: int,
        value_heads: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LayerRows:
        """Uninitialised tensors for `rows` row places."""
        return cls(
            torch.empty(rows, heads, key_width, dtype=dtype, device=device),
            torch.empty(rows, heads, key_width, dtype=dtype, device=device),
            torch.empty(rows, value_heads, value_width, dtype=dtype, device=device),
            torch.empty(rows, value_heads, device=device),
            torch.empty(rows, value_heads, device=device),
        )
