"""What the launches of a chunk of prompts write on the way: activations that lie in the passes' arena."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specla.kernels.gpu.chunk_batch import CHUNK
from specla.kernels.gpu.chunk_delta import ChunkWorkspace, key_pitch
from specla.kernels.gpu.layer_rows import LayerRows
from specla.verifier_service.gpu.arena import Layout
from specla.verifier_service.gpu.weights import InputWidths
from specla.verifier_service.targets.config import GatedDeltaNetConfig


def filled(tokens: int) -> int:
    """Rows of the blocks that hold so many tokens."""
    return -(-tokens // CHUNK) * CHUNK


class ChunkBuffers(NamedTuple):
    """Activations of a chunk of R rows, a multiple of `CHUNK`, shared by all layers and sessions.

    The mixer's, from `inputs` to `mixed`, lie where the MLP's lie: no layer needs both at once.
    """

    stream: Tensor
    """float32 [R, hidden], the residual stream."""
    normed: Tensor
    """model dtype [R, hidden], what goes into a projection."""
    added: Tensor
    """model dtype [R, hidden], what a half of a block adds to the stream."""
    inputs: Tensor
    """model dtype [R, ...], the mixer's projections (see `InputWidths`)."""
    rows: LayerRows
    workspace: ChunkWorkspace
    o: Tensor
    """model dtype [R, HV, V], the recurrence's outputs."""
    mixed: Tensor
    """model dtype [R, HV V], normed and gated."""
    gate_up: Tensor
    """model dtype [R, 2 M]."""
    activated: Tensor
    """model dtype [R, M]."""

    @classmethod
    def of(cls, config: GatedDeltaNetConfig, rows: int, dtype: torch.dtype, layout: Layout) -> ChunkBuffers:
        """Uninitialised, for so many rows, from a layout's memory."""
        heads, value_heads, hidden = config.num_heads, config.value_heads, config.hidden_size

        def take(*width: int, of: torch.dtype = dtype) -> Tensor:
            return layout.take(rows, *width, dtype=of)

        stream, normed, added = take(hidden, of=torch.float32), take(hidden), take(hidden)
        mlp = layout.beside()
        inputs = take(InputWidths.of(config).total)
        pitch = key_pitch(config.head_dim, dtype)
        of_layer = LayerRows.empty(rows, heads, value_heads, pitch, config.head_v_dim, dtype, "meta")
        workspace = ChunkWorkspace.empty(rows, value_heads, dtype, "meta")
        gate_up, activated = (mlp.take(rows, width, dtype=dtype) for width in (2 * config.mlp_dim, config.mlp_dim))
        buffers = cls(
            stream=stream,
            normed=normed,
            added=added,
            inputs=inputs,
            rows=LayerRows(*(layout.take(*x.shape, dtype=x.dtype) for x in of_layer)),
            workspace=ChunkWorkspace(*(layout.take(*x.shape, dtype=x.dtype) for x in workspace)),
            o=take(value_heads, config.head_v_dim),
            mixed=take(config.value_dim),
            gate_up=gate_up,
            activated=activated,
        )
        layout.nbytes = max(layout.nbytes, mlp.nbytes)
        return buffers

    def first(self, rows: int) -> ChunkBuffers:
        """The same for fewer rows."""
        return ChunkBuffers(
            stream=self.stream[:rows],
            normed=self.normed[:rows],
            added=self.added[:rows],
            inputs=self.inputs[:rows],
            rows=LayerRows(*(x[:rows] for x in self.rows)),
            workspace=self.workspace,
            o=self.o[:rows],
            mixed=self.mixed[:rows],
            gate_up=self.gate_up[:rows],
            activated=self.activated[:rows],
        )


def prefill_bytes(config: GatedDeltaNetConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the buffers for chunks of up to so many tokens, whatever the number of sessions."""
    layout = Layout(None)
    ChunkBuffers.of(config, filled(tokens), dtype, layout)
    return layout.nbytes
