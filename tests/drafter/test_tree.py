"""Trees of drafters: valid under the verifier's own check, pruned by path and closed under ancestors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.drafter_service.pruning import prune
from specla.drafter_service.tree import EMPTY, ROOT, DraftTree, TreeBuilder
from specla.kernels.topology import Topology


def build(nodes: list[tuple[int, int, float]]) -> DraftTree:
    builder = TreeBuilder()
    for above, token, log_prob in nodes:
        builder.add(above % (len(builder) + 1) - 1, token, log_prob)
    return builder.build()


def trees() -> st.SearchStrategy[DraftTree]:
    log_probs = st.sampled_from([0.0, -0.1, -0.5, -2.0]) | st.floats(-20, 0)
    return st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6), log_probs), max_size=40).map(build)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    found = []
    while tree.parents[node] != ROOT:
        node = tree.parents[node]
        found.append(node)
    return found


def test_builder_merges_paths_that_share_a_beginning() -> None:
    builder = TreeBuilder()
    last = builder.add_path([5, 6, 7], [-0.1, -0.2, -0.3])
    assert builder.add_path([5, 6, 8], [-0.5, -0.05, -0.4]) == 3
    assert builder.add_path([9], [-3.0], parent=last) == 4
    assert builder.build() == DraftTree((5, 6, 7, 8, 9), (-1, 0, 1, 1, 2), (-0.1, -0.05, -0.3, -0.4, -3.0))


def test_builder_refuses_a_positive_log_probability_and_a_parent_that_is_not_there() -> None:
    with pytest.raises(AssertionError):
        TreeBuilder().add(ROOT, 1, 0.1)
    with pytest.raises(AssertionError):
        TreeBuilder().add(0, 1, -0.1)


@given(trees())
def test_built_trees_pass_the_verifiers_check(tree: DraftTree) -> None:
    topology = Topology.from_wire(tree.parents, tree.tokens)
    assert len(topology.parents) == len(tree) + 1


@given(trees())
def test_path_log_probs_are_sums_over_ancestors_and_never_rise(tree: DraftTree) -> None:
    paths = tree.path_log_probs()
    for node, path in enumerate(paths):
        own = tree.log_probs[node] + sum(tree.log_probs[above] for above in ancestors(tree, node))
        assert math.isclose(path, own, abs_tol=1e-9)
        assert tree.parents[node] == ROOT or path <= paths[tree.parents[node]]


@given(trees(), st.floats(0, 30), st.integers(0, 45))
def test_pruning_keeps_the_likely_part(tree: DraftTree, tau: float, max_nodes: int) -> None:
    pruned = prune(tree, tau=tau, max_nodes=max_nodes)
    Topology.from_wire(pruned.parents, pruned.tokens)
    paths = tree.path_log_probs()
    within = [path for path in paths if path >= max(paths) - tau]
    assert len(pruned) == min(len(within), max_nodes)
    # Best first: what is kept is exactly the likeliest paths.
    assert sorted(pruned.path_log_probs(), reverse=True) == pytest.approx(sorted(within, reverse=True)[: len(pruned)])
    assert prune(pruned, tau=tau, max_nodes=max_nodes) == pruned


@given(trees(), st.floats(0, 10), st.integers(1, 45))
def test_pruned_paths_are_paths_of_the_tree(tree: DraftTree, tau: float, max_nodes: int) -> None:
    def as_paths(some: DraftTree) -> set[tuple[int, ...]]:
        return {tuple(some.tokens[n] for n in [node, *ancestors(some, node)]) for node in range(len(some))}

    pruned = prune(tree, tau=tau, max_nodes=max_nodes)
    assert as_paths(pruned) <= as_paths(tree)
    assert len(as_paths(pruned)) == len(pruned)


def test_pruning_by_tau_and_by_budget() -> None:
    builder = TreeBuilder()
    builder.add_path([1, 2, 3], [-0.1, -0.1, -0.1])
    builder.add_path([4, 5], [-2.5, -0.1])
    tree = builder.build()
    assert prune(tree, tau=1.0, max_nodes=8).tokens == (1, 2, 3)
    assert prune(tree, tau=2.4, max_nodes=8).tokens == (1, 2, 3, 4)
    assert prune(tree, tau=9.0, max_nodes=2).tokens == (1, 2)
    assert prune(tree, tau=9.0, max_nodes=5) is tree
    assert prune(tree, tau=9.0, max_nodes=0) == EMPTY
    assert prune(EMPTY, tau=1.0, max_nodes=4) == EMPTY
