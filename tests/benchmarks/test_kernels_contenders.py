"""The benchmark's kernels, rivals and reference compute the same thing."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
from kernel_loops import recurrent

from specla.benchmarks.kernels.contenders import Ours, Snapshots, StandAlone
from specla.benchmarks.kernels.correctness import check, expected, untouched
from specla.benchmarks.kernels.problem import RING, Problem
from specla.benchmarks.kernels.reference64 import commit64, relative_error, verify64
from specla.benchmarks.kernels.replay import Replay
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.kernels.topologies import chain, random_tree, tree
from specla.kernels import reference
from specla.kernels.gpu.selector import Choice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Shape("tiny", 1, 2, 32, 16)


def problem(topologies, accepted=2, layers=2, shape=TINY, seed=0, spare_rows=0):
    sizes = {"accepted": accepted, "layers": layers, "spare_rows": spare_rows, "seed": seed}
    return Problem.make(shape, topologies, device=DEVICE, dtype=torch.float32, **sizes)


class TestReference:
    def test_agrees_with_the_loops(self):
        made = problem([random_tree(9, 1), random_tree(5, 2)], layers=1)
        rows, first = made.rows, 0
        outputs, factors = verify64(rows, made.state[0], made.topologies)
        for b, topology in enumerate(made.topologies):
            at = slice(first, first + len(topology))
            o, u = reference.verify_tree(*(x[at] for x in rows), made.state[0, b], topology.parent_rows)
            assert relative_error(outputs[at], o) < 1e-13
            assert relative_error(factors[at], u) < 1e-13
            first += len(topology)

    def test_commit_agrees_with_the_loops(self):
        made = problem([chain(4), chain(4)], accepted=3, layers=1)
        k, u, g = made.pool.k[0, :, :3], made.pool.u[0, :, :3], made.pool.g[0, :, :3]
        got = commit64(made.state[0], k, u, g)
        for b in range(2):
            want = reference.commit(made.state[0, b], k[b], u[b], g[b], range(3))
            assert relative_error(got[b], want) < 1e-13

    def test_what_is_not_finite_is_an_infinite_error(self):
        want = torch.ones(3, dtype=torch.float64)
        assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), want) == float("inf")
        assert relative_error(torch.tensor([1.0, 1.0, 2.0]), want) == pytest.approx(3**-0.5)


class TestContenders:
    @pytest.mark.parametrize("choice", [Choice("serial"), Choice("serial", 2), Choice("factorised")])
    def test_ours_defer_the_commit(self, choice):
        made = problem([random_tree(7, 3), random_tree(4, 4)], spare_rows=2)
        ours = Ours(made, choice, output=torch.float32)
        (errors,) = check("trees", made, [ours])
        assert errors.passed, str(errors)
        assert errors.factors > 0
        assert untouched(made, ours)

    def test_a_stand_alone_commit_adds_the_accepted_path(self):
        made = problem([random_tree(7, 3), random_tree(4, 4)])
        (errors,) = check("trees", made, [StandAlone(made, Choice("serial"), output=torch.float32)])
        assert errors.passed, str(errors)

    def test_the_ring_stores_the_state_once_a_cycle(self):
        made = problem([chain(4)], accepted=4, layers=1)
        ours = Ours(made, Choice("serial"), ring=True, output=torch.float32)
        assert ours.passes == RING // 4
        for step in range(ours.passes - 1):
            ours.verify(0, step)
            assert torch.equal(ours.states(0), made.state[0])
        ours.verify(0, ours.passes - 1)
        want = commit64(made.state[0], *(x[0, :, :RING] for x in (made.pool.k, made.pool.u, made.pool.g)))
        assert relative_error(ours.states(0), want) < 1e-5

    @pytest.mark.parametrize("tree_kernel", [False, True])
    def test_snapshots_of_chains(self, tree_kernel):
        made = problem([chain(4), chain(3)])
        (errors,) = check("chains", made, [Snapshots(made, tree=tree_kernel)])
        assert errors.passed, str(errors)
        assert errors.outputs > 0

    def test_snapshots_of_trees_read_the_parent_again(self):
        made = problem([random_tree(7, 3), random_tree(4, 4)])
        (errors,) = check("trees", made, [Snapshots(made, tree=True)])
        assert errors.passed, str(errors)

    def test_the_chain_kernel_is_wrong_on_trees(self):
        made = problem([tree(2, 2, 5)], layers=1)
        (errors,) = check("tree", made, [Snapshots(made, tree=False)])
        assert not errors.passed

    @pytest.mark.parametrize("batched", [False, True])
    def test_replay_covers_every_row(self, batched):
        made = problem([tree(2, 2, 5)] * 2)
        replay = Replay(made, "recurrent", batched=batched, recurrent=recurrent, replayed=recurrent)
        (errors,) = check("trees", made, [replay])
        assert errors.outputs < 1e-6
        assert errors.states < 1e-6

    def test_replay_refuses_different_trees(self):
        made = problem([chain(3), tree(2, 2, 5)])
        with pytest.raises(ValueError, match="one topology"):
            Replay(made, "recurrent", batched=True, recurrent=recurrent, replayed=recurrent)

    def test_expected_continues_the_committed_state(self):
        made = problem([chain(3)], layers=1)
        deferred, immediate = expected(made, 0, deferred=True), expected(made, 0, deferred=False)
        assert not torch.allclose(deferred.outputs, immediate.outputs)
        k, u, g = (x[0, :, : made.pending] for x in (made.pool.k, made.pool.u, made.pool.g))
        assert torch.equal(deferred.states, commit64(made.state[0], k, u, g))
