"""Which verification kernel runs a pass: chosen by times measured for a device, a shape, a batch and its trees.

A table holds, for each choice that was measured, what a launch costs at rest and what a tree's shape adds: a serial
kernel pays by the steps of its dearest group and by those of all others, or by the fetches of a single one, the
factorised one by the rounds of substitution and by pairs of blocks. `specla bench kernels --tune` measures and fits one
(see tuning.py); those of known devices ship with the package.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from specla.kernels.gpu.factorised import AnyTile, FactorisedTile, factorised_tile, why_unfit
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.schedule import costs, fetches
from specla.kernels.gpu.streamed import StreamedTile
from specla.kernels.topology import Topology

TABLES = Path(__file__).parent / "tables"
_DEFAULT_TABLE = "h200.json"

ALIKE = ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3")
"""Devices that share a table. An H100 has the multiprocessors of an H200 (132, of the same kind and clocks) and slower
memory; what ships was measured on an H200 alone."""

Mode = Literal["exact", "fast"]


class LayerShape(NamedTuple):
    """What a table is looked up by, of a layer: K, V and HV."""

    key_width: int
    value_width: int
    value_heads: int


class Choice(NamedTuple):
    """A kernel and how it is cut."""

    kernel: Literal["serial", "factorised"]
    groups: int = 1
    """Programs that share a tree in the serial kernel: 1 walks chains and whole trees, more is chain-decomposed."""
    tile: AnyTile | None = None
    """Of the factorised kernel: which of its forms, and how it is cut."""

    @property
    def is_exact(self) -> bool:
        """Whether exact mode may use it."""
        return self.kernel == "serial"


class Cost(NamedTuple):
    """Microseconds of one launch for trees of a size: base + per_step * steps + per_other * others, as `features`
    gives in their place."""

    choice: Choice
    base: float
    per_step: float
    per_other: float

    def predict(self, topologies: Sequence[Topology]) -> float:
        """The launch's time: the mean of what each tree alone would take in a batch of this size."""
        total = 0.0
        for topology in topologies:
            steps, others = features(self.choice, topology)
            total += self.per_step * steps + self.per_other * others
        return self.base + total / len(topologies)


@dataclass(frozen=True)
class Measured:
    """The costs of all choices at one place of the grid."""

    shape: LayerShape
    sessions: int
    rows: int
    """The largest tree that was measured for it."""
    costs: tuple[Cost, ...]


@lru_cache(maxsize=4096)
def features(choice: Choice, topology: Topology) -> tuple[float, float]:
    """What a choice's time depends on in a tree: steps one after the other, and other work.

    Of a serial kernel the cost of the dearest group (see schedule.py) and that of all others, which share the GPU with
    it, or of a single group its fetches of kept states, which cost batches more; of a factorised one the rounds of
    substitution of all blocks, and pairs of blocks, where a block with itself, S and its system counts as two.
    """
    if choice.kernel == "serial":
        of_groups = costs(topology, choice.groups)
        if choice.groups == 1:
            return of_groups[0], fetches(topology, 1)
        return max(of_groups), sum(of_groups) - max(of_groups)
    tile = choice.tile or factorised_tile(len(topology))
    block = tile.block_n if isinstance(tile, FactorisedTile) else 16
    first = np.arange(0, len(topology), block)
    deepest, shallowest = (f.reduceat(topology.depth, first) for f in (np.maximum, np.minimum))
    blocks = len(first)
    return int((deepest - shallowest).sum()), 2 * blocks + blocks * (blocks - 1) // 2


def alike(device: str) -> tuple[str, ...]:
    """The devices that a table measured on this one stands for, this one first."""
    return (device, *(name for name in ALIKE if name != device)) if device in ALIKE else (device,)


class Selector:
    """Chooses by a table."""

    def __init__(self, device: str, measured: Sequence[Measured]) -> None:
        """A selector for the device of this name.

        Raises:
            ValueError: the table is empty, or a place in it has no exact choice.
        """
        if not measured or any(not any(c.choice.is_exact for c in place.costs) for place in measured):
            raise ValueError("a selector needs measured places, and an exact choice at each of them")
        self.device = device
        self.measured = tuple(measured)
        self._found: dict[tuple[LayerShape, int, int], Measured] = {}

    @classmethod
    def for_device(cls, device: str) -> Selector:
        """The selector of the shipped table for a device (a name as CUDA gives it); another's, with a warning, else."""
        for path in sorted(TABLES.glob("*.json")):
            table = json.loads(path.read_text())
            if device in table["devices"]:
                return cls.from_table(table)
        warnings.warn(
            f"no table of kernel times for {device}: using {_DEFAULT_TABLE}; `specla bench kernels --tune` makes one",
            stacklevel=2,
        )
        return cls.read(TABLES / _DEFAULT_TABLE)

    @classmethod
    def read(cls, path: Path) -> Selector:
        """A table from a file that `write` has made."""
        return cls.from_table(json.loads(path.read_text()))

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Selector:
        """A table as `to_table` gives it.

        Raises:
            KeyError, ValueError: it is none.
        """
        return cls(table["devices"][0], [_place_from(entry) for entry in table["measured"]])

    def to_table(self, devices: Sequence[str]) -> dict[str, Any]:
        """The table as JSON: the devices that it stands for, the one that was measured first."""
        return {"devices": list(devices), "measured": [_place_to(place) for place in self.measured]}

    def choose(
        self,
        mode: Mode,
        shape: LayerShape,
        topologies: Sequence[Topology],
        *,
        pending: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Choice:
        """The choice with the least predicted time among those that the mode allows and the pass can have.

        Args:
            mode: exact allows the serial kernels alone.
            shape: of the layer; the nearest measured one counts.
            topologies: one a session of the pass, at least one.
            pending: the most factors that a session of the bucket may have waiting.
            dtype: of q, k and v. Where no measured form of the factorised kernel takes it, its default form is given.
        """
        rows = max(len(t) for t in topologies)
        place = self._nearest(shape, len(topologies), rows)
        bucket = Bucket(sessions=len(topologies), rows=rows * len(topologies), tree_rows=rows, pending=pending)

        def fits(tile: AnyTile | None) -> bool:
            return tile is None or not why_unfit(tile, bucket, shape.key_width, shape.value_width, dtype)

        leaves = max(t.leaves for t in topologies)
        allowed = [c for c in place.costs if (mode == "fast" or c.choice.is_exact) and fits(c.choice.tile)]
        # More groups than leaves leave programs idle; the least number of groups always remains.
        fewest = min(c.choice.groups for c in allowed if c.choice.is_exact)
        allowed = [c for c in allowed if c.choice.groups <= max(leaves, fewest)]
        if mode == "fast" and all(c.choice.is_exact for c in allowed):
            return Choice("factorised")
        return min(allowed, key=lambda cost: cost.predict(topologies)).choice

    def _nearest(self, shape: LayerShape, sessions: int, rows: int) -> Measured:
        """The place with the nearest shape, then the least size of tree that holds `rows`, then the nearest batch."""

        def distance(place: Measured) -> tuple[float, float, float]:
            apart = sum(abs(math.log2(a / b)) for a, b in zip(place.shape, shape, strict=True))
            too_small = place.rows < rows
            return apart, abs(math.log2(place.rows / rows)) + 10 * too_small, abs(math.log2(place.sessions / sessions))

        asked = shape, sessions, rows
        if asked not in self._found:
            self._found[asked] = min(self.measured, key=distance)
        return self._found[asked]


_FORMS: dict[type[AnyTile], str] = {
    FactorisedTile: "general",
    HeldTile: "held",
    StreamedTile: "streamed",
}


def _tile_from(entry: list[Any] | None) -> AnyTile | None:
    if entry is None:
        return None
    form, *sizes = entry
    return next(tile for tile, name in _FORMS.items() if name == form)(*sizes)


def _place_to(place: Measured) -> dict[str, Any]:
    costs = [
        {
            "kernel": cost.choice.kernel,
            "groups": cost.choice.groups,
            "tile": None if cost.choice.tile is None else [_FORMS[type(cost.choice.tile)], *cost.choice.tile],
            "base_us": round(cost.base, 3),
            "per_step_us": round(cost.per_step, 4),
            "per_other_us": round(cost.per_other, 4),
        }
        for cost in place.costs
    ]
    return {"shape": list(place.shape), "sessions": place.sessions, "rows": place.rows, "costs": costs}


def _place_from(entry: dict[str, Any]) -> Measured:
    costs = tuple(
        Cost(
            Choice(cost["kernel"], cost["groups"], _tile_from(cost["tile"])),
            cost["base_us"],
            cost["per_step_us"],
            cost["per_other_us"],
        )
        for cost in entry["costs"]
    )
    return Measured(LayerShape(*entry["shape"]), entry["sessions"], entry["rows"], costs)
