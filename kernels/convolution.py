"""The short convolution of a GDN layer over trees: a row's taps are itself, its ancestors, then the stored window.

q, k and v are convolved side by side as one tensor of D channels. The pass keeps the raw inputs it looked at; the
window after any row is a selection of them, so rejected rows leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.kernels.rowwise import silu
from specla.kernels.tree import TreeBatch

_SUMMED_IN_ORDER = 4  # taps


class Convolved(NamedTuple):
    """What a pass makes of its raw inputs."""

    y: Tensor
    """float32 [R, D]."""
    inputs: Tensor
    """float32 [B (W - 1) + R, D], the windows and then the rows: what `advance_window` selects from."""


def tree_convolution(x: Tensor, window: Tensor, weight: Tensor, batch: TreeBatch) -> Convolved:
    """Depthwise causal convolution and silu along every row's own path. Row-independent bits.

    Args:
        x: float32 [R, D], the rows' raw inputs.
        window: float32 [B, W - 1, D], each session's last raw inputs before its root, oldest first; not written.
        weight: float32 [W, D], a checkpoint's [D, 1, W] transposed once; the last tap multiplies the row itself.
        batch: whose rows these are.

    Raises:
        ValueError: the shapes do not belong together.
    """
    width, channels = weight.shape
    if x.shape != (batch.rows, channels) or window.shape != (batch.sessions, width - 1, channels):
        raise ValueError(
            f"x {list(x.shape)} and window {list(window.shape)} do not fit {batch.rows} rows of {batch.sessions} "
            f"sessions and weight {list(weight.shape)}: want x [R, D] and window [B, W - 1, D]"
        )
    inputs = torch.cat((window.reshape(-1, channels), x))
    if batch.rows == 1:
        products = (inputs * weight).unsqueeze(1)  # [W, 1, D]
    else:
        taps = inputs.index_select(0, batch.taps(width)).view(width, batch.rows, channels)
        products = taps.mul_(weight.unsqueeze(1))  # [W, R, D]
    return Convolved(silu(_add_in_order(products)), inputs)


def _add_in_order(products: Tensor) -> Tensor:
    """The sum [R, D] over the taps of [W, R, D], oldest first, whatever R and D are; overwrites `products`.

    PyTorch's own sum adds more than four terms in an order that depends on R and D. Up to four it adds in this order,
    and one call is less for a single row than one a tap.
    """
    width, rows, _ = products.shape
    if rows == 1 and width <= _SUMMED_IN_ORDER:
        return products.sum(0)
    y, *rest = products.unbind(0)
    for product in rest:
        y.add_(product)
    return y


def advance_window(
    window: Tensor, slots: Sequence[int], inputs: Tensor, batch: TreeBatch, last_rows: Sequence[int | None]
) -> None:
    """Writes each session's window as it stands after its last accepted row.

    Args:
        window: float32 [slots, W - 1, D], the store; only the named slots are written.
        slots: [B], each session's slot.
        inputs: from `tree_convolution` on the same batch.
        batch: the pass that made `inputs`.
        last_rows: [B], the batch's row of each session's last accepted token; None leaves the window as it is.
    """
    width = window.shape[1] + 1
    for slot, row in zip(slots, last_rows, strict=True):
        if row is not None:
            torch.index_select(inputs, 0, batch.window_after(width, row), out=window[slot])
