"""Prefill on a GPU: consecutive tokens of one prompt through the model, in launches made for many rows.

A layer's products are plain matrix products; between them run the chunked forms of convolution and recurrence. The
slot's state is written in place, and the last raw inputs of the convolutions go to its pool. What a chunk computes
depends on the slot's text and on the chunk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.kernels.gpu.chunk_convolution import chunk_convolution
from specla.kernels.gpu.chunk_delta import CHUNK, ChunkWorkspace, chunk_delta_rule, key_pitch
from specla.kernels.gpu.chunk_swiglu import chunk_swiglu
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.norms import Activation, add_rms_norm, gated_norm
from specla.kernels.gpu.upload import Upload
from specla.verifier_service.features import FINAL_NORM
from specla.verifier_service.gpu.arena import Layout
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuLayer, GpuWeights, InputWidths
from specla.verifier_service.targets.config import GatedDeltaNetConfig


class ChunkBuffers(NamedTuple):
    """Activations of a chunk of up to T tokens, shared by all layers and sessions; T is a multiple of the recurrence's.

    The mixer's, from `inputs` to `mixed`, lie where the MLP's lie: no layer needs both at once.
    """

    stream: Tensor
    """float32 [T, hidden], the residual stream."""
    normed: Tensor
    """model dtype [T, hidden], what goes into a projection."""
    added: Tensor
    """model dtype [T, hidden], what a half of a block adds to the stream."""
    inputs: Tensor
    """model dtype [T, ...], the mixer's projections (see `InputWidths`)."""
    rows: LayerRows
    workspace: ChunkWorkspace
    o: Tensor
    """model dtype [T, HV, V], the recurrence's outputs."""
    mixed: Tensor
    """model dtype [T, HV V], normed and gated."""
    gate_up: Tensor
    """model dtype [T, 2 M]."""
    activated: Tensor
    """model dtype [T, M]."""

    @classmethod
    def of(cls, config: GatedDeltaNetConfig, tokens: int, dtype: torch.dtype, layout: Layout) -> ChunkBuffers:
        """Uninitialised, for so many tokens, from a layout's memory."""
        heads, value_heads, hidden = config.num_heads, config.value_heads, config.hidden_size
        filled = _filled(tokens)

        def take(*width: int, of: torch.dtype = dtype) -> Tensor:
            return layout.take(filled, *width, dtype=of)

        stream, normed, added = take(hidden, of=torch.float32), take(hidden), take(hidden)
        mlp = layout.beside()
        inputs = take(InputWidths.of(config).total)
        pitch = key_pitch(config.head_dim, dtype)
        rows = LayerRows.empty(filled, heads, value_heads, pitch, config.head_v_dim, dtype, "meta")
        workspace = ChunkWorkspace.empty(filled, value_heads, dtype, "meta")
        gate_up, activated = (mlp.take(filled, width, dtype=dtype) for width in (2 * config.mlp_dim, config.mlp_dim))
        buffers = cls(
            stream=stream,
            normed=normed,
            added=added,
            inputs=inputs,
            rows=LayerRows(*(layout.take(*x.shape, dtype=x.dtype) for x in rows)),
            workspace=ChunkWorkspace(*(layout.take(*x.shape, dtype=x.dtype) for x in workspace)),
            o=take(value_heads, config.head_v_dim),
            mixed=take(config.value_dim),
            gate_up=gate_up,
            activated=activated,
        )
        layout.nbytes = max(layout.nbytes, mlp.nbytes)
        return buffers

    def first(self, tokens: int) -> ChunkBuffers:
        """The same for fewer tokens, of any number; what the recurrence takes stays filled up to its multiple."""
        filled = _filled(tokens)
        return ChunkBuffers(
            stream=self.stream[:tokens],
            normed=self.normed[:tokens],
            added=self.added[:tokens],
            inputs=self.inputs[:tokens],
            rows=LayerRows(*(x[:filled] for x in self.rows)),
            workspace=self.workspace,
            o=self.o[:filled],
            mixed=self.mixed[:tokens],
            gate_up=self.gate_up[:tokens],
            activated=self.activated[:tokens],
        )


def prefill_bytes(config: GatedDeltaNetConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the buffers for chunks of up to so many tokens, whatever the number of sessions."""
    layout = Layout(None)
    ChunkBuffers.of(config, tokens, dtype, layout)
    return layout.nbytes


class Prefill:
    """Runs chunks of prompts."""

    def __init__(self, weights: GpuWeights, store: GpuStore, chunk: int, memory: Tensor) -> None:
        """For chunks of up to `chunk` tokens.

        Args:
            weights: the model.
            store: the sessions' memory.
            chunk: tokens of one chunk at the most.
            memory: uint8 [bytes], `prefill_bytes` of them; only used while a chunk runs.
        """
        self._weights, self._store, self.chunk = weights, store, chunk
        self._buffers = ChunkBuffers.of(weights.config, chunk, weights.dtype, Layout(memory))
        self._history = weights.config.conv_size - 1
        self._upload = Upload(Upload.room(chunk, self._history, self._history, 1), weights.device)
        self._parts = [
            Upload(words, weights.device, within=self._upload) for words in (chunk, self._history, self._history, 1)
        ]

    def run(self, slot: int, tokens: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
        """Appends tokens to a slot's text.

        Args:
            slot: whose state and windows advance.
            tokens: at least one, `chunk` at most.
            layers: whose streams are wanted; FINAL_NORM for the final norm's output.

        Returns:
            For each of `layers`, float32 [T, hidden] on the CPU.

        Raises:
            ValueError: no token, or too many.
        """
        if not 0 < len(tokens) <= self.chunk:
            raise ValueError(f"{len(tokens)} tokens in a chunk: give 1 to {self.chunk}")
        self._store.write_states([slot])
        rows = self._store.rows[slot]
        kept = rows.take(min(self._history, len(tokens)))
        for part, words in zip(self._parts, (tokens, rows.history, kept, [len(tokens)]), strict=True):
            part.words()[: len(words)] = words
        self._upload.send()
        streams = self._run_layers(slot, len(tokens), len(kept), layers)
        rows.accept(kept, state_written=True)
        rows.flushed()  # their factors are in the state already
        if layers and self._weights.device.type == "cuda":
            torch.cuda.current_stream(self._weights.device).synchronize()
        return [streams[layer].float() for layer in layers]

    def _run_layers(self, slot: int, tokens: int, kept: int, layers: Sequence[int]) -> dict[int, Tensor]:
        """The launches; streams on their way to the host. Ends where nothing more is wanted."""
        weights, buffers, streams = self._weights, self._buffers.first(tokens), dict[int, Tensor]()
        eps, stream, normed, last = weights.config.norm_eps, buffers.stream, buffers.normed, len(weights.layers) - 1
        ids, history, places, count = (part.buffer for part in self._parts)
        torch.index_select(weights.embeddings, 0, ids[:tokens], out=normed)
        stream.copy_(normed)
        added = None
        for i, layer in enumerate(weights.layers):
            add_rms_norm(stream, added, layer.mixer_norm, eps, normed, count)
            if i - 1 in layers and i:
                streams[i - 1] = _to_host(stream)
            states, pool = self._store.layer(i)
            _recurrence(weights, layer, states[slot], pool.x[slot], history, places[:kept], buffers)
            if i == last and last not in layers and FINAL_NORM not in layers:
                return streams
            _mixer_output(weights, layer, count, buffers)
            add_rms_norm(stream, buffers.added, layer.mlp_norm, eps, normed, count)
            torch.mm(normed, layer.gate_up.T, out=buffers.gate_up)
            chunk_swiglu(buffers.gate_up, buffers.activated)
            torch.mm(buffers.activated, layer.down.T, out=buffers.added)
            added = buffers.added
        add_rms_norm(stream, added, weights.norm, eps, normed, count)
        for layer_index, source in ((last, stream), (FINAL_NORM, normed)):
            if layer_index in layers:
                streams[layer_index] = _to_host(source)
        return streams


def _recurrence(
    weights: GpuWeights,
    layer: GpuLayer,
    state: Tensor,
    pool_x: Tensor,
    history: Tensor,
    kept: Tensor,
    buffers: ChunkBuffers,
) -> None:
    """From the normed stream to the recurrence's outputs; the slot's state and raw inputs advance."""
    torch.mm(buffers.normed, layer.inputs.T, out=buffers.inputs)
    x, a, b, _ = InputWidths.of(weights.config).split(buffers.inputs)
    chunk_convolution(x, a, b, layer.convolution, pool_x, history, kept, buffers.rows)
    chunk_delta_rule(buffers.rows, state, buffers.workspace, buffers.o)


def _mixer_output(weights: GpuWeights, layer: GpuLayer, count: Tensor, buffers: ChunkBuffers) -> None:
    """From the recurrence's outputs to what is added to the stream."""
    config = weights.config
    gate = InputWidths.of(config).split(buffers.inputs)[3]
    activation: Activation = "sigmoid" if config.output_gate_activation == "sigmoid" else "silu"
    o = buffers.o[: len(buffers.mixed)]
    gated_norm(o, gate, layer.output_norm, config.norm_eps, activation, buffers.mixed, count)
    torch.mm(buffers.mixed, layer.output.T, out=buffers.added)


def _to_host(source: Tensor) -> Tensor:
    """A copy on the CPU, which may still be under way on a GPU's stream."""
    if source.device.type != "cuda":
        return source.clone()
    out = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return out.copy_(source, non_blocking=True)


def _filled(tokens: int) -> int:
    return -(-tokens // CHUNK) * CHUNK
