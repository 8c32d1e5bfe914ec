"""The deferred commit: accepted paths reach the state, nothing else does."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from compiled_forms import commit_compiled, verify_compiled
from torch import Tensor
from tree_cases import chain, random_rows, random_tree, rms_ratio

from specla.kernels import reference
from specla.kernels.commit import Factors, commit_exact, commit_fast
from specla.kernels.gated_delta import verify_exact
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch, pack

Commit = Callable[[Tensor, Sequence[int], Factors, Sequence[Sequence[int]]], None]
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, TreeBatch], tuple[Tensor, Tensor]]
ROOT = pack([Topology.root_only()])


def random_factors(batch: TreeBatch, state: Tensor, H: int, seed: int) -> Factors:
    HV, K, V = state.shape[1:]
    rows = random_rows(torch.Generator().manual_seed(seed), batch.rows, H, HV, K, V)
    _, u = verify_exact(*rows, state[: batch.sessions], batch)
    return Factors(rows.qk[:, 1], u, rows.g)


@pytest.mark.parametrize("commit", [commit_exact, commit_fast, commit_compiled])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_agrees_with_the_reference_and_writes_named_slots_alone(commit: Commit, heads: tuple[int, int]) -> None:
    H, HV = heads
    batch = pack([random_tree(random.Random(1), n) for n in (9, 1, 12, 4)])
    state = torch.randn(7, HV, 16, 32, generator=torch.Generator().manual_seed(1))
    factors = random_factors(batch, state, H, 1)
    paths = [batch.path(0, 8), batch.path(1, 0), batch.path(2, 10), []]
    slots = [5, 0, 3, 1]
    before = state.clone()
    commit(state, slots, factors, paths)
    for slot, path in zip(slots, paths, strict=True):
        expected = reference.commit(before[slot], *factors, path)
        assert rms_ratio(state[slot], expected) < 1e-6
    for slot in (1, 2, 4, 6):
        assert torch.equal(state[slot], before[slot])


@pytest.mark.parametrize("commit", [commit_exact, commit_fast, commit_compiled])
def test_extreme_decays(commit: Commit) -> None:
    state = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(2))
    factors = random_factors(pack([chain(6)]), state, 2, 2)
    factors.g[1], factors.g[3, 0] = 0.0, -torch.inf
    expected = reference.commit(state[0], *factors, range(6))
    commit(state, [0], factors, [range(6)])
    assert rms_ratio(state[0], expected) < 1e-6


@pytest.mark.parametrize("commit", [commit_exact, commit_compiled])
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (2, 4, 48, 80), (8, 8, 64, 64)])
def test_exact_bits_are_those_of_serial_steps(commit: Commit, shape: tuple[int, int, int, int]) -> None:
    """However many tokens are accepted at once, and whoever else is in the batch, the state is the same."""
    H, HV, K, V = shape
    topology = random_tree(random.Random(3), 10)
    batch = pack([topology, topology, chain(3)])
    state = torch.randn(3, HV, K, V, generator=torch.Generator().manual_seed(3))
    factors = random_factors(batch, state, H, 3)
    paths = [batch.path(0, 9), batch.path(1, 7), batch.path(2, 2)]
    expected = state.clone()
    for slot, path in enumerate(paths):
        for row in path:
            one = Factors(*(x[row : row + 1] for x in factors))
            commit(expected, [slot], one, [[0]])
    commit(state, [0, 1, 2], factors, paths)
    assert torch.equal(state, expected)


def test_sessions_side_by_side_take_the_same_steps() -> None:
    """Plain decoding of several sessions commits them in one go, with the same bits."""
    batch = pack([Topology.root_only()] * 4)
    state = torch.randn(6, 8, 64, 64, generator=torch.Generator().manual_seed(4))
    factors = random_factors(batch, state, 8, 4)
    one_by_one = state.clone()
    commit_exact(state, [1, 2, 3, 4], factors, [[0], [1], [2], [3]])
    for i in (2, 0, 3, 1):
        commit_exact(one_by_one, [i + 1], factors, [[i]])
    assert torch.equal(state, one_by_one)


def test_all_layers_at_once() -> None:
    """Layers may be laid side by side as heads: a commit of all equals a commit of each."""
    layers = 3
    state = torch.randn(2, layers, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    batch = pack([chain(4)])
    each = [random_factors(batch, state[:1, layer], 2, layer) for layer in range(layers)]
    expected = state.clone()
    for layer in range(layers):
        commit_exact(expected[:, layer], [1], each[layer], [[0, 1, 2]])
    together = Factors(*(torch.stack(x, 1).flatten(1, 2) for x in zip(*each, strict=True)))
    commit_exact(state.flatten(1, 2), [1], together, [[0, 1, 2]])
    assert torch.equal(state, expected)


@pytest.mark.parametrize(("verify", "commit"), [(verify_exact, commit_exact), (verify_compiled, commit_compiled)])
def test_speculation_leaves_the_state_of_plain_decoding(verify: Verify, commit: Commit) -> None:
    """Twenty passes with random trees of which random paths are accepted, against one token after the other."""
    rng = random.Random(6)
    text = random_rows(torch.Generator().manual_seed(6), 60, 2, 2, 16, 16)
    plain = torch.zeros(1, 2, 16, 16)
    speculative = plain.clone()
    done = 0
    for _ in range(20):
        topology = random_tree(rng, rng.randint(1, 8))
        path = topology.path(rng.randrange(len(topology)))[: 60 - done]
        rows = random_rows(torch.Generator().manual_seed(done + 100), len(topology), 2, 2, 16, 16)
        for place, row in enumerate(path):  # the accepted rows hold the text's tokens, the others anything
            for x, source in zip(rows, text, strict=True):
                x[row] = source[done + place]
        _, u = verify(*rows, speculative, pack([topology]))
        commit(speculative, [0], Factors(rows.qk[:, 1], u, rows.g), [path])
        done += len(path)
    for token in range(done):
        one = text.take([token])
        _, u = verify(*one, plain, ROOT)
        commit(plain, [0], Factors(one.qk[:, 1], u, one.g), [[0]])
    assert done > 20
    assert torch.equal(plain, speculative)
