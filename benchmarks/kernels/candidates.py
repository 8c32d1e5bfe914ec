"""Which of our kernels are worth measuring for a case, and the measured choice."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from specla.benchmarks.kernels.contenders import Ours
from specla.benchmarks.kernels.device import l2_bytes
from specla.benchmarks.kernels.launch import Candidate, Mode
from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.shapes import Shape, bytes_once
from specla.benchmarks.kernels.timing import Graph, Work, in_turns, layers_needed
from specla.benchmarks.kernels.topologies import accepted_rows
from specla.kernels.gpu.factorised import factorised_tile
from specla.kernels.gpu.serial import serial_tile
from specla.kernels.topology import Topology

BUCKETS = (16, 32, 64, 128, 129)
"""Rows of a session that graphs are captured for; a tree runs in the least that holds it."""

TUNING_ROUNDS = 5
_GROUPS = (2, 4, 8)
_RESIDENT = 132 * 16  # programs of one warp beyond which more groups only wait
_CUTS: tuple[dict[str, int], ...] = (
    {"block_v": 32},
    {"block_v": 64},
    {"block_n": 16},
    {"block_n": 32},
    {"warps": 8},
)
"""How the default tile is varied; equal ones are measured once."""

UNFIT = (OutOfResources, PTXASError, CompilationError)
"""What a kernel that the GPU or the compiler cannot make raises: it is then no candidate."""


def bucket_rows(rows: int) -> int:
    """The least bucket that holds a tree."""
    return next(size for size in BUCKETS if size >= rows)


def candidates(shape: Shape, sessions: int, topology: Topology, *, thorough: bool = False) -> list[Candidate]:
    """What is worth measuring: the serial kernel by groups up to the leaves, the factorised one by tiles.

    Args:
        shape: of the layer.
        sessions: of the pass; more programs than fit at once are left out.
        topology: of every session.
        thorough: also the tiles that are seldom best.
    """
    leaves = sum(not rows for rows in topology.children)
    tile = serial_tile(shape.key_width)
    programs = sessions * shape.value_heads * -(-shape.value_width // tile.block_v)
    found = [Candidate("serial")]
    found += [Candidate("serial", n) for n in _GROUPS if n <= leaves and programs * n <= _RESIDENT]
    found.append(Candidate("factorised"))
    if thorough:
        default = factorised_tile(bucket_rows(len(topology)))
        tiles = dict.fromkeys(default._replace(**cut) for cut in _CUTS)
        found += [Candidate("factorised", tile=cut) for cut in tiles if cut != default]
    return found


def best(candidates_timed: dict[Candidate, float], mode: Mode) -> Candidate:
    """The fastest that the mode may use; fast mode may use all."""
    allowed = [c for c in candidates_timed if mode == "fast" or c.mode == "exact"]
    return min(allowed, key=lambda candidate: candidates_timed[candidate])


def capture_candidates(problem: Problem, choices: Sequence[Candidate]) -> tuple[dict[Candidate, Graph], dict[str, str]]:
    """One graph each, over all layers of the problem; and the names of those that cannot be made, with why."""
    graphs: dict[Candidate, Graph] = {}
    refused: dict[str, str] = {}
    for choice in choices:
        try:
            graphs[choice] = Graph.capture(Work.of(Ours(problem, choice), problem.layers))
        except UNFIT as error:
            refused[choice.name] = reason(error)
    return graphs, refused


def measure_choices(choices: Sequence[Candidate], shape: Shape, sessions: int, topology: Topology) -> list[float]:
    """Microseconds of a layer for each choice, in order: medians of `TUNING_ROUNDS` rounds in turns, cold caches.

    The deferred commit of half the deepest path and the write of the state are included. A choice that does not fit
    the GPU takes infinitely long.
    """
    problem = problem_of(shape, sessions, topology, l2=l2_bytes())
    graphs, _ = capture_candidates(problem, choices)
    samples = in_turns(list(graphs.values()), TUNING_ROUNDS)
    medians = [statistics.median(samples.get(choice.name, [math.inf])) for choice in choices]
    del problem, graphs
    release()
    return medians


def reason(error: Exception) -> str:
    """What a kernel could not be made for, in a line."""
    lines = str(error).split("Repro")[0].strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no text'}"


def problem_of(shape: Shape, sessions: int, topology: Topology, *, l2: int, seed: int = 0) -> Problem:
    """The problem of one case on the GPU, with as many layers as cold caches need."""
    accepted = accepted_rows(topology)
    once = bytes_once(shape, sessions=sessions, rows=sessions * len(topology), pending=accepted)
    return Problem.make(
        shape,
        [topology] * sessions,
        accepted=accepted,
        layers=layers_needed(once, l2),
        device="cuda",
        tree_rows=bucket_rows(len(topology)),
        seed=seed,
    )


def release() -> None:
    """Gives the memory of dropped graphs and problems back."""
    gc.collect()
    torch.cuda.empty_cache()
