"""A chunk's kernels that overlap, cuBLAS's products between them: the bits of launches one after the other.

Layers feed each other, so that a kernel that reads too early is seen; graphs are replayed without a pause, so that what
a replay leaves is what the next one begins with.
"""

import pytest
import torch

from specla.kernels.gpu.chunk_batch import CHUNK, ChunkInputs, ChunkText
from specla.kernels.gpu.chunk_convolution import chunk_convolution
from specla.kernels.gpu.chunk_delta import ChunkWorkspace, chunk_delta_rule
from specla.kernels.gpu.chunk_swiglu import chunk_swiglu
from specla.kernels.gpu.convolution import ConvolutionParameters
from specla.kernels.gpu.embedding import embed
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.norms import add_rms_norm, gated_norm

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
TAPS, POOL_ROWS, LAYERS, VOCAB = 4, 6, 3, 50
TEXTS = 130, 64, 700


class Chunk:
    """Layers with random weights, and texts of which the first goes on and the others begin."""

    def __init__(self, heads, value_heads, key_width, value_width, device):
        self.generator = torch.Generator(device).manual_seed(value_width)
        self.device, self.heads, self.value_heads, self.value_width = device, heads, value_heads, value_width
        convolved, values = 2 * heads * key_width + value_heads * value_width, value_heads * value_width
        self.splits = [convolved, value_heads, value_heads, -2 * value_heads % 8, values]
        hidden, mlp = 256, 512
        rows = sum(-(-tokens // CHUNK) * CHUNK for tokens in TEXTS) + CHUNK
        self.table, self.norm = self.random(VOCAB, hidden), torch.ones(hidden, device=device)
        shapes = (sum(self.splits), hidden), (hidden, values), (2 * mlp, hidden), (hidden, mlp)
        self.matrices = [[self.random(*shape) * shape[1] ** -0.5 for shape in shapes] for _ in range(LAYERS)]
        self.parameters = ConvolutionParameters(
            self.random(TAPS, convolved).float(), self.random(value_heads).float(), self.random(value_heads).float()
        )
        self.inputs = ChunkInputs(rows, len(TEXTS), TAPS, 0, device)
        texts = [
            ChunkText(slot, [7 * i % VOCAB for i in range(tokens)], [-1] * 3 if slot else [2, 1, 0], [3, 4, 5], {})
            for slot, tokens in enumerate(TEXTS)
        ]
        self.inputs.put(texts, rows)
        self.stream = torch.zeros(rows, hidden, device=device)
        self.normed, self.added = (torch.zeros(rows, hidden, dtype=DTYPE, device=device) for _ in range(2))
        self.projected = torch.zeros(rows, sum(self.splits), dtype=DTYPE, device=device)
        self.rows = LayerRows.empty(rows, heads, value_heads, key_width, value_width, DTYPE, device)
        self.workspace = ChunkWorkspace.empty(rows, value_heads, DTYPE, device)
        self.o = torch.zeros(rows, value_heads, value_width, dtype=DTYPE, device=device)
        self.mixed = torch.zeros(rows, values, dtype=DTYPE, device=device)
        self.gate_up = torch.zeros(rows, 2 * mlp, dtype=DTYPE, device=device)
        self.activated = torch.zeros(rows, mlp, dtype=DTYPE, device=device)
        self.states = self.random(LAYERS, len(TEXTS), value_heads, key_width, value_width).float() * 0.1
        self.pools = self.random(LAYERS, len(TEXTS), POOL_ROWS, convolved)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.device).to(DTYPE)

    def launch(self, overlap):
        batch, eps = self.inputs.batch, 1e-6
        embed(batch.tokens, self.table, self.stream, batch.rows)
        for i, (inputs, output, gate_up, down) in enumerate(self.matrices):
            added = self.added if i else None
            add_rms_norm(self.stream, added, self.norm, eps, self.normed, batch.rows)
            torch.mm(self.normed, inputs.T, out=self.projected)
            x, a, b, _, gate = self.projected.split(self.splits, 1)
            chunk_convolution(x, a, b, self.parameters, self.pools[i], batch, self.rows, overlap=overlap)
            chunk_delta_rule(self.rows, self.states[i], batch, self.workspace, self.o, overlap=overlap)
            weight = self.norm[: self.value_width]
            gated_norm(self.o, gate, weight, eps, "silu", self.mixed, batch.rows, overlap=overlap)
            torch.mm(self.mixed, output.T, out=self.added)
            add_rms_norm(self.stream, self.added, self.norm, eps, self.normed, batch.rows)
            torch.mm(self.normed, gate_up.T, out=self.gate_up)
            chunk_swiglu(self.gate_up, self.activated, batch.rows)
            torch.mm(self.activated, down.T, out=self.added)
        add_rms_norm(self.stream, self.added, self.norm, eps, self.normed, batch.rows)

    def left(self):
        return [x.clone() for x in (self.states, self.pools, self.stream[: TEXTS[0]], self.normed[: TEXTS[0]])]


@pytest.mark.parametrize("shape", [(2, 4, 128, 128), (2, 2, 256, 256), (1, 2, 64, 128), (1, 1, 512, 256)])
def test_overlapping_chunks_have_the_same_bits(shape, device):
    apart, overlapping = Chunk(*shape, device), Chunk(*shape, device)
    begun = [x.clone() for x in (overlapping.states, overlapping.pools)]
    overlapping.launch(True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlapping.launch(True)
    for x, before in zip((overlapping.states, overlapping.pools), begun, strict=True):
        x.copy_(before)
    for replays in (1, 2, 4):
        for _ in range(replays):
            graph.replay()
        for _ in range(replays):
            apart.launch(False)
            torch.cuda.synchronize()
        for got, want in zip(overlapping.left(), apart.left(), strict=True):
            assert bool(got.isfinite().all())
            assert torch.equal(got, want), f"after {replays} more replays"
    assert not torch.equal(overlapping.states, begun[0])
