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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specla.kernels.jit import compiled
from specla.kernels.topology import Topology

ROW_BITS = 8
EMIT_BIT = 8
LEAF_BIT = 9
KEEP_SHIFT = 10
FETCH_SHIFT = 14
PLACE_MASK = 15
PLACES = 8
"""States that one program may keep: light edges on one path halve the subtree, so 129 rows never need more."""


def kept_places(rows: int) -> int:
    """The most states that a walk of a tree of so many rows keeps at a time.

    A state is kept while a light subtree is walked and a heavier one waits, both of two rows or more. So keeping one
    takes 1 + 2 + 2 rows, and keeping one more takes a row above two such trees.
    """
    places, needed = 0, 5
    while needed <= rows:
        places, needed = places + 1, 1 + 2 * needed
    return places


_ROW, _LEAF, _FETCH = 5, 4, 2
"""What a program's steps cost: a row that forms a state, a leaf, and what is added where a kept state is fetched (see
docs/decisions.md)."""

_NONE = -1

Ints = NDArray[np.int32]


class Schedule(NamedTuple):
    """The steps of all groups."""

    steps: Ints
    """[groups with rows, longest], each group's steps, then zeros."""
    lengths: Ints
    """[groups with rows]."""

    def by_group(self) -> list[Ints]:
        """The steps of each group, without the zeros."""
        return [steps[:length] for steps, length in zip(self.steps, self.lengths, strict=True)]


@lru_cache(maxsize=1024)
def schedule(topology: Topology, groups: int) -> Schedule:
    """The steps of each group, at most `groups` of them, none empty.

    A step is row | emit << 8 | leaf << 9 | (1 + keep) << 10 | (1 + fetch) << 14: fetch a kept state first (if any),
    compute the row, store its output and factor if `emit` is set, form the state unless it is a leaf, keep it (if
    any). Each row is emitted exactly once.
    """
    steps = np.zeros((groups, len(topology)), np.int32)
    lengths = np.zeros(groups, np.int32)
    count = _schedule(topology.parents, topology.depth, steps, lengths)
    lengths = lengths[:count]
    steps = steps[:count, : lengths.max()]
    steps.setflags(write=False)
    lengths.setflags(write=False)
    return Schedule(steps, lengths)


def makespan(topology: Topology, groups: int) -> int:
    """The steps of the longest group."""
    return int(schedule(topology, groups).lengths.max())


@lru_cache(maxsize=4096)
def costs(topology: Topology, groups: int) -> tuple[float, ...]:
    """What each group costs, in rows that form a state."""
    found = np.zeros(groups, np.int32)
    steps, lengths = schedule(topology, groups)
    _add_costs(steps, lengths, found)
    return tuple([cost / _ROW for cost in found[: len(lengths)].tolist()])


def fetches(topology: Topology, groups: int) -> int:
    """How often kept states are fetched, in all groups."""
    return int(np.count_nonzero((schedule(topology, groups).steps >> FETCH_SHIFT) & PLACE_MASK))


@compiled
def _add_costs(steps: Any, lengths: Any, costs: Any) -> None:
    for group in range(len(lengths)):
        for i in range(lengths[group]):
            step = steps[group, i]
            costs[group] += _LEAF if (step >> LEAF_BIT) & 1 else _ROW
            if (step >> FETCH_SHIFT) & PLACE_MASK:
                costs[group] += _FETCH


@compiled
def _schedule(parents: Any, depth: Any, steps: Any, lengths: Any) -> Any:
    """Fills steps [groups, N] and lengths [groups]; returns how many groups have rows."""
    n, groups = len(parents), len(lengths)
    order, branches_on = _light_first(parents)
    leaves, added = _leaves(parents, depth, order, branches_on)
    first_leaf = _dealt(depth, leaves, added, groups)
    emitted = np.zeros(n, np.bool_)
    for group in range(len(first_leaf) - 1):
        rows = np.zeros(n, np.bool_)
        for leaf in leaves[first_leaf[group] : first_leaf[group + 1]]:
            row = leaf
            while row >= 0 and not rows[row]:
                rows[row] = True
                row = parents[row]
        lengths[group] = _steps(parents, rows, order, branches_on, emitted, steps[group])
    return len(first_leaf) - 1


@compiled
def _light_first(parents: Any) -> Any:
    """All rows depth first, the child of the largest subtree last; and whether each row has children."""
    n = len(parents)
    size, children = np.ones(n, np.int32), np.zeros(n, np.int32)
    for row in range(n - 1, 0, -1):
        size[parents[row]] += size[row]
        children[parents[row]] += 1
    order, stack, own = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    stack[0], waiting = 0, 1
    for at in range(n):
        waiting -= 1
        row = stack[waiting]
        order[at] = row
        count = 0
        for child in range(row + 1, n):  # sorted by falling size, then by row: the last one goes first
            if count == children[row]:
                break
            if parents[child] == row:
                place = count
                while place > 0 and size[own[place - 1]] < size[child]:
                    own[place] = own[place - 1]
                    place -= 1
                own[place] = child
                count += 1
        stack[waiting : waiting + count] = own[:count]
        waiting += count
    return order, children > 0


@compiled
def _leaves(parents: Any, depth: Any, order: Any, branches_on: Any) -> Any:
    """The leaves in order, and how many rows above and with each are not above the one before it."""
    n = len(parents)
    leaves, added, count, before = np.empty(n, np.int32), np.empty(n, np.int32), 0, _NONE
    for row in order:
        if branches_on[row]:
            continue
        shared, other = row, before
        while shared != other and other != _NONE:  # up to the first row above both
            if depth[shared] >= depth[other]:
                shared = parents[shared]
            else:
                other = parents[other]
        leaves[count] = row
        added[count] = depth[row] - (depth[shared] if other != _NONE else -1)
        count, before = count + 1, row
    return leaves[:count], added[:count]


@compiled
def _dealt(depth: Any, leaves: Any, added: Any, groups: int) -> Any:
    """The first leaf of each run, then the number of leaves: at most `groups` runs, the dearest as cheap as can be."""
    low, high = _LEAF, (_ROW + _FETCH) * (len(depth) + len(leaves))
    best = np.array([0, len(leaves)], np.int32)
    while low <= high:
        limit = (low + high) // 2
        runs, dearest = _runs(depth, leaves, added, limit)
        if len(runs) - 1 <= groups and dearest <= limit:
            best, high = runs, limit - 1
        else:
            low = limit + 1
    return best


@compiled
def _runs(depth: Any, leaves: Any, added: Any, limit: int) -> Any:
    """Runs of leaves, each as long as its cost stays within `limit` (a single leaf may cost more), and the largest."""
    first, count, cost, dearest = np.empty(len(leaves) + 1, np.int32), 0, 0, 0
    for at in range(len(leaves)):
        above = added[at] - 1  # rows that no leaf before has above it
        more = above * _ROW + (_FETCH if above > 0 else 0) + _LEAF
        if count and cost + more <= limit:
            cost += more
        else:
            first[count] = at
            count += 1
            cost = depth[leaves[at]] * _ROW + _LEAF
        dearest = max(dearest, cost)
    first[count] = len(leaves)
    return first[: count + 1], dearest


@compiled
def _steps(parents: Any, rows: Any, order: Any, branches_on: Any, emitted: Any, steps: Any) -> Any:
    """One group's steps over `rows`, which it adds to `emitted`; returns how many."""
    n = len(parents)
    branches = np.zeros(n, np.int32)  # children among the rows that have children themselves
    for row in range(1, n):
        if rows[row] and branches_on[row]:
            branches[parents[row]] += 1
    place_of, waiting = np.full(n, _NONE, np.int32), np.zeros(n, np.int32)  # where a row's state is kept, and for whom
    free, count, held = np.arange(PLACES)[::-1].copy(), 0, _NONE  # held: the row whose state is on chip
    places = PLACES
    for row in order:
        if not rows[row]:
            continue
        parent, word = parents[row], row
        if parent != held:
            word |= (1 + place_of[parent]) << FETCH_SHIFT
            held = parent
        if branches_on[row]:
            if parent >= 0 and waiting[parent] > 0:
                waiting[parent] -= 1
                if waiting[parent] == 0:
                    free[places] = place_of[parent]
                    places += 1
            held = row
            if branches[row] > 1:
                places -= 1
                place_of[row], waiting[row] = free[places], branches[row]
                word |= (1 + place_of[row]) << KEEP_SHIFT
        else:
            word |= 1 << LEAF_BIT
        if not emitted[row]:
            emitted[row] = True
            word |= 1 << EMIT_BIT
        steps[count] = word
        count += 1
    return count
