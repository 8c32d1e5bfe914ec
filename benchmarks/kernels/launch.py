"""The selector's choices by name, by mode, and bound to a bucket and a layer's shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specla.benchmarks.kernels.shapes import Shape
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import verify_factorised
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.selector import Choice, Mode
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.gpu.streamed import StreamedTile

Launch = Callable[[LayerRows, Tensor, FactorPool, PassBatch, Tensor], None]
"""(rows, state, pool, batch, o): one layer's verification with the deferred commit; see `verify_serial`."""


def name_of(choice: Choice) -> str:
    """As in the tables."""
    if choice.kernel == "serial":
        return "serial" if choice.groups == 1 else f"hybrid, {choice.groups} groups"
    if choice.tile is None:
        return "factorised"
    form = {HeldTile: "held", StreamedTile: "streamed"}.get(type(choice.tile), "factorised")
    return ", ".join([form, *(f"{field} {size}" for field, size in choice.tile._asdict().items())])


def mode_of(choice: Choice) -> Mode:
    """The stricter mode that may use it."""
    return "exact" if choice.is_exact else "fast"


def launch_of(choice: Choice, shape: Shape, bucket: Bucket, device: torch.device, *, overlap: bool = True) -> Launch:
    """The kernel for batches of a bucket, with a workspace of its own.

    Launches overlap: two of the same layer must not follow each other without another kernel between them.
    """
    if choice.kernel == "serial":
        sizes = (shape.value_heads, shape.key_width, shape.value_width)
        return partial(verify_serial, workspace=SerialWorkspace.empty(bucket, *sizes, device), overlap=overlap)
    return partial(verify_factorised, tile=choice.tile, overlap=overlap)
