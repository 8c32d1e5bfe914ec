"""Topologies against a slow plain version, and what is refused."""

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.kernels.topology import MAX_ROWS, Topology, TopologyError


def plain_ancestors(parents: list[int], row: int) -> list[int]:
    """Row and all above it, nearest first; parents in row terms."""
    return [row] if parents[row] < 0 else [row, *plain_ancestors(parents, parents[row])]


def plain_size(parents: list[int], row: int) -> int:
    return 1 + sum(plain_size(parents, r) for r, p in enumerate(parents) if p == row)


def plain_chains(parents: list[int]) -> list[list[int]]:
    def heavy(row: int) -> int | None:
        children = [r for r, p in enumerate(parents) if p == row]
        return min(children, key=lambda r: (-plain_size(parents, r), r)) if children else None

    heads = [r for r, p in enumerate(parents) if p < 0 or heavy(p) != r]
    chains = []
    for head in heads:
        chain, row = [head], heavy(head)
        while row is not None:
            chain.append(row)
            row = heavy(row)
        chains.append(chain)
    return chains


def plain_wave(parents: list[int], chains: list[list[int]], chain: int) -> int:
    parent = parents[chains[chain][0]]
    if parent < 0:
        return 0
    above = next(i for i, rows in enumerate(chains) if parent in rows)
    return 1 + plain_wave(parents, chains, above)


def check(wire: list[int]) -> None:
    topology = Topology.from_wire(wire)
    parents = [-1, *(p + 1 for p in wire)]
    n = len(parents)
    assert len(topology) == n
    assert topology.parents.tolist() == parents == list(topology.parent_rows)
    assert topology.ancestors.shape == (n, (n + 63) // 64)
    for row in range(n):
        above = plain_ancestors(parents, row)
        assert topology.depth[row] == len(above) - 1
        assert topology.path(row) == above[::-1]
        bits = [a for a in range(n) if int(topology.ancestors[row, a // 64]) >> (a % 64) & 1]
        assert bits == sorted(above)
    assert [list(level) for level in topology.levels] == [
        [r for r in range(n) if topology.depth[r] == d] for d in range(int(topology.depth.max()) + 1)
    ]
    assert [list(c) for c in topology.children] == [[r for r in range(n) if parents[r] == row] for row in range(n)]
    assert topology.leaves == sum(row not in parents for row in range(n))
    chains = plain_chains(parents)
    assert [c.tolist() for c in topology.chains] == chains
    assert [topology.chain_of[r] for r in range(n)] == [
        next(i for i, rows in enumerate(chains) if r in rows) for r in range(n)
    ]
    waves = [plain_wave(parents, chains, i) for i in range(len(chains))]
    assert [list(w) for w in topology.waves] == [
        [i for i, wave in enumerate(waves) if wave == level] for level in range(max(waves) + 1)
    ]


def random_wire(rng: random.Random, rows: int) -> list[int]:
    """Parents of rows - 1 candidates, from bushy to chain-like."""
    reach = rng.choice([1, 2, 4, rows])
    return [rng.randint(max(-1, i - reach), i - 1) for i in range(rows - 1)]


def test_thousands_of_random_trees() -> None:
    rng = random.Random(5)
    for _ in range(4000):
        check(random_wire(rng, rng.randint(1, 18)))


@pytest.mark.parametrize("rows", [63, 64, 65, 128, MAX_ROWS])
def test_large_trees(rows: int) -> None:
    rng = random.Random(rows)
    for _ in range(2):
        check(random_wire(rng, rows))


@given(st.lists(st.integers(min_value=0, max_value=40), max_size=24))
def test_any_tree(choices: list[int]) -> None:
    check([choice % (i + 1) - 1 for i, choice in enumerate(choices)])


@given(st.lists(st.integers(min_value=-4, max_value=30), max_size=20))
def test_any_list_is_a_tree_or_refused(wire: list[int]) -> None:
    fault = next((i for i, p in enumerate(wire) if not -1 <= p < i), None)
    if fault is None:
        check(wire)
        return
    with pytest.raises(TopologyError) as raised:
        Topology.from_wire(wire)
    assert raised.value.index == fault
    assert f"parents[{fault}] = {wire[fault]}" in str(raised.value)


def test_root_only() -> None:
    topology = Topology.root_only()
    assert len(topology) == 1
    assert topology is Topology.from_wire([], [])
    assert topology.waves == ((0,),)
    assert topology.ancestors.tolist() == [[1]]


def test_equal_shapes_are_one_object() -> None:
    assert Topology.from_wire([-1, 0, 0], [5, 6, 7]) is Topology.from_wire([-1, 0, 0], [8, 9, 3])


def test_arrays_are_read_only() -> None:
    topology = Topology.from_wire([-1, 0])
    for array in (topology.parents, topology.depth, topology.ancestors, topology.chain_of, topology.chains[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("parents", "tokens", "index", "words"),
    [
        ([0], [7], 0, "itself, a cycle"),
        ([-1, 2, 1], [7, 8, 9], 1, "points forward"),
        ([-1, 9], [7, 8], 1, "points forward"),
        ([-1, -2], [7, 8], 1, "below -1"),
        ([-1, 0.5], [7, 8], 1, "not an integer"),
        ([-1, None], [7, 8], 1, "not an integer"),
        ([-1, 0], [7], None, "1 tokens but 2 parents"),
        ([-1], [7, 8], None, "2 tokens but 1 parents"),
        ([-1, 0, 0], [7, 8, 8], 2, "candidates 1 and 2 are siblings"),
        ([-1, 0, -1], [7, 8, 7], 2, "candidates 0 and 2 are siblings"),
        ([-1] * MAX_ROWS, list(range(MAX_ROWS)), MAX_ROWS - 1, "at most 128"),
    ],
)
def test_refuses(parents: list[int], tokens: list[int], index: int | None, words: str) -> None:
    with pytest.raises(TopologyError, match=words.replace("[", r"\[")) as raised:
        Topology.from_wire(parents, tokens)
    assert raised.value.index == index


def test_refuses_more_rows_than_the_caller_allows() -> None:
    assert len(Topology.from_wire([-1] * 3, [1, 2, 3], max_rows=4)) == 4
    with pytest.raises(TopologyError, match="at most 2 are allowed"):
        Topology.from_wire([-1] * 3, [1, 2, 3], max_rows=3)


def test_the_same_token_twice_on_different_parents_is_a_tree() -> None:
    assert len(Topology.from_wire([-1, 0, 1], [7, 7, 7])) == 4


def test_numpy_integers_are_accepted() -> None:
    wire = list(np.array([-1, 0, 0], dtype=np.int32))
    assert Topology.from_wire(wire).parent_rows == (-1, 0, 1, 1)


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from specla.kernels.topology import Topology; print(Topology)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
