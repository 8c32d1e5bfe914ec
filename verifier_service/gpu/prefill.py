"""Prefill on a GPU: consecutive tokens of prompts through the model, in launches made for many rows.

A layer's products are plain matrix products; between them run the chunked forms of convolution and recurrence. The
slots' states are written in place, and the last raw inputs of the convolutions go to their pools. On a GPU the launches
are captured for a few numbers of rows; what is run takes the least that holds it, and rows behind a text's tokens touch
nothing. So what a chunk computes depends on the slot's text and on the chunk alone: where products do not depend on the
number of rows, which is proved on the device, chunks of several sessions go through together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from specla.kernels.gpu.chunk_batch import CHUNK, ChunkBatch, ChunkInputs, ChunkText
from specla.kernels.gpu.chunk_convolution import chunk_convolution
from specla.kernels.gpu.chunk_delta import chunk_delta_rule
from specla.kernels.gpu.chunk_swiglu import chunk_swiglu
from specla.kernels.gpu.embedding import embed
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.keep_rows import keep_rows
from specla.kernels.gpu.norms import Activation, add_rms_norm, gated_norm
from specla.verifier_service.backend import Chunk
from specla.verifier_service.features import FINAL_NORM
from specla.verifier_service.gpu.arena import Layout
from specla.verifier_service.gpu.capture import captured
from specla.verifier_service.gpu.chunk_buffers import ChunkBuffers, filled
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuLayer, GpuWeights, InputWidths

_FEWEST_ROWS = 192
"""With fewer, which take as long, cuBLAS sums a product in another order."""


def chunk_sizes(most: int) -> list[int]:
    """Rows that chunks of up to `most` tokens are captured for: what holds `most`, and 3, 4, 6, 8, 12, 16, 24 ...
    blocks, so that above the least a third of a chunk is empty at the most."""
    largest, sizes = filled(most), []
    for power in range((largest // _FEWEST_ROWS).bit_length()):
        sizes += [_FEWEST_ROWS << power, _FEWEST_ROWS * 4 // 3 << power]
    return [*(size for size in sizes if size < largest), largest]


MOST_TEXTS = 16
"""Chunks of so many sessions may go together."""

log = structlog.get_logger("specla.verifier")


class ChunkKey(NamedTuple):
    """What one captured graph serves."""

    rows: int
    texts: int
    keeps: bool
    """Whether streams are kept for the host. Else the launches end with the last layer's state."""


class LaunchedChunks(NamedTuple):
    """See `RunningChunks`."""

    streams: list[list[Tensor]]
    """In pinned memory, not written before `done`."""
    done: torch.cuda.Event | None

    def wait(self) -> list[list[Tensor]]:
        """Until they have run."""
        if self.done is not None:
            self.done.synchronize()
        return self.streams


class Prefill:
    """Runs chunks of prompts.

    Attributes:
        chunk: tokens of one chunk at the most.
        sizes: rows that chunks are captured for.
    """

    def __init__(self, weights: GpuWeights, store: GpuStore, chunk: int, memory: Tensor, pool: Any) -> None:
        """For chunks of up to `chunk` tokens.

        Args:
            weights: the model.
            store: the sessions' memory.
            chunk: tokens of one chunk at the most, and of several that go together.
            memory: uint8 [bytes], `prefill_bytes` of them; only used while a chunk runs.
            pool: handle of the memory that graphs take while they are captured; None where there are none.
        """
        self._weights, self._store, self.chunk, self._pool = weights, store, chunk, pool
        config, rows = weights.config, filled(chunk)
        self._buffers = ChunkBuffers.of(config, rows, weights.dtype, Layout(memory))
        self._inputs = ChunkInputs(rows, MOST_TEXTS, config.conv_size, config.num_hidden_layers + 1, weights.device)
        self.sizes = chunk_sizes(chunk)
        self._graphs: dict[ChunkKey, torch.cuda.CUDAGraph] = {}

    @cached_property
    def shared(self) -> bool:
        """Whether chunks of several sessions go through together."""
        same = products_know_no_company(self._weights, self.sizes)
        if not same:
            log.info("chunks_go_alone", reason="the bits of a product's row depend on the number of rows here")
        return same

    def goes_together(self, tokens: Sequence[int]) -> bool:
        """Whether chunks of so many tokens may run in one call, each with the bits that it has alone."""
        few = len(tokens) <= MOST_TEXTS and sum(map(filled, tokens)) <= self.sizes[-1]
        return len(tokens) == 1 or (few and self.shared)

    def run(self, chunks: Sequence[Chunk]) -> LaunchedChunks:
        """Appends tokens to slots' texts, all of them or, where something fails on the way, none.

        Args:
            chunks: one, or several that go together, each of another slot.

        Raises:
            ValueError: a chunk without tokens, or too many.
        """
        for chunk in chunks:
            if not 0 < len(chunk.tokens) <= self.chunk:
                raise ValueError(f"{len(chunk.tokens)} tokens in a chunk: give 1 to {self.chunk}")
        key = self._key([len(chunk.tokens) for chunk in chunks], keeps=any(chunk.layers for chunk in chunks))
        self._prepare(key)
        self._store.write_states([chunk.slot for chunk in chunks])
        streams = [self._streams(chunk) for chunk in chunks]
        texts = [self._text(*both) for both in zip(chunks, streams, strict=True)]
        self._inputs.put(texts, key.rows)
        done = None
        if key in self._graphs:
            self._graphs[key].replay()
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._weights.device))
        else:
            self._launch(key)
        for text in texts:
            rows = self._store.rows[text.slot]
            rows.accept(text.kept, state_written=True)
            rows.flushed()  # their factors are in the state already
        return LaunchedChunks(streams, done)

    def _streams(self, chunk: Chunk) -> list[Tensor]:
        """Where its layers' streams go."""
        shape = (len(chunk.tokens), self._weights.config.hidden_size)
        return [torch.empty(shape, pin_memory=self._weights.device.type == "cuda") for _ in chunk.layers]

    def _text(self, chunk: Chunk, streams: Sequence[Tensor]) -> ChunkText:
        """A chunk as the device is told of it."""
        config, rows = self._weights.config, self._store.rows[chunk.slot]
        history, kept = rows.history, rows.take(min(config.conv_size - 1, len(chunk.tokens)))
        numbers = [config.num_hidden_layers if layer == FINAL_NORM else layer for layer in chunk.layers]
        wanted = {number: x.data_ptr() for number, x in zip(numbers, streams, strict=True)}
        return ChunkText(chunk.slot, chunk.tokens, history, kept, wanted)

    def prepare(self, tokens: int) -> None:
        """Compiles and captures what chunks of so many tokens need, if nobody asks for streams."""
        for texts in (1, MOST_TEXTS) if self.shared else (1,):
            self._prepare(self._key([tokens], keeps=False)._replace(texts=texts))

    def _prepare(self, key: ChunkKey) -> None:
        """Over an empty chunk: nothing of any session changes."""
        if self._weights.device.type != "cuda" or key in self._graphs:
            return
        self._inputs.put([], key.rows)
        self._launch(key)  # compiles
        self._graphs[key] = captured(partial(self._launch, key), self._pool)

    def _key(self, tokens: Sequence[int], *, keeps: bool) -> ChunkKey:
        total = sum(map(filled, tokens))
        rows = next(size for size in self.sizes if size >= total)
        return ChunkKey(rows, 1 if len(tokens) == 1 else MOST_TEXTS, keeps)

    def _launch(self, key: ChunkKey) -> None:
        """All launches, to where nothing more is wanted. Those of the recurrence begin while the one before ends."""
        weights, buffers, streams = self._weights, self._buffers.first(key.rows), self._inputs.streams[:, : key.texts]
        batch, eps, last = (
            self._inputs.batch.first(key.rows, key.texts),
            weights.config.norm_eps,
            len(weights.layers) - 1,
        )
        stream, normed, added = buffers.stream, buffers.normed, None
        embed(batch.tokens, weights.embeddings, stream, batch.rows)
        for i, layer in enumerate(weights.layers):
            add_rms_norm(stream, added, layer.mixer_norm, eps, normed, batch.rows)
            if i and key.keeps:
                keep_rows(stream, streams[i - 1], batch)
            states, pool = self._store.layer(i)
            _recurrence(weights, layer, states, pool, batch, buffers)
            if i == last and not key.keeps:
                return
            _mixer_output(weights, layer, batch, buffers)
            add_rms_norm(stream, buffers.added, layer.mlp_norm, eps, normed, batch.rows)
            torch.mm(normed, layer.gate_up.T, out=buffers.gate_up)
            chunk_swiglu(buffers.gate_up, buffers.activated, batch.rows)
            torch.mm(buffers.activated, layer.down.T, out=buffers.added)
            added = buffers.added
        add_rms_norm(stream, added, weights.norm, eps, normed, batch.rows)
        keep_rows(stream, streams[last], batch)
        keep_rows(normed, streams[last + 1], batch)


def products_know_no_company(weights: GpuWeights, sizes: Sequence[int]) -> bool:
    """Whether a row of each of a layer's products has the same bits in every size and place: tried on random rows."""
    most, device, layer = sizes[-1], weights.device, weights.layers[0]
    for matrix in (layer.inputs, layer.output, layer.gate_up, layer.down):
        random = torch.Generator(device).manual_seed(0)
        x = torch.randn(most, matrix.shape[1], device=device, generator=random).to(matrix.dtype)
        whole = torch.mm(x, matrix.T)
        for size in sizes:
            if not torch.equal(torch.mm(x[-size:], matrix.T), whole[-size:]):
                return False
        if not torch.equal(torch.mm(x.roll(CHUNK, 0), matrix.T), whole.roll(CHUNK, 0)):
            return False
    return True


def _recurrence(
    weights: GpuWeights, layer: GpuLayer, states: Tensor, pool: FactorPool, batch: ChunkBatch, buffers: ChunkBuffers
) -> None:
    """From the normed stream to the recurrence's outputs; the slot's state and raw inputs advance."""
    torch.mm(buffers.normed, layer.inputs.T, out=buffers.inputs)
    x, a, b, _ = InputWidths.of(weights.config).split(buffers.inputs)
    chunk_convolution(x, a, b, layer.convolution, pool.x, batch, buffers.rows, overlap=True)
    chunk_delta_rule(buffers.rows, states, batch, buffers.workspace, buffers.o, overlap=True)


def _mixer_output(weights: GpuWeights, layer: GpuLayer, batch: ChunkBatch, buffers: ChunkBuffers) -> None:
    """From the recurrence's outputs to what is added to the stream."""
    config = weights.config
    gate = InputWidths.of(config).split(buffers.inputs)[3]
    activation: Activation = "sigmoid" if config.output_gate_activation == "sigmoid" else "silu"
    gated_norm(buffers.o, gate, layer.output_norm, config.norm_eps, activation, buffers.mixed, batch.rows, overlap=True)
    torch.mm(buffers.mixed, layer.output.T, out=buffers.added)
