"""Convolution and gates of consecutive tokens in Triton: against the reference, the history, the form for trees."""

import pytest
import torch

from specla.kernels import reference
from specla.kernels.gpu import chunk_convolution as chunk_convolution_module
from specla.kernels.gpu.chunk_batch import CHUNK, ChunkInputs, ChunkText
from specla.kernels.gpu.chunk_convolution import chunk_convolution
from specla.kernels.gpu.convolution import ConvolutionParameters, tree_convolution
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.topology import Topology

POISON = 7777.0
POOL_ROWS = 12
SLOTS = 3
TOLERANCE = {torch.float32: 4e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}  # of a rounding to the dtype, and a bit


class Layer:
    """Random weights, a poisoned pool, and rows that stand apart."""

    def __init__(self, shape, taps, dtype, device, *, negative=False):
        self.shape, self.taps, self.dtype, self.device, self.negative = shape, taps, dtype, device, negative
        heads, value_heads, key_width, value_width = shape
        self.channels = 2 * heads * key_width + value_heads * value_width
        self.generator = torch.Generator().manual_seed(value_width)
        weights = (self.random(taps, self.channels), self.random(value_heads), self.random(value_heads) * 3)
        self.parameters = ConvolutionParameters(*weights, negative)
        self.pool_x = torch.full((SLOTS, POOL_ROWS, self.channels), POISON, dtype=dtype, device=device)

    def random(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def inputs(self, tokens):
        """x, a and b as slices of one projection, whose rows stand apart."""
        value_heads = self.shape[1]
        gates = -(-2 * value_heads // 8) * 8
        merged = self.random(tokens, self.channels + gates + 16, dtype=self.dtype)
        a, b = merged[:, self.channels :][:, :value_heads], merged[:, self.channels + value_heads :][:, :value_heads]
        return merged[:, : self.channels], a, b

    def padded(self, x):
        """Rows that nobody may look at behind a whole projection's, up to a multiple of a block and one block more."""
        more = -len(x) % CHUNK + CHUNK
        return torch.cat([x._base, x._base.new_full((more, x._base.shape[1]), float("nan"))])

    def run(self, texts, more=0):
        """Rows of texts, each (slot, x, a, b, history, kept), block by block, and which rows are whose."""
        heads, value_heads, key_width, value_width = self.shape
        merged = torch.cat([self.padded(x)[: -(-len(x) // CHUNK) * CHUNK] for _, x, *_ in texts])
        merged = torch.cat([merged, merged.new_full((CHUNK, merged.shape[1]), float("nan"))])
        x, (a, b) = merged[:, : self.channels], (merged[:, first : first + value_heads] for first in self.gates())
        out = LayerRows.empty(len(x), heads, value_heads, key_width + more, value_width, self.dtype, self.device)
        for tensor in out:
            tensor.fill_(POISON)
        inputs = ChunkInputs(len(x) + CHUNK, len(texts) + 1, self.taps, 0, self.device)
        told = [ChunkText(slot, [0] * len(x), history, kept, {}) for slot, x, _, _, history, kept in texts]
        inputs.put(told, len(x))
        chunk_convolution(x, a, b, self.parameters, self.pool_x, inputs.batch.first(len(x), len(texts)), out)
        owner = inputs.batch.owner.repeat_interleave(CHUNK)
        for tensor in out:
            assert bool((tensor[owner[: len(tensor)] < 0] == POISON).all()), "blocks of nobody are left alone"
        return [LayerRows(*(tensor[owner[: len(tensor)] == i] for tensor in out)) for i in range(len(texts))]

    def gates(self):
        """Where a and b begin in a projection's row."""
        return self.channels, self.channels + self.shape[1]

    def wanted(self, x, a, b, window):
        heads, value_heads, key_width, value_width = self.shape
        p, n = self.parameters, len(x)
        y = reference.convolution(x.cpu(), window, p.weight.cpu(), list(range(-1, n - 1)))
        q, k, v = y.split([heads * key_width, heads * key_width, value_heads * value_width], 1)
        q = reference.l2_normalise(q.view(n, heads, key_width), key_width**-0.5)
        k = reference.l2_normalise(k.view(n, heads, key_width))
        gates = reference.gates(a.cpu(), b.cpu(), p.a_log.cpu(), p.dt_bias.cpu(), self.negative)
        return LayerRows(q, k, v.view(n, value_heads, value_width), *gates)


def close(got, want, tolerance):
    torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=max(tolerance * 1e-2, 5e-7))


def text_behind(layer, slot, tokens, empty):
    """A text behind a history of which `empty` entries are the zeros before it: what `run` takes, and its window."""
    before = layer.taps - 1
    history = [*[-1] * min(empty, before), *range(max(before - empty, 0))]
    for row in history:
        if row >= 0:
            layer.pool_x[slot, row] = layer.random(layer.channels, dtype=layer.dtype)
    window = torch.stack([layer.pool_x[slot, row].cpu().float() if row >= 0 else torch.zeros(layer.channels)
                          for row in history]) if history else torch.zeros(0, layer.channels)  # fmt: skip
    kept = list(range(POOL_ROWS - 1, POOL_ROWS - 1 - min(before, tokens), -1))
    return (slot, *layer.inputs(tokens), history, kept), window


def check(layer, texts, more=0):
    """Texts (tokens, empty) in one chunk, each in another slot."""
    made = [text_behind(layer, slot, *text) for slot, text in zip((2, 0, 1), texts, strict=False)]
    pool_before = layer.pool_x.clone()
    key_width = layer.shape[2]
    for out, ((slot, x, a, b, _, kept), window) in zip(layer.run([text for text, _ in made], more), made, strict=True):
        tokens, want = len(x), layer.wanted(x, a, b, window)
        for x_of_keys in (out.q, out.k):
            assert not x_of_keys[..., key_width:].any(), "columns past the width are zeros"
        out = out._replace(q=out.q[..., :key_width], k=out.k[..., :key_width])
        for name in ("q", "k", "v"):
            close(getattr(out, name)[:tokens], getattr(want, name), TOLERANCE[layer.dtype])
        close(out.g[:tokens], want.g, 1e-5)
        close(out.beta[:tokens], want.beta, 1e-5)
        assert not any(tensor[tokens:].any() for tensor in out), "rows past the last token are zeros"
        pool_before[slot, kept] = x[tokens - len(kept) :]
    assert torch.equal(layer.pool_x, pool_before), "the last raw inputs, in order, and nothing else"


@pytest.mark.parametrize(
    ("shape", "taps", "texts"),
    [
        ((2, 4, 16, 32), 4, [(21, 0)]),
        ((1, 1, 48, 16), 2, [(64, 1)]),
        ((1, 2, 16, 48), 4, [(2, 2), (65, 3), (1, 0)]),
        ((1, 2, 16, 16), 1, [(5, 0), (3, 0)]),
        ((2, 2, 16, 16), 7, [(33, 4)]),
        ((1, 2, 16, 16), 4, [(200, 1), (131, 2)]),  # programs between a text's first rows and its last
    ],
)
def test_rows_gates_and_pools_against_the_reference(shape, taps, texts, device):
    check(Layer(shape, taps, torch.float32, device, negative=taps == 2), texts, more=16 * (taps % 2))


@pytest.mark.parametrize(
    ("width", "dtype"), [(128, torch.float32), (256, torch.float32), (512, torch.float32), (64, torch.float16)]
)
def test_norms_of_wide_heads(width, dtype, device):
    check(Layer((1, 1, width, 16), 4, dtype, device), [(18, 2)])


def test_a_text_behind_a_text_or_beside_others_has_the_bits_of_one(device):
    layer = Layer((1, 2, 16, 16), 4, torch.float32, device)
    x, a, b = layer.inputs(40)
    merged, other = x._base, layer.inputs(70)
    parts = [
        tuple(part[:, first:last] for first, last in ((0, layer.channels), *((f, f + 2) for f in layer.gates())))
        for part in (merged[:23].clone(), merged[23:].clone())
    ]
    (whole,) = layer.run([(0, x, a, b, [-1, -1, -1], [0, 1, 2])])
    _, first = layer.run([(1, *other, [-1, -1, -1], [0, 1, 2]), (0, *parts[0], [-1, -1, -1], [5, 3, 4])])
    (second,) = layer.run([(0, *parts[1], [5, 3, 4], [0, 1, 2])])
    for name, want in whole._asdict().items():
        assert torch.equal(torch.cat([getattr(first, name)[:23], getattr(second, name)[:17]]), want[:40]), name


def test_the_same_formulas_as_for_trees(device):
    layer = Layer((1, 2, 16, 32), 4, torch.float32, device)
    x, a, b = layer.inputs(6)
    (out,) = layer.run([(0, x, a, b, [-1, -1, -1], [0, 1, 2])])
    pool = FactorPool.empty(1, POOL_ROWS, *layer.shape, torch.float32, device)
    batch = PassBatch(Bucket(sessions=1, rows=6, tree_rows=6), device)
    batch.fill([SessionPass(slot=0, topology=Topology.from_wire(range(-1, 4)), pool_rows=range(6))])
    tree = LayerRows.empty(6, *layer.shape, torch.float32, device)
    tree_convolution(x, a, b, layer.parameters, pool, batch, tree)
    for name, want in tree._asdict().items():
        torch.testing.assert_close(getattr(out, name)[:6], want, rtol=2e-6, atol=1e-7)


def test_what_does_not_fit_is_refused(device):
    layer = Layer((1, 1, 16, 16), 4, torch.float32, device)
    x, a, b = layer.inputs(CHUNK)
    out = LayerRows.empty(CHUNK, *layer.shape, torch.float32, device)

    def run(x=x, a=a, taps=4, rows=CHUNK, out=out):
        batch = ChunkInputs(2 * CHUNK, 1, taps, 0, device).batch.first(rows, 1)
        chunk_convolution(x, a, b, layer.parameters, layer.pool_x, batch, out)

    with pytest.raises(ValueError, match=r"history is torch.int32 \[1, 2\] .* give int32 \[1, 3\]"):
        run(taps=3)
    with pytest.raises(ValueError, match=r"tokens is torch.int32 \[128\] .* give int32 \[64\]"):
        run(rows=2 * CHUNK)
    with pytest.raises(ValueError, match="63 rows: give a multiple of 64"):
        run(out=LayerRows(*(tensor[:63] for tensor in out)))
    with pytest.raises(ValueError, match=r"x is .* give .* \[64, 48\]"):
        run(x=x[:60])
    with pytest.raises(ValueError, match="rows of a and b stand"):
        run(a=a.contiguous())
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        run(x=layer.random(CHUNK, 49)[:, :48])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 8, 256, 256), (16, 48, 128, 128), (4, 8, 64, 64), (3, 6, 96, 192)])
def test_all_shapes_on_the_device(shape, dtype, device):
    layer = Layer(shape, 4, dtype, device)
    check(layer, [(130, 1), (2, 3), (64, 0)], more=-shape[2] % 64)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 2, 256, 256), (2, 4, 128, 128), (1, 2, 64, 64), (1, 1, 512, 64)])
def test_bits_know_no_rows_of_a_program_nor_warps(shape, device, monkeypatch):
    found = []
    for rows, warps in ((1, 16), (64, 16), (1, 4), (32, 8)):
        monkeypatch.setattr(chunk_convolution_module, "_FEWEST_ROWS", max(rows, 16))
        monkeypatch.setattr(chunk_convolution_module, "_ELEMENTS", rows * max(shape[2:]))
        monkeypatch.setattr(chunk_convolution_module, "_WARPS", warps)
        layer = Layer(shape, 4, torch.bfloat16, device)
        found.append(layer.run([(0, *layer.inputs(200), [-1, -1, -1], [0, 1, 2])])[0])
    for other in found[1:]:
        assert all(torch.equal(*both) for both in zip(found[0], other, strict=True))
