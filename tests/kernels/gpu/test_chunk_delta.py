"""The chunked gated delta rule in Triton: against the float64 reference, over chunks, strong decays and equal keys."""

import pytest
import torch

from specla.kernels import reference
from specla.kernels.gpu import chunk_scan
from specla.kernels.gpu.chunk_delta import CHUNK, ChunkWorkspace, chunk_delta_rule, key_pitch
from specla.kernels.gpu.layer_rows import LayerRows

POISON = 7777.0
OUTPUTS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-3}  # of the largest value
STATES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}


class Numbers:
    """Random rows of one shape and a state before them."""

    def __init__(self, tokens, heads, value_heads, key_width, value_width, dtype, device, *, seed=0):
        self.generator, self.tokens = torch.Generator().manual_seed(seed), tokens
        q, k = (
            torch.nn.functional.normalize(self.random(tokens, heads, key_width), dim=-1) * scale
            for scale in (key_width**-0.5, 1.0)
        )
        v, g = self.random(tokens, value_heads, value_width), -self.random(tokens, value_heads).abs() * 0.05
        beta = torch.rand(tokens, value_heads, generator=self.generator) * 2
        rows = LayerRows(q.to(dtype), k.to(dtype), v.to(dtype), g, beta)
        self.rows = LayerRows(*(x.to(device) for x in rows))
        self.state = (self.random(value_heads, key_width, value_width) * 0.1).to(device)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def filled(self, pitch=None):
        """The rows with zeros behind them, and zeros behind every head of q and k."""
        more, key_width = -self.tokens % CHUNK, self.state.shape[1]
        pitch = key_pitch(key_width, self.rows.k.dtype) if pitch is None else pitch
        rows = LayerRows(*(torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in self.rows))
        wide = {name: torch.nn.functional.pad(getattr(rows, name), (0, pitch - key_width)) for name in ("q", "k")}
        return rows._replace(**wide)

    def run(self, chunk=None, room=0, pitch=None):
        """o and the state after, in poisoned memory."""
        rows, state = self.filled(pitch), self.state.clone()
        value_heads = state.shape[0]
        workspace = ChunkWorkspace.empty(len(rows.q) + room, value_heads, rows.k.dtype, state.device, chunk)
        for x in workspace:
            x.fill_(POISON)
        o = torch.full_like(rows.v, POISON)
        chunk_delta_rule(rows, state, workspace, o)
        assert bool((o[self.tokens :] != POISON).all()), "rows that fill a chunk up must be written too"
        return o[: self.tokens], state

    def check(self, chunk=None, room=0, pitch=None):
        o, state = self.run(chunk, room, pitch)
        rows = LayerRows(*(x.cpu() for x in self.rows))
        before = self.state.cpu()
        want, u = reference.verify_tree(*rows, before, list(range(-1, self.tokens - 1)))
        after = reference.commit(before, rows.k, u, rows.g, range(self.tokens))
        dtype = rows.k.dtype
        assert rel(o, want) < OUTPUTS[dtype]
        assert rel(state, after) < STATES[dtype]


def rel(got, want):
    return float((got.cpu().double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(
    ("tokens", "shape", "chunk"),
    [(130, (1, 2, 48, 16), 64), (64, (2, 2, 32, 32), 64), (70, (1, 3, 16, 48), None), (1, (1, 1, 16, 16), 32)],
)
def test_outputs_and_state_against_the_reference(tokens, shape, chunk, device):
    Numbers(tokens, *shape, torch.float32, device).check(chunk, room=64, pitch=shape[2] + 16)


def test_strong_decays_and_a_cleared_state(device):
    numbers = Numbers(128, 1, 2, 16, 16, torch.float32, device)
    g = numbers.rows.g
    g[5], g[6:40] = -300.0, -1e-3  # small decays behind a strong one keep their digits
    g[90, 0] = -float("inf")
    numbers.check(64)


def test_equal_keys_written_in_full_stay_stable(device):
    numbers = Numbers(128, 1, 1, 32, 16, torch.float32, device)
    numbers.rows.k[:] = numbers.rows.k[:1]
    numbers.rows.g[:] = 0.0
    for beta in (1.0, 2.0):
        numbers.rows.beta[:] = beta
        numbers.check(64)


def test_two_runs_behind_each_other_have_the_bits_of_one(device):
    whole = Numbers(192, 2, 2, 16, 16, torch.float32, device)
    o, state = whole.run(64)
    first, second = Numbers(64, 2, 2, 16, 16, torch.float32, device), Numbers(128, 2, 2, 16, 16, torch.float32, device)
    first.rows, first.state = LayerRows(*(x[:64] for x in whole.rows)), whole.state
    o_first, second.state = first.run(64)
    second.rows = LayerRows(*(x[64:] for x in whole.rows))
    o_second, state_second = second.run(64)
    assert torch.equal(torch.cat([o_first, o_second]), o)
    assert torch.equal(state_second, state)


def test_what_does_not_fit_is_refused(device):
    numbers = Numbers(64, 1, 2, 16, 16, torch.float32, device)
    rows, state, o = numbers.filled(), numbers.state, torch.empty_like(numbers.rows.v)
    workspace = ChunkWorkspace.empty(64, 2, torch.float32, device)
    chunk_delta_rule(rows, state, workspace, o)
    with pytest.raises(ValueError, match="a multiple of 64 rows"):
        chunk_delta_rule(LayerRows(*(x[:60] for x in rows)), state, workspace, o[:60])
    with pytest.raises(ValueError, match="room for all"):
        chunk_delta_rule(rows, state, ChunkWorkspace.empty(48, 2, torch.float32, device), o)
    with pytest.raises(ValueError, match=r"state is .* give torch.float32 \[2, 16, 16\]"):
        chunk_delta_rule(rows, state[:1], workspace, o)
    with pytest.raises(ValueError, match=r"o is torch.float64"):
        chunk_delta_rule(rows, state, workspace, o.double())
    with pytest.raises(ValueError, match="contiguous"):
        chunk_delta_rule(rows._replace(v=rows.v.transpose(1, 2).contiguous().transpose(1, 2)), state, workspace, o)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(8, 8, 256, 256), (4, 8, 64, 64), (16, 48, 128, 128), (3, 6, 96, 192), (2, 2, 512, 256), (1, 2, 192, 512)],
)
def test_all_shapes_on_the_device(shape, dtype, device):
    numbers = Numbers(333, *shape, dtype, device)
    rows = numbers.rows
    rows.g[100], rows.g[200, 0] = -120.0, -float("inf")
    rows.k[130:150] = rows.k[130]
    numbers.check()
    assert all(torch.equal(*pair) for pair in zip(numbers.run(), numbers.run(), strict=True))


def test_a_descriptor_goes_with_its_tensor() -> None:
    x = torch.zeros(64, 4, 64, dtype=torch.bfloat16)
    before = len(chunk_scan._descriptors)
    made = chunk_scan._tiles(x, 64, 64, 64)
    assert chunk_scan._tiles(x, 64, 64, 64) is made
    assert list(made.shape) == [64, 256]
    assert len(chunk_scan._descriptors) == before + 1
    del x
    assert len(chunk_scan._descriptors) == before
