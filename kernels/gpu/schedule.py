"""In which order the serial kernels walk a tree: rows as steps, with the few states that must be kept and fetched.

A step's state is normally the one just computed, still on chip. A leaf is computed from its parent's state and forms
none of its own, so leaves go first and cost no move of states. Where a node has several children that branch on, its
state is kept once and fetched by every later one: light children go first and the heavy one last, so that at most
log2(N) states are kept at a time.

With several *groups*, each a program of its own, the leaves are dealt out in depth-first order, as evenly as the tree
allows. A group walks down from the root itself: repeating the few rows above its own costs less than waiting for
another program to store and publish a state, and lets no program depend on another.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specla.kernels.topology import Topology

ROW_BITS = 8
EMIT_BIT = 8
LEAF_BIT = 9
KEEP_SHIFT = 10
FETCH_SHIFT = 14
PLACE_MASK = 15
PLACES = 8
"""States that one program may keep: light edges on one path halve the subtree, so 129 rows never need more."""

_FETCH_STEPS = 2
"""What fetching a kept state costs, in steps (measured: see docs/decisions.md)."""

Steps = tuple[NDArray[np.int32], ...]


@lru_cache(maxsize=1024)
def schedule(topology: Topology, groups: int) -> Steps:
    """The steps of each group, at most `groups` of them, none empty.

    A step is row | emit << 8 | leaf << 9 | (1 + keep) << 10 | (1 + fetch) << 14: fetch a kept state first (if any),
    compute the row, store its output and factor if `emit` is set, form the state unless it is a leaf, keep it (if
    any). Each row is emitted exactly once.
    """
    order = _light_first(topology)
    leaves = [row for row in order if not topology.children[row]]
    parts = _dealt(topology, leaves, groups)
    emitted: set[int] = set()
    return tuple(_steps(topology, _union(topology, part), order, emitted) for part in parts)


def makespan(topology: Topology, groups: int) -> int:
    """The steps of the longest group."""
    return max(len(steps) for steps in schedule(topology, groups))


def fetches(topology: Topology, groups: int) -> int:
    """The most kept states that one group fetches."""
    return max(int(((steps >> FETCH_SHIFT) & PLACE_MASK > 0).sum()) for steps in schedule(topology, groups))


def _light_first(topology: Topology) -> list[int]:
    """All rows depth first, the child of the largest subtree last."""
    size = [1] * len(topology)
    for row in range(len(topology) - 1, 0, -1):
        size[topology.parent_rows[row]] += size[row]
    order, stack = [], [0]
    while stack:
        row = stack.pop()
        order.append(row)
        stack += sorted(topology.children[row], key=lambda r: (-size[r], r))
    return order


def _union(topology: Topology, leaves: list[int]) -> set[int]:
    rows: set[int] = set()
    for leaf in leaves:
        row = leaf
        while row >= 0 and row not in rows:
            rows.add(row)
            row = topology.parent_rows[row]
    return rows


def _dealt(topology: Topology, leaves: list[int], groups: int) -> list[list[int]]:
    """Leaves in runs, at most `groups`, so that the dearest run is as cheap as runs can be."""
    low, high = int(topology.depth.max()) + 1, len(topology) + _FETCH_STEPS * len(leaves)
    best = [leaves]
    while low <= high:
        limit = (low + high) // 2
        parts = _runs(topology, leaves, limit)
        if len(parts) <= groups:
            best, high = parts, limit - 1
        else:
            low = limit + 1
    return best


def _runs(topology: Topology, leaves: list[int], limit: int) -> list[list[int]]:
    """Runs of leaves, each as long as its cost stays within `limit` (a single leaf may cost more)."""
    parts: list[list[int]] = []
    rows: set[int] = set()
    cost = 0
    for leaf in leaves:
        fresh = _union(topology, [leaf]) - rows
        added = len(fresh) + (_FETCH_STEPS if rows and len(fresh) > 1 else 0)
        if parts and cost + added <= limit:
            parts[-1].append(leaf)
            rows |= fresh
            cost += added
        else:
            parts.append([leaf])
            rows = _union(topology, [leaf])
            cost = len(rows)
    return parts


def _steps(topology: Topology, rows: set[int], order: list[int], emitted: set[int]) -> NDArray[np.int32]:
    """One group's steps over `rows`, which it adds to `emitted`."""
    place_of: dict[int, int] = {}  # the place of each row whose state is kept
    waiting: dict[int, int] = {}  # children still to come of each such row
    free = list(range(PLACES))[::-1]
    words, held = [], -1  # the row whose state is on chip
    for row in (r for r in order if r in rows):
        parent, word, is_leaf = topology.parent_rows[row], row, not topology.children[row]
        if parent != held:
            word |= (1 + place_of[parent]) << FETCH_SHIFT
            held = parent
        if not is_leaf:
            if parent in waiting:
                waiting[parent] -= 1
                if not waiting[parent]:
                    free.append(place_of[parent])
            held = row
            branches = sum(child in rows and bool(topology.children[child]) for child in topology.children[row])
            if branches > 1:
                place_of[row], waiting[row] = free.pop(), branches
                word |= (1 + place_of[row]) << KEEP_SHIFT
        else:
            word |= 1 << LEAF_BIT
        if row not in emitted:
            emitted.add(row)
            word |= 1 << EMIT_BIT
        words.append(word)
    return np.array(words, dtype=np.int32)
