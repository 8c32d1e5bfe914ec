"""Which of our kernels are worth measuring for a case, and the measured choice."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.shapes import Shape, bytes_apart
from specla.benchmarks.kernels.timing import Graph, Work, layers_needed
from specla.benchmarks.kernels.topologies import accepted_rows
from specla.kernels.gpu.factorised import FactorisedTile
from specla.kernels.gpu.selector import Choice, Mode
from specla.kernels.gpu.serial import serial_tile
from specla.kernels.topology import Topology

BUCKETS = (16, 32, 64, 128, 129)
"""Rows of a session that graphs are captured for; a tree runs in the least that holds it."""

TUNING_ROUNDS = 5
_PROCESSORS = 132
_RESIDENT = _PROCESSORS * 16  # programs of one warp beyond which more groups only wait
_NARROW = 16  # columns of the narrowest tile

UNFIT = (OutOfResources, PTXASError)
"""What a kernel raises that the GPU cannot hold: it is then no candidate. Any other error is a fault of ours."""


def bucket_rows(rows: int) -> int:
    """The least bucket that holds a tree."""
    return next(size for size in BUCKETS if size >= rows)


def candidates(shape: Shape, sessions: int, topologies: Sequence[Topology], rows: int | None = None) -> list[Choice]:
    """What is worth measuring: the serial kernel by groups up to the leaves, the factorised one by three tiles.

    Args:
        shape: of the layer.
        sessions: of the pass; more programs than fit at once are left out.
        topologies: that the sessions may have; the one with most leaves counts.
        rows: of the bucket that runs them; the least that holds them if unset.
    """
    leaves = max(sum(not children for children in topology.children) for topology in topologies)
    rows = rows or bucket_rows(max(map(len, topologies)))
    tile = serial_tile(shape.key_width)
    programs = sessions * shape.value_heads * -(-shape.value_width // tile.block_v)
    groups = [n for n in (2, 4, 8)[: 2 if rows <= 16 else 3] if n <= leaves and programs * n <= _RESIDENT]
    tiles = dict.fromkeys(
        tile._replace(part_k=min(tile.part_k, shape.key_width)) for tile in _tiles(shape, sessions, rows)
    )
    return [
        Choice("serial"),
        *(Choice("serial", n) for n in groups),
        *(Choice("factorised", tile=tile) for tile in tiles),
    ]


def _tiles(shape: Shape, sessions: int, rows: int) -> list[FactorisedTile]:
    """Narrow tiles where programs are fewer than the GPU holds, wider ones where a program should do more."""
    n = 16 if rows <= 16 else 32
    if sessions * shape.value_heads * shape.value_width // _NARROW <= 2 * _PROCESSORS:
        return [
            FactorisedTile(n, 16, 256, 4),
            FactorisedTile(n, 16, 256, 2 if n == 16 else 8),
            FactorisedTile(n, 16, 128, 4),
        ]
    widest = FactorisedTile(16, 32, 256, 8) if n == 16 else FactorisedTile(32, 64, 128, 8)
    return [FactorisedTile(n, 16, 256 if n == 16 else 128, 4), FactorisedTile(n, 32, 128, 4), widest]


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
