"""The generator's trees are what their names say, and stay so."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.benchmarks.kernels.topologies import (
    accepted_rows,
    chain,
    deepest_path,
    eagle_like,
    leaf_paths,
    random_tree,
    tree,
)


def branching(topology):
    return max(len(rows) for rows in topology.children)


def fingerprint(topology):
    return hashlib.sha256(repr(topology.parent_rows).encode()).hexdigest()[:12]


class TestTrees:
    @pytest.mark.parametrize(("shape", "mark"), [((2, 12, 16), "8009ef922b43"), ((4, 4, 32), "235f58eea10c")])
    def test_have_the_branching_depth_and_rows_of_their_names(self, shape, mark):
        found = tree(*shape)
        assert (branching(found), int(found.depth.max()), len(found)) == shape
        assert fingerprint(found) == mark

    @pytest.mark.parametrize("rows", [16, 32, 64, 128, 129])
    def test_eagle_like_trees_are_six_deep(self, rows):
        found = eagle_like(rows)
        assert len(found) == rows
        assert int(found.depth.max()) == 6
        assert branching(found) <= 8

    def test_eagle_like_trees_stay_as_they_are(self):
        assert [fingerprint(eagle_like(n)) for n in (16, 32, 64, 128, 129)] == [
            "8847ab832aa5",
            "904434cb5926",
            "0e86ac7add6e",
            "f9139d3f9be8",
            "063e6aa2e74c",
        ]

    def test_deeper_than_its_rows_is_refused(self):
        with pytest.raises(ValueError, match="at least 6"):
            tree(2, 5, 5)

    def test_what_cannot_be_grown_is_refused(self):
        with pytest.raises(ValueError, match="no tree"):
            tree(3, 2, 40)  # three children each and two levels hold 13 rows

    def test_chain(self):
        assert chain(4).parent_rows == (-1, 0, 1, 2)


class TestPaths:
    def test_of_a_small_tree(self):
        found = tree(2, 2, 5)
        assert sorted(row for path in leaf_paths(found) for row in path[-1:]) == [
            row for row in range(5) if not found.children[row]
        ]
        assert len(deepest_path(found)) == 3
        assert accepted_rows(found) == 2

    @given(st.integers(1, 129), st.integers(0, 2**32))
    def test_random_trees_have_their_rows_and_every_row_lies_on_a_leaf_path(self, rows, seed):
        found = random_tree(rows, seed)
        assert len(found) == rows
        assert {row for path in leaf_paths(found) for row in path} == set(range(rows))
