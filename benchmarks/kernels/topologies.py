"""The trees that kernels are timed on, made by a committed, seeded generator.

Every node has its most likely children in order, with seeded chances; a tree is grown best first over the products of
these chances, as drafters that rank whole paths grow theirs. Rows count the root: N rows are the root and N - 1
candidates. Depth counts steps from the root. Only `random.Random.random` is drawn from, whose stream is the same in
every version of Python.
"""

from __future__ import annotations

import heapq
import math
import random
from functools import lru_cache

from specla.kernels.topology import Topology

SEEDS = 2_000
"""Seeds tried with each sharpness before a tree of some kind is said to be impossible."""

SHARPNESSES = (3.0, 2.0, 4.0, 6.0, 9.0, 13.0)
"""How sure the imagined drafter is: with the first, the likeliest child has about half of the chance."""

EAGLE_DEPTH = 6
EAGLE_BRANCHING = 8


def chain(rows: int) -> Topology:
    """A chain of `rows` rows, root included."""
    return Topology.from_wire(tuple(range(-1, rows - 2)))


@lru_cache(maxsize=64)
def tree(branching: int, depth: int, nodes: int) -> Topology:
    """A best-first tree of `nodes` rows, root included, `depth` steps deep, whose busiest row has `branching` children.

    The first sharpness and seed whose tree is so is used: a deep and narrow tree is what a sure drafter grows.

    Raises:
        ValueError: no such tree: fewer rows than the depth needs, or no seed gives it.
    """
    if nodes < depth + 1:
        raise ValueError(f"{nodes} rows cannot be {depth} steps deep: give at least {depth + 1}")
    for sharpness in SHARPNESSES:
        for seed in range(SEEDS):
            topology = _grown(random.Random(seed), branching, depth, nodes, sharpness)
            if topology is not None and max(len(rows) for rows in topology.children) == branching:
                return topology
    raise ValueError(f"no tree of {nodes} rows, depth {depth} and branching {branching} was found")


@lru_cache(maxsize=64)
def eagle_like(rows: int, depth: int = EAGLE_DEPTH) -> Topology:
    """The `rows` - 1 best candidates by path probability, at most 8 a row, exactly `depth` deep.

    Raises:
        ValueError: no seed gives that depth.
    """
    for seed in range(SEEDS):
        topology = _grown(random.Random(seed), EAGLE_BRANCHING, depth, rows, SHARPNESSES[0])
        if topology is not None:
            return topology
    raise ValueError(f"no tree of {rows} rows and depth {depth} was found")


def random_tree(rows: int, seed: int) -> Topology:
    """A tree of any shape: each candidate's parent is any earlier row."""
    draw = random.Random(seed)
    return Topology.from_wire(tuple(int(draw.random() * (row + 1)) - 1 for row in range(rows - 1)))


def deepest_path(topology: Topology) -> list[int]:
    """Rows from the root down to the first of the deepest rows."""
    return topology.path(int(topology.depth.argmax()))


def accepted_rows(topology: Topology) -> int:
    """How many rows the timed passes accept, root included: half of the deepest path, and the root."""
    return int(topology.depth.max()) // 2 + 1


def leaf_paths(topology: Topology) -> list[list[int]]:
    """Every path from the root to a leaf."""
    return [topology.path(row) for row in range(len(topology)) if not topology.children[row]]


def _grown(draw: random.Random, branching: int, depth: int, nodes: int, sharpness: float) -> Topology | None:
    """Best-first growth; None where the tree is not exactly `depth` deep. A node is the ranks on the way to it."""
    taken: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while len(taken) < nodes and waiting:
        cost, node = heapq.heappop(waiting)
        taken.append(node)
        if len(node) < depth:
            for rank, chance in enumerate(_chances(draw, branching, sharpness)):
                heapq.heappush(waiting, (cost - math.log(chance), (*node, rank)))
    if len(taken) < nodes or max(map(len, taken)) != depth:
        return None
    place = {node: row for row, node in enumerate(taken)}  # parents were taken before their children
    return Topology.from_wire(tuple(place[node[:-1]] - 1 for node in taken[1:]))


def _chances(draw: random.Random, count: int, sharpness: float) -> list[float]:
    """Chances of a row's likeliest children, falling, with the rest of the vocabulary left out."""
    weights = [(-math.log(1.0 - draw.random())) ** sharpness + 1e-9 for _ in range(2 * EAGLE_BRANCHING)]
    total = math.fsum(weights)
    return sorted((w / total for w in weights), reverse=True)[:count]
