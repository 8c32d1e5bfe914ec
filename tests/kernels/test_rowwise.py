"""Per-row maths: right, and with bits that do not depend on the number of rows."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from tree_cases import rms_ratio

from specla.kernels import exactness, reference
from specla.kernels.exactness import InexactBuildError, check_exactness
from specla.kernels.gated_delta import verify_exact
from specla.kernels.rowwise import gate_parameters, gates, l2_normalise, rms_norm, silu
from specla.kernels.tree import TreeBatch


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def joined_gates(ab: Tensor) -> Tensor:
    heads = ab.shape[1] // 2
    return torch.cat(gates(ab, gate_parameters(normal(heads), normal(heads))), 1)


def test_agrees_with_the_reference() -> None:
    x, weight = 3 * normal(9, 48), normal(48)
    assert rms_ratio(silu(x), x.double() * torch.sigmoid(x.double())) < 1e-6
    assert rms_ratio(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    qk = normal(5, 2, 3, 24)
    got = l2_normalise(qk)
    assert rms_ratio(got[:, 0], reference.l2_normalise(qk[:, 0], scale=24**-0.5)) < 1e-6
    assert rms_ratio(got[:, 1], reference.l2_normalise(qk[:, 1])) < 1e-6


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_gates_agree_with_the_reference(allow_neg_eigval: bool, padded: bool) -> None:
    heads = 6
    ab, a_log, dt_bias = 8 * normal(7, 2 * heads), normal(heads), normal(heads)
    ab[0, :heads], ab[0, heads:] = -90.0, 90.0
    given = torch.cat((ab, normal(7, 52)), 1)[:, :32] if padded else ab
    g, beta = gates(given, gate_parameters(a_log, dt_bias, allow_neg_eigval))
    expected_g, expected_beta = reference.gates(ab[:, :heads], ab[:, heads:], a_log, dt_bias, allow_neg_eigval)
    assert g.shape == beta.shape == (7, heads)
    assert rms_ratio(g, expected_g) < 1e-6
    assert rms_ratio(torch.exp(g), torch.exp(expected_g)) < 1e-6
    assert rms_ratio(beta, expected_beta) < 1e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("function", "width"),
    [
        (silu, 1536),
        (silu, 40),
        (silu, 40000),
        (joined_gates, 16),
        (joined_gates, 6),
        (joined_gates, 1100),
        (lambda x: rms_norm(x, torch.ones(x.shape[1]), 1e-6), 512),
        (lambda x: rms_norm(x, torch.ones(x.shape[1]), 1e-6), 40),
        (lambda x: l2_normalise(x.view(-1, 2, 4, 64)), 512),
    ],
    ids=["silu", "silu odd", "silu wide", "gates", "gates odd", "gates wide", "rms_norm", "rms_norm odd", "l2"],
)
def test_a_rows_bits_do_not_depend_on_the_others(
    function: Callable[[Tensor], Tensor], width: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = 3 * normal(129, width)
        together = function(x)
        alone = torch.cat([function(x[row : row + 1]) for row in range(129)])
        assert torch.equal(together, alone)
        for rows in (2, 5, 9, 17, 33, 64):
            assert torch.equal(function(x[-rows:]), alone[-rows:])
    finally:
        torch.set_num_threads(before)


def test_silu_of_a_slice() -> None:
    x = normal(30, 3072)
    assert torch.equal(silu(x[:, 1536:]), silu(x[:, 1536:].contiguous()))


@pytest.mark.parametrize("shape", [(8, 8, 64, 64), (2, 4, 16, 48), (1, 1, 96, 192)])
def test_this_build_is_exact(shape: tuple[int, int, int, int]) -> None:
    H, HV, K, V = shape
    check_exactness(heads=H, value_heads=HV, key_width=K, value_width=V, taps=4, hidden=200)


def test_an_inexact_form_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check must fail for a form whose last bits depend on the number of rows."""
    monkeypatch.setattr(exactness, "silu", lambda x: x * (1 + 1e-6 * (x.shape[0] > 1)))
    monkeypatch.setattr(exactness, "gates", lambda ab, p: [g + 1e-6 * (ab.shape[0] == 5) for g in gates(ab, p)])
    with pytest.raises(InexactBuildError, match=r"^silu, gates: a row's bits depend"):
        check_exactness(heads=2, value_heads=2, key_width=16, value_width=16, taps=4, hidden=64)


def test_an_inexact_recurrence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        o, u = verify_exact(qk, v, g, beta, state, batch)
        return o, u * (1 + 1e-6 * (batch.rows > 1))

    monkeypatch.setattr(exactness, "verify_exact", wrong)
    with pytest.raises(InexactBuildError, match=r"^verify_exact:"):
        check_exactness(heads=2, value_heads=2, key_width=16, value_width=16, taps=4, hidden=64)


@pytest.mark.parametrize("instructions", ["AVX2", "SSE4_2"])
def test_lesser_processors_are_exact_too(instructions: str) -> None:
    """MKL and PyTorch choose other kernels there; both obey these variables on a better processor."""
    code = (
        "from specla.kernels.exactness import check_exactness as check\n"
        "for H, K, V in (8, 64, 64), (2, 16, 48), (2, 128, 128): "
        "check(heads=H, value_heads=H, key_width=K, value_width=V, taps=4, hidden=512)"
    )
    capability = "avx2" if instructions == "AVX2" else "default"
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": instructions, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
