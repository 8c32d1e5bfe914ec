"""The chunked gated delta rule in Triton: against the float64 reference, over chunks, strong decays and equal keys."""

import pytest
import torch

from specla.kernels import reference
from specla.kernels.gpu import chunk_scan
from specla.kernels.gpu.chunk_batch import CHUNK, ChunkBatch, ChunkInputs, ChunkText
from specla.kernels.gpu.chunk_delta import ChunkWorkspace, chunk_delta_rule, key_pitch
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
        rows, states = self.filled(pitch), torch.stack([torch.full_like(self.state, POISON), self.state])
        workspace = workspace_of(len(rows.q) + room, self.state.shape[0], rows.k.dtype, states.device, chunk)
        o = torch.full_like(rows.v, POISON)
        chunk_delta_rule(rows, states, batch_of([(1, self.tokens)], len(rows.q), states.device), workspace, o)
        assert bool((states[0] == POISON).all()), "the state of another slot was written"
        return o[: self.tokens], states[1]

    def check(self, chunk=None, room=0, pitch=None):
        o, state = self.run(chunk, room, pitch)
        rows = LayerRows(*(x.cpu() for x in self.rows))
        before = self.state.cpu()
        want, u = reference.verify_tree(*rows, before, list(range(-1, self.tokens - 1)))
        after = reference.commit(before, rows.k, u, rows.g, range(self.tokens))
        dtype = rows.k.dtype
        assert rel(o, want) < OUTPUTS[dtype]
        assert rel(state, after) < STATES[dtype]


def workspace_of(rows, value_heads, dtype, device, chunk=None):
    workspace = ChunkWorkspace.empty(rows, value_heads, dtype, device, chunk)
    for x in workspace:
        x.fill_(POISON)
    return workspace


def batch_of(texts: list[tuple[int, int]], rows: int, device) -> ChunkBatch:
    """Texts (slot, tokens) one behind the other."""
    inputs = ChunkInputs(rows, len(texts), 1, 0, device)
    inputs.put([ChunkText(slot, [0] * tokens, [], [], {}) for slot, tokens in texts], rows)
    return inputs.batch


def check_texts(made: list[Numbers], device) -> None:
    """Several texts in one chunk, an empty block behind them: each has its own bits, and nothing else is written."""
    filled = [numbers.filled() for numbers in made]
    none = LayerRows(*(torch.full_like(x[:CHUNK], float("nan")) for x in filled[0]))
    rows = LayerRows(*(torch.cat(parts) for parts in zip(*filled, none, strict=True)))
    slots = [2 * i + 1 for i in range(len(made))]
    states = torch.full((2 * len(made) + 1, *made[0].state.shape), POISON, device=device)
    for slot, numbers in zip(slots, made, strict=True):
        states[slot] = numbers.state
    batch = batch_of([*zip(slots, (numbers.tokens for numbers in made), strict=True)], len(rows.q), device)
    more = ChunkBatch(
        *batch[:3],
        texts=torch.cat([batch.texts, torch.zeros_like(batch.texts[:1])]),  # a place that no text takes
        history=batch.history.new_empty(len(made) + 1, 0),
        places=batch.places.new_empty(len(made) + 1, 0),
    )
    o = torch.full_like(rows.v, POISON)
    chunk_delta_rule(rows, states, more, workspace_of(len(o), states.shape[1], o.dtype, device), o)
    first = 0
    for slot, numbers, own in zip(slots, made, filled, strict=True):
        want, after = numbers.run()
        assert torch.equal(o[first : first + numbers.tokens], want)
        assert torch.equal(states[slot], after)
        first += len(own.q)
    assert bool((states[::2] == POISON).all()), "the state of another slot was written"


def rel(got, want):
    return float((got.cpu().double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(
    ("tokens", "shape", "chunk"),
    [(130, (1, 2, 48, 16), 64), (64, (2, 2, 32, 32), 64), (70, (1, 3, 16, 48), None), (1, (1, 1, 16, 16), 32)],
)
def test_outputs_and_state_against_the_reference(tokens, shape, chunk, device):
    Numbers(tokens, *shape, torch.float32, device).check(chunk, room=64, pitch=shape[2] + 16)


def test_texts_of_one_chunk_do_not_see_each_other(device):
    made = [Numbers(n, 1, 2, 16, 16, torch.float32, device, seed=n) for n in (3, 130, 64)]
    check_texts(made, device)


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
    rows, states, o = numbers.filled(), numbers.state[None], torch.empty_like(numbers.rows.v)
    workspace, batch = ChunkWorkspace.empty(64, 2, torch.float32, device), batch_of([(0, 64)], 64, device)
    chunk_delta_rule(rows, states, batch, workspace, o)
    with pytest.raises(ValueError, match="a multiple of 64"):
        chunk_delta_rule(LayerRows(*(x[:60] for x in rows)), states, batch, workspace, o[:60])
    with pytest.raises(ValueError, match=r"tokens is torch.int32 \[128\]"):
        chunk_delta_rule(rows, states, batch_of([(0, 64)], 128, device), workspace, o)
    with pytest.raises(ValueError, match="room for all"):
        chunk_delta_rule(rows, states, batch, ChunkWorkspace.empty(48, 2, torch.float32, device), o)
    with pytest.raises(ValueError, match=r"states is .* give torch.float32 \[1, 2, 16, 16\]"):
        chunk_delta_rule(rows, states[:, :1], batch, workspace, o)
    with pytest.raises(ValueError, match=r"o is torch.float64"):
        chunk_delta_rule(rows, states, batch, workspace, o.double())
    turned = rows.v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        chunk_delta_rule(rows._replace(v=turned), states, batch, workspace, o)


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
    check_texts([Numbers(n, *shape, dtype, device, seed=n) for n in (65, 333, 1)], device)


def test_a_descriptor_goes_with_its_tensor() -> None:
    x = torch.zeros(64, 4, 64, dtype=torch.bfloat16)
    before = len(chunk_scan._descriptors)
    made = chunk_scan._tiles(x, 64, 64, 64)
    assert chunk_scan._tiles(x, 64, 64, 64) is made
    assert list(made.shape) == [64, 256]
    assert len(chunk_scan._descriptors) == before + 1
    del x
    assert len(chunk_scan._descriptors) == before
