"""The chunked gated delta rule against a token-by-token loop in float64."""

import pytest
import torch
from torch import Tensor

from specla.kernels.chunked import chunk_gated_delta_rule, unit_lower_inverse

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def draw(B: int, T: int, H: int, HV: int, K: int, V: int, *, beta_max: float = 1.0, seed: int = 0) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, generator=rng), dim=-1) for _ in range(2))
    v = torch.randn(B, T, HV, V, generator=rng)
    g = -torch.rand(B, T, HV, generator=rng).pow(4) * 5
    beta = torch.rand(B, T, HV, generator=rng) * beta_max
    return q, k, v, g, beta, torch.randn(B, HV, K, V, generator=rng)


def rms_ratio(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - want).norm() / want.norm())


def check(inputs: Inputs, tolerance: float = 1e-5) -> None:
    *tokens, state = inputs
    got = chunk_gated_delta_rule(*tokens, initial_state=state)
    want_o, want_state = loop(*inputs)
    assert got.o.shape == tokens[2].shape
    assert got.final_state.dtype == torch.float32
    assert rms_ratio(got.o, want_o) < tolerance
    assert rms_ratio(got.final_state, want_state) < tolerance


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 200])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16, 16), (2, 2, 4, 32, 48), (1, 3, 3, 64, 64)])
def test_agrees_with_the_loop(T: int, shape: tuple[int, int, int, int, int]) -> None:
    B, H, HV, K, V = shape
    check(draw(B, T, H, HV, K, V, seed=T))


def test_beta_up_to_two() -> None:
    check(draw(1, 150, 2, 2, 32, 32, beta_max=2.0))


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
def test_equal_keys_stay_accurate(beta: float) -> None:
    q, k, v, g, b, state = draw(1, 192, 1, 1, 32, 32)
    check((q, k[:, :1].expand_as(k).contiguous(), v, torch.zeros_like(g), torch.full_like(b, beta), state))


def test_a_strong_decay_keeps_the_digits_of_later_ones() -> None:
    q, k, v, g, beta, state = draw(1, 128, 2, 2, 32, 32)
    g[:, 10], g[:, 70] = -1e6, -300.0
    check((q, k, v, g, beta, state))


def test_infinite_decay_clears_the_state() -> None:
    q, k, v, g, beta, state = draw(2, 150, 2, 2, 16, 16)
    for t in (0, 40, 41, 64, 149):
        g[:, t] = float("-inf")
    check((q, k, v, g, beta, state))
    alone = chunk_gated_delta_rule(*(x[:, 64:149] for x in (q, k, v, g, beta)))
    whole = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    assert rms_ratio(alone.o, whole.o[:, 64:149].double()) < 1e-6


def test_pieces_chained_through_the_state_equal_the_whole() -> None:
    *tokens, state = draw(1, 160, 2, 4, 32, 32)
    whole = chunk_gated_delta_rule(*tokens, initial_state=state)
    first = chunk_gated_delta_rule(*(x[:, :77] for x in tokens), initial_state=state)
    second = chunk_gated_delta_rule(*(x[:, 77:] for x in tokens), initial_state=first.final_state)
    assert rms_ratio(torch.cat([first.o, second.o], 1), whole.o.double()) < 1e-5
    assert rms_ratio(second.final_state, whole.final_state.double()) < 1e-5


def gradients(inputs: Inputs, *, reference: bool) -> list[Tensor]:
    leaves = [x.double() if reference else x.clone() for x in inputs]
    for x in leaves:
        x.requires_grad_()
    *tokens, state = leaves
    o, final = loop(*leaves) if reference else chunk_gated_delta_rule(*tokens, initial_state=state)
    (o.square().sum() + (final * final.sin()).sum()).backward()
    return [x.grad for x in leaves if x.grad is not None]


@pytest.mark.parametrize("reset", [False, True])
def test_gradients_agree_with_the_loop(reset: bool) -> None:
    inputs = draw(1, 100, 2, 4, 16, 32, beta_max=2.0)
    if reset:
        inputs[3][:, 30] = float("-inf")
    got, want = gradients(inputs, reference=False), gradients(inputs, reference=True)
    assert len(got) == len(want) == 6
    for a, b in zip(got, want, strict=True):
        assert rms_ratio(a, torch.nan_to_num(b)) < 1e-5


def test_autocast_does_not_lower_the_precision() -> None:
    *tokens, state = draw(1, 130, 2, 2, 32, 32)
    want = chunk_gated_delta_rule(*tokens, initial_state=state)
    with torch.autocast("cpu", torch.bfloat16):
        got = chunk_gated_delta_rule(*tokens, initial_state=state)
    torch.testing.assert_close(got.o, want.o, rtol=0, atol=0)


def test_bfloat16_inputs_give_bfloat16_outputs_and_a_float32_state() -> None:
    *tokens, _ = draw(1, 70, 2, 2, 16, 16)
    low = [x.bfloat16() for x in tokens]
    got = chunk_gated_delta_rule(*low)
    want = chunk_gated_delta_rule(*(x.float() for x in low))
    assert (got.o.dtype, got.final_state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=0, atol=0)
    torch.testing.assert_close(got.o, want.o.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["random", "equal"])
def test_inverse_by_blocks(kind: str) -> None:
    rng = torch.Generator().manual_seed(3)
    a = torch.rand(5, 64, 64, generator=rng) * 0.2 if kind == "random" else torch.ones(5, 64, 64)
    a = a.tril(-1)
    want = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a.double())
    assert rms_ratio(unit_lower_inverse(a), want) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 8, 2, 16)}, "one shape"),
        ({"v": torch.zeros(1, 8, 3, 16)}, "multiple of 2"),
        ({"g": torch.zeros(1, 8, 2)}, "g must be"),
        ({"beta": torch.zeros(1, 7, 4)}, "beta must be"),
        ({"initial_state": torch.zeros(1, 2, 32, 16)}, "initial_state must be"),
        ({"chunk_size": 24}, "multiple of 16"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    q, k, v, g, beta, _ = draw(1, 8, 2, 4, 32, 16)
    arguments: dict[str, object] = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | change
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_rule(**arguments)
    with pytest.raises(ValueError, match="empty"):
        chunk_gated_delta_rule(*(x[:, :0] for x in (q, k, v, g, beta)))
