"""Schedules of the serial kernels: what the kernels make of their words, step by step, for all kinds of trees."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import chain, random_tree

from specla.kernels.gpu.schedule import (
    EMIT_BIT,
    FETCH_SHIFT,
    KEEP_SHIFT,
    LEAF_BIT,
    PLACE_MASK,
    PLACES,
    ROW_BITS,
    costs,
    kept_places,
    makespan,
    schedule,
)
from specla.kernels.topology import MAX_ROWS, Topology

NOTHING = -1
BEFORE_ROOT = -1  # the state that a program starts with stands for row -1


class Step(NamedTuple):
    row: int
    emits: bool
    is_leaf: bool
    keep: int
    fetch: int


def steps_of(words: list[int]) -> list[Step]:
    return [
        Step(
            word & (1 << ROW_BITS) - 1,
            bool(word >> EMIT_BIT & 1),
            bool(word >> LEAF_BIT & 1),
            (word >> KEEP_SHIFT & PLACE_MASK) - 1,
            (word >> FETCH_SHIFT & PLACE_MASK) - 1,
        )
        for word in words
    ]


def walk(topology: Topology, steps: list[Step]) -> tuple[list[int], int]:
    """The rows that one program emits, and the fetches it makes, walking as the kernel does."""
    kept = [NOTHING - 1] * PLACES  # no row's state
    held, emitted, fetched = BEFORE_ROOT, [], 0
    for step in steps:
        assert step.keep < kept_places(len(topology))
        assert step.fetch < kept_places(len(topology))
        if step.fetch != NOTHING:
            held, fetched = kept[step.fetch], fetched + 1
        assert held == topology.parent_rows[step.row], f"row {step.row} would continue row {held}"
        assert step.is_leaf == (not topology.children[step.row])
        if not step.is_leaf:
            held = step.row
        if step.keep != NOTHING:
            assert not step.is_leaf
            kept[step.keep] = step.row
        if step.emits:
            emitted.append(step.row)
    return emitted, fetched


def check(topology: Topology, groups: int) -> None:
    parts = schedule(topology, groups).by_group()
    assert 1 <= len(parts) <= groups
    emitted = []
    for words in parts:
        assert 1 <= len(words) <= len(topology)
        rows, _ = walk(topology, steps_of(words.tolist()))
        assert len({step.row for step in steps_of(words.tolist())}) == len(words)
        emitted += rows
    assert sorted(emitted) == list(range(len(topology)))
    assert makespan(topology, groups) == max(map(len, parts)) <= makespan(topology, 1) == len(topology)
    of_parts = costs(topology, groups)
    assert len(of_parts) == len(parts)
    for cost, words in zip(of_parts, parts, strict=True):
        steps = steps_of(words.tolist())
        leaves, fetches = (sum(flags) for flags in zip(*((s.is_leaf, s.fetch != NOTHING) for s in steps), strict=True))
        assert cost == pytest.approx(len(steps) - 0.2 * leaves + 0.4 * fetches)


def most_fetches(topology: Topology, groups: int) -> int:
    return max(walk(topology, steps_of(words.tolist()))[1] for words in schedule(topology, groups).by_group())


def star(rows: int) -> Topology:
    return Topology.from_wire([-1] * (rows - 1))


def comb(teeth: int, length: int) -> Topology:
    """A spine of `teeth` rows, each with a chain of `length` rows beside it."""
    wire, spine = [], -1
    for _ in range(teeth):
        wire.append(spine)
        spine, at = len(wire) - 1, len(wire) - 1
        for _ in range(length):
            wire.append(at)
            at = len(wire) - 1
    return Topology.from_wire(wire)


def perfect(branching: int, depth: int) -> Topology:
    wire: list[int] = []
    level = [-1]
    for _ in range(depth):
        first = len(wire)
        wire += [parent for parent in level for _ in range(branching)]
        level = list(range(first, len(wire)))
    return Topology.from_wire(wire)


GROUPS = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(st.integers(0, 2**32), st.integers(1, MAX_ROWS), GROUPS)
def test_random_trees(seed: int, rows: int, groups: int) -> None:
    check(random_tree(random.Random(seed), rows), groups)


@given(st.lists(st.integers(0, 1000), max_size=MAX_ROWS - 1), GROUPS)
def test_any_parents(draws: list[int], groups: int) -> None:
    check(Topology.from_wire([draw % (i + 1) - 1 for i, draw in enumerate(draws)]), groups)


@pytest.mark.parametrize("groups", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 128, 129])
def test_chains_and_stars(rows: int, groups: int) -> None:
    check(chain(rows), groups)
    check(star(rows), groups)
    assert len(schedule(chain(rows), groups).lengths) == 1
    # A chain never fetches, and neither do leaves of one row: its state is still on chip.
    assert most_fetches(chain(rows), groups) == most_fetches(star(rows), groups) == 0
    leaves = max(rows - 1, 0)
    assert makespan(star(rows), groups) == 1 + -(-leaves // groups)


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize(
    "topology", [comb(8, 15), comb(42, 2), comb(64, 1), perfect(2, 6), perfect(4, 3), perfect(5, 2)]
)
def test_combs_and_perfect_trees(topology: Topology, groups: int) -> None:
    check(topology, groups)


def test_the_deepest_nesting_of_kept_states_has_places_to_spare() -> None:
    """Every branching row of a binary tree keeps its state while its first subtree is walked."""
    steps = steps_of(schedule(perfect(2, 6), 1).steps[0].tolist())
    assert max(step.keep for step in steps) + 1 == 5  # rows above the last two levels, on one path
    assert kept_places(MAX_ROWS) == 5 < PLACES


def worst(places: int) -> list[int]:
    """Parents of the smallest tree that keeps so many states: two of the next smaller ones below a row."""
    if not places:
        return [-1, 0]
    below = worst(places - 1)
    return [-1, *(0 if p < 0 else p + 1 for p in below), *(0 if p < 0 else p + 1 + len(below) for p in below)]


@pytest.mark.parametrize("places", range(1, 6))
def test_no_smaller_tree_keeps_as_many_states(places: int) -> None:
    parents = worst(places)
    topology = Topology.from_wire([p - 1 for p in parents[1:]])
    steps = steps_of(schedule(topology, 1).steps[0].tolist())
    assert max(step.keep for step in steps) + 1 == places
    assert kept_places(len(parents)) == places
    assert kept_places(len(parents) - 1) == places - 1


def test_groups_share_the_work_of_a_bushy_tree() -> None:
    topology = perfect(4, 3)  # 85 rows
    assert [makespan(topology, groups) for groups in (1, 4)] == [85, 1 + 21]
