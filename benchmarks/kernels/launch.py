"""Our kernels as a selector may choose them, bound to a bucket and a layer's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from specla.benchmarks.kernels.shapes import Shape
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import FactorisedTile, verify_factorised
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial

Mode = Literal["exact", "fast"]

Launch = Callable[[LayerRows, Tensor, FactorPool, PassBatch, Tensor], None]
"""(rows, state, pool, batch, o): one layer's verification with the deferred commit; see `verify_serial`."""


@dataclass(frozen=True)
class Candidate:
    """One of our kernels and how it is cut.

    Attributes:
        kernel: serial (exact) or factorised (fast).
        groups: programs that share a tree in the serial kernel; 1 walks it whole.
        tile: of the factorised kernel; None is its default for the bucket.
    """

    kernel: Literal["serial", "factorised"]
    groups: int = 1
    tile: FactorisedTile | None = None

    @property
    def name(self) -> str:
        """As in the tables."""
        if self.kernel == "serial":
            return "serial" if self.groups == 1 else f"hybrid, {self.groups} groups"
        if self.tile is None:
            return "factorised"
        return ", ".join(["factorised", *(f"{field} {size}" for field, size in self.tile._asdict().items())])

    @property
    def mode(self) -> Mode:
        """The stricter mode that may use it."""
        return "exact" if self.kernel == "serial" else "fast"

    def launch(self, shape: Shape, bucket: Bucket, device: torch.device) -> Launch:
        """The kernel for batches of a bucket, with a workspace of its own."""
        if self.kernel == "serial":
            sizes = (shape.value_heads, shape.key_width, shape.value_width)
            return partial(verify_serial, workspace=SerialWorkspace.empty(bucket, *sizes, device))
        return partial(verify_factorised, tile=self.tile)
