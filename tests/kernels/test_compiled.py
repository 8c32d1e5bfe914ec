"""The compiled steps against the float64 reference; and their bits, which no tree, batch or neighbour may change.

The recurrence and the commit are tested beside the PyTorch forms, in test_gated_delta.py and test_commit.py.
"""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from tree_cases import random_tree, rms_ratio

from specla.kernels import compiled, reference
from specla.kernels.topology import MAX_ROWS, Topology
from specla.kernels.tree import TreeBatch, pack


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_exp_is_right_to_the_last_places_and_keeps_nan() -> None:
    x = np.linspace(-87, 88, 20_001, dtype=np.float32)
    got, want = [compiled._exp(value) for value in x], np.exp(x.astype(np.float64))
    assert np.array_equal(np.float32(got), got), "no float64 comes in"
    assert np.max(np.abs(got - want) / np.spacing(want.astype(np.float32))) < 1.5
    assert np.isnan(compiled._exp(np.float32("nan")))
    assert compiled._exp(np.float32("inf")) == compiled._exp(np.float32(88.0)) < np.inf
    assert compiled._exp(np.float32("-inf")) == compiled._exp(np.float32(-87.0)) > 0


def convolved(x: Tensor, windows: Tensor, weight: Tensor, batch: TreeBatch) -> tuple[Tensor, Tensor]:
    """y and inputs; x [R, D], windows [B, W - 1, D]. The store has two layers, of which the second is meant."""
    (width, channels), R = weight.shape, batch.rows
    store = torch.stack((torch.full_like(windows, torch.nan), windows), 2).contiguous()
    inputs = torch.full((batch.sessions * (width - 1) + R, channels), torch.nan)
    y = torch.full((R, channels), torch.nan)
    projected = torch.cat((x, torch.full((R, 3), torch.nan)), 1)  # wider than its inputs
    compiled.gather_inputs(projected.numpy(), store.numpy(), np.arange(batch.sessions), 1, inputs.numpy())
    compiled.convolve(inputs.numpy(), batch.taps(width).numpy().reshape(width, R), weight.numpy(), y.numpy())
    return y, inputs


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("channels", [40, 96])
def test_convolution(width: int, channels: int) -> None:
    rng = random.Random(width)
    root = pack([Topology.root_only()])
    weight = normal(width, channels)
    for sizes in ([1], [9], [1, 1, 1], [5, 1, 12]):
        batch = pack([random_tree(rng, n) for n in sizes])
        x, windows = normal(batch.rows, channels, seed=1), normal(len(sizes), width - 1, channels, seed=2)
        y, inputs = convolved(x, windows, weight, batch)
        for b, topology in enumerate(batch.topologies):
            rows = slice(batch.offsets[b], batch.offsets[b + 1])
            expected = reference.convolution(x[rows], windows[b], weight, topology.parent_rows)
            assert rms_ratio(y[rows], expected) < 1e-6
        moved = {-1 - b: windows[b : b + 1] for b in range(len(sizes))}
        for row, parent in enumerate(batch.parents):
            before = moved[parent if parent >= 0 else -1 - int(batch.row_session[row])]
            assert torch.equal(convolved(x[row : row + 1], before, weight, root)[0][0], y[row])
            store = torch.full((2, width - 1, 1, channels), torch.nan)
            sources = batch.window_after(width, row).numpy()[None]
            compiled.advance_windows(store.numpy(), np.array([1]), inputs.numpy()[None], sources)
            moved[row] = store[1:, :, 0]
            assert store[0].isnan().all()


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 48), (8, 64)])
def test_normalised_q_and_k(heads: int, width: int) -> None:
    y = normal(7, 2 * heads * width + 5)
    y[3, :width] = 0.0
    q, k = torch.empty(7, heads, width), torch.empty(7, heads, width)
    compiled.normalise(y.numpy(), q.numpy(), k.numpy())
    raw = y[:, : 2 * heads * width].view(7, 2, heads, width)
    assert rms_ratio(q, reference.l2_normalise(raw[:, 0], scale=width**-0.5)) < 1e-6
    assert rms_ratio(k, reference.l2_normalise(raw[:, 1])) < 1e-6
    assert not q[3, 0].any()


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gates(allow_neg_eigval: bool) -> None:
    heads = 6
    projected = 5 * normal(9, 4 + 2 * heads)
    projected[0, 4:] = 60.0  # softplus' linear part
    projected[1, 4:] = -60.0
    a_log, bias = normal(heads, seed=1), normal(heads, seed=2)
    alpha, beta = torch.empty(9, heads), torch.empty(9, heads)
    scale = 2.0 if allow_neg_eigval else 1.0
    compiled.gate(projected.numpy(), 4, bias.numpy(), (-torch.exp(a_log)).numpy(), scale, alpha.numpy(), beta.numpy())
    a, b = projected[:, 4 : 4 + heads], projected[:, 4 + heads :]
    g, expected = reference.gates(a, b, a_log, bias, allow_neg_eigval)
    assert rms_ratio(alpha, torch.exp(g)) < 1e-6
    assert rms_ratio(beta, expected) < 1e-6


def test_a_decay_of_nothing_at_all() -> None:
    """g = -inf clears the state; a head whose rate is infinite must not make NaN of it."""
    projected, alpha, beta = np.zeros((1, 2), np.float32), np.empty((1, 1), np.float32), np.empty((1, 1), np.float32)
    compiled.gate(projected, 0, np.zeros(1, np.float32), np.full(1, -np.inf, np.float32), 1.0, alpha, beta)
    assert (alpha[0, 0], beta[0, 0]) == (0.0, 0.5)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
def test_gated_output(activation: str | None) -> None:
    o, projected, eps = normal(5, 3, 32), 3 * normal(5, 7 + 96, seed=1), 1e-5
    out = torch.empty(5, 96)
    at = -1 if activation is None else 7
    compiled.gate_output(o.numpy(), projected.numpy(), at, activation == "silu", eps * 32, out.numpy())
    expected = reference.rms_norm(o, torch.ones(32), eps).flatten(1) / math.sqrt(32)
    if activation is not None:
        gate = projected[:, 7:].double()
        expected = expected * torch.sigmoid(gate) * (gate if activation == "silu" else 1.0)
    assert rms_ratio(out, expected) < 1e-6


def test_residual_norm_and_swiglu() -> None:
    x, delta = normal(4, 48), normal(4, 48, seed=1)
    total, normed = torch.empty(4, 48), torch.empty(4, 48)
    compiled.add_and_norm(x.numpy(), delta.numpy(), 1e-6 * 48, total.numpy(), normed.numpy())
    assert torch.equal(total, x + delta)
    expected = reference.rms_norm(total, torch.ones(48), 1e-6) / math.sqrt(48)
    assert rms_ratio(normed, expected) < 1e-6
    compiled.add_and_norm(x.numpy(), delta.numpy(), 1e-6 * 48, x.numpy(), normed.numpy())
    assert torch.equal(x, total)
    both, out = 4 * normal(3, 80, seed=2), torch.empty(3, 40)
    compiled.swiglu(both.numpy(), out.numpy())
    gate, up = both.double().split(40, 1)
    assert rms_ratio(out, gate * torch.sigmoid(gate) * up) < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 5, 17, MAX_ROWS])
def test_rowwise_bits_do_not_depend_on_the_rows(rows: int) -> None:
    """Odd widths leave elements over behind whole vectors: theirs, too, are the same in any company."""
    width = 37
    everything = 3 * normal(MAX_ROWS, 2 * width)
    start = (MAX_ROWS - rows) // 2
    results = []
    for x in (everything, everything[start : start + rows].contiguous()):
        glu, total, normed = (torch.empty(len(x), width) for _ in range(3))
        compiled.swiglu(x.numpy(), glu.numpy())
        left, right = (part.contiguous() for part in x.split(width, 1))
        compiled.add_and_norm(left.numpy(), right.numpy(), 1e-6, total.numpy(), normed.numpy())
        results.append(torch.cat((glu, normed), 1))
    assert torch.equal(results[0][start : start + rows], results[1])


def test_a_nan_reaches_the_output() -> None:
    both, out = normal(2, 64), torch.empty(2, 32)
    both[0, 3] = math.nan
    compiled.swiglu(both.numpy(), out.numpy())
    assert bool(out[0, 3].isnan())
    assert int(out.isnan().sum()) == 1


def test_where_nothing_can_be_kept_on_disk_it_is_compiled_at_every_start() -> None:
    """A read-only installation and a user without a home: slower to start, no failure."""
    program = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "import numpy as np\n"
        "from specla.kernels import compiled\n"
        "out = np.empty((1, 2), np.float32)\n"
        "compiled.swiglu(np.full((1, 4), 2, np.float32), out)\n"
        "print(out[0, 0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert abs(float(done.stdout) - 4 / (1 + math.exp(-2))) < 1e-6
    assert done.stderr.count("compiling at every start") == 1
