"""The float64 reference against arithmetic done by hand and against itself in another order."""

import math

import pytest
import torch

from specla.kernels import reference


def test_one_step_by_hand() -> None:
    state = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    k, q, v = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0])
    step = reference.gated_delta_step(state, q, k, v, torch.tensor(math.log(0.5)), torch.tensor(2.0))
    # the decayed state is [[.5, 0], [0, 1]]; k recalls [.5, 0]; u = 2 ([3, 4] - [.5, 0])
    assert torch.allclose(step.u, torch.tensor([5.0, 8.0], dtype=torch.float64))
    assert torch.allclose(step.state, torch.tensor([[5.5, 8.0], [0.0, 1.0]], dtype=torch.float64))
    assert torch.allclose(step.o, torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_beta_one_overwrites_what_the_key_recalls() -> None:
    k = torch.nn.functional.normalize(torch.randn(8, generator=torch.Generator().manual_seed(1)), dim=0)
    v = torch.arange(4.0)
    step = reference.gated_delta_step(torch.ones(8, 4), k, k, v, torch.tensor(-0.3), torch.tensor(1.0))
    assert torch.allclose(step.o, v.double(), atol=1e-6)


def test_full_forgetting_leaves_the_new_token_alone() -> None:
    k, v = torch.tensor([0.6, 0.8]), torch.tensor([1.0, -2.0])
    step = reference.gated_delta_step(torch.full((2, 2), 1e30), k, k, v, torch.tensor(-math.inf), torch.tensor(1.0))
    assert torch.allclose(step.state, torch.outer(k, v).double())


def test_tree_rows_equal_their_paths_and_commit_equals_steps() -> None:
    generator = torch.Generator().manual_seed(2)
    parents = [-1, 0, 0, 1, 1, 2]
    q, k = (torch.randn(6, 2, 8, generator=generator) for _ in range(2))
    v, state = torch.randn(6, 4, 4, generator=generator), torch.randn(4, 8, 4, generator=generator)
    g, beta = -torch.rand(6, 4, generator=generator), torch.rand(6, 4, generator=generator)
    o, u = reference.verify_tree(q, k, v, g, beta, state, parents)
    for path in ([0], [0, 1, 3], [0, 1, 4], [0, 2, 5]):
        chain = [-1, *range(len(path) - 1)]
        rows = torch.tensor(path)
        chain_o, chain_u = reference.verify_tree(q[rows], k[rows], v[rows], g[rows], beta[rows], state, chain)
        assert torch.equal(chain_o[-1], o[path[-1]])
        assert torch.equal(chain_u[-1], u[path[-1]])
        after = reference.commit(state, k, u, g, path)
        expected = state[3]
        for row in path:
            step = reference.gated_delta_step(expected, q[row, 1], k[row, 1], v[row, 3], g[row, 3], beta[row, 3])
            expected = step.state
        assert torch.allclose(after[3], expected, atol=1e-12)
    assert torch.equal(reference.commit(state, k, u, g, []), state.double())


def test_convolution_by_hand() -> None:
    window, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]])
    weight = torch.tensor([[1.0], [10.0], [100.0]])
    y = reference.convolution(x, window, weight, [-1, 0, 0])
    totals = [1 + 20 + 300, 2 + 30 + 400, 2 + 30 + 500]
    assert torch.allclose(y[:, 0], torch.tensor([t / (1 + math.exp(-t)) for t in totals], dtype=torch.float64))


@pytest.mark.parametrize(("path", "expected"), [([], [1, 2]), ([0], [2, 3]), ([0, 2], [3, 5]), ([0, 1, 2], [4, 5])])
def test_window_by_hand(path: list[int], expected: list[int]) -> None:
    window, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]])
    assert reference.advance_window(window, x, path)[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("sampled", "rows", "bonus"),
    [
        ([9, 0, 0, 0, 0], [0], 9),
        ([7, 5, 0, 0, 0], [0, 1], 5),
        ([8, 0, 6, 0, 1], [0, 2, 4], 1),
        ([7, 3, 0, 2, 0], [0, 1, 3], 2),
    ],
)
def test_accept(sampled: list[int], rows: list[int], bonus: int) -> None:
    parents, tokens = [-1, 0, 0, 1, 2], [0, 7, 8, 3, 6]
    assert reference.accept(parents, tokens, sampled) == (rows, bonus)


def test_norms_and_gates_by_hand() -> None:
    x = torch.tensor([3.0, 4.0])
    assert torch.allclose(reference.l2_normalise(x, scale=2.0, eps=0.0), torch.tensor([1.2, 1.6]).double())
    expected = torch.tensor([3.0, 8.0]).double() / math.sqrt(12.5)
    assert torch.allclose(reference.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0), expected)
    a, b, zero = torch.tensor([[0.0, -800.0]]), torch.tensor([[0.0, 800.0]]), torch.zeros(2)
    g, beta = reference.gates(a, b, torch.tensor([math.log(2.0), 0.0]), zero, allow_neg_eigval=True)
    assert torch.allclose(g, torch.tensor([[-2 * math.log(2.0), 0.0]]).double())
    assert torch.allclose(beta, torch.tensor([[1.0, 2.0]]).double())
