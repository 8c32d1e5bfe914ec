"""Which of our kernels are worth measuring for a case, and the measured choice."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.problem import RING, Problem
from specla.benchmarks.kernels.shapes import Shape, bytes_apart
from specla.benchmarks.kernels.timing import Graph, Work, layers_needed
from specla.benchmarks.kernels.topologies import accepted_rows
from specla.kernels.gpu.factorised import AnyTile, FactorisedTile, why_unfit
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.selector import Choice, Mode
from specla.kernels.gpu.serial import serial_tile, splits
from specla.kernels.gpu.serial_split import fit_at_once
from specla.kernels.gpu.streamed import MOST_ROWS, StreamedTile
from specla.kernels.topology import Topology

BUCKETS = (16, 32, 64, 128, 129)
"""Rows of a session that graphs are captured for; a tree runs in the least that holds it."""

TUNING_ROUNDS = 5
_PROCESSORS = 132
_RESIDENT = _PROCESSORS * 16 * 2  # warps beyond which more groups only wait

UNFIT = (OutOfResources, PTXASError)
"""What a kernel raises that the GPU cannot hold: it is then no candidate. Any other error is a fault of ours."""


def bucket_rows(rows: int) -> int:
    """The least bucket that holds a tree."""
    return next(size for size in BUCKETS if size >= rows)


def candidates(shape: Shape, sessions: int, topologies: Sequence[Topology], rows: int | None = None) -> list[Choice]:
    """What is worth measuring: the serial kernel by groups up to the leaves, the factorised one by its forms.

    Args:
        shape: of the layer.
        sessions: of the pass; more programs than fit at once are left out.
        topologies: that the sessions may have; the one with most leaves counts.
        rows: of the bucket that runs them; the least that holds them if unset.
    """
    leaves = max(topology.leaves for topology in topologies)
    rows = rows or bucket_rows(max(map(len, topologies)))
    bucket = Bucket(sessions=sessions, rows=sessions * rows, tree_rows=rows, pending=RING)
    widths = shape.key_width, shape.value_width
    groups = [n for n in _groups(rows) if n <= leaves and _fit_at_once(shape, replace(bucket, groups=n))]
    tiles: list[AnyTile] = [t for t in _tiles(sessions, rows) if not why_unfit(t, bucket, *widths, torch.bfloat16)]
    if not tiles:
        n = 16 if rows <= 16 else 32
        tiles = [FactorisedTile(n, 16, min(256 if n == 16 else 128, shape.key_width), 4)]
    return [
        Choice("serial"),
        *(Choice("serial", n) for n in groups),
        *(Choice("factorised", tile=tile) for tile in tiles),
    ]


def _fit_at_once(shape: Shape, bucket: Bucket) -> bool:
    """Whether the GPU holds all programs of a serial launch at once; others would only wait."""
    if splits(shape.key_width, shape.value_width):
        return fit_at_once(bucket, shape.value_heads, shape.key_width, shape.value_width)
    tile = serial_tile(shape.key_width, shape.value_width)
    programs = bucket.sessions * bucket.groups * shape.value_heads * -(-shape.value_width // tile.block_v)
    return programs * tile.warps <= _RESIDENT


def _groups(rows: int) -> tuple[int, ...]:
    if rows <= 32:
        return (2, 4) if rows <= 16 else (2, 3, 4)
    return (3, 4, 5, 6)


def _tiles(sessions: int, rows: int) -> list[AnyTile]:
    """The state in registers, shared by few warps or many; for small trees of several sessions a stream of it."""
    if rows > MOST_ROWS:
        return [HeldTile(4), HeldTile(2)]
    if sessions == 1:
        return [HeldTile(4), HeldTile(2), HeldTile(1)]
    streams = [StreamedTile(32, 4, 128), StreamedTile(32, 3, 128), StreamedTile(32, 3), StreamedTile(64, 4)]
    return [*streams, HeldTile(4)]


def best(times: dict[Choice, float], mode: Mode) -> Choice:
    """The fastest that the mode may use; fast mode may use all."""
    allowed = [choice for choice in times if mode == "fast" or choice.is_exact]
    return min(allowed, key=lambda choice: times[choice])


def capture(works: Mapping[Choice, Work]) -> tuple[dict[Choice, Graph], dict[str, str]]:
    """A graph of each work; and the names of those that cannot be made here, with why."""
    graphs: dict[Choice, Graph] = {}
    refused: dict[str, str] = {}
    for choice, work in works.items():
        try:
            graphs[choice] = Graph.capture(work)
        except UNFIT as error:
            refused[name_of(choice)] = reason(error)
    return graphs, refused


def reason(error: Exception) -> str:
    """What a kernel could not be made for, in a line."""
    lines = str(error).split("Repro")[0].strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no text'}"


def problem_of(
    shape: Shape, sessions: int, topology: Topology, *, l2: int, device: str = "cuda", seed: int = 0
) -> Problem:
    """The problem of one case, with as many layers as cold caches need."""
    accepted = accepted_rows(topology)
    apart = bytes_apart(shape, sessions=sessions, rows=sessions * len(topology), pending=accepted)
    return Problem.make(
        shape,
        [topology] * sessions,
        accepted=accepted,
        layers=layers_needed(apart, l2),
        device=device,
        tree_rows=bucket_rows(len(topology)),
        seed=seed,
    )


def release() -> None:
    """Gives the memory of dropped graphs and problems back."""
    gc.collect()
    torch.cuda.empty_cache()
