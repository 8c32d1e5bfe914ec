"""The launches of one pass: all rows of a bucket through the model, to sampled tokens. Nothing here knows a session.

Every size that changes from pass to pass is data on the device, so the same launches, captured once, serve every pass
of a bucket. What a pass reads and writes has a fixed address: see `PassBuffers` and `GpuStore`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specla.kernels.gpu.adjusting import adjust_logits
from specla.kernels.gpu.convolution import tree_convolution
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import verify_factorised
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.norms import Activation, add_rms_norm, gated_norm
from specla.kernels.gpu.pass_batch import PassBatch
from specla.kernels.gpu.product import product
from specla.kernels.gpu.sampling import sample
from specla.kernels.gpu.selector import Choice
from specla.kernels.gpu.serial import verify_serial
from specla.verifier_service.gpu.buffers import PassBuffers
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuLayer, GpuWeights, InputWidths

Verify = Callable[[LayerRows, Tensor, FactorPool, PassBatch, Tensor], None]
"""(rows, states, pool, batch, o): a verification kernel for one layer, with its workspace or tile."""


def verify_of(choice: Choice, buffers: PassBuffers) -> Verify:
    """The kernel that a choice names, for launches that follow other kernels of the same pass."""
    if choice.kernel == "serial":
        return partial(verify_serial, workspace=buffers.workspace, overlap=True)
    return partial(verify_factorised, tile=choice.tile, overlap=True)


def run_rows(weights: GpuWeights, store: GpuStore, buffers: PassBuffers, verify: Verify) -> None:
    """From tokens to the final norm: `buffers.final`, `buffers.hidden`, and the rows' factors in the pools."""
    rows, eps, stream, added = _rows(buffers), weights.config.norm_eps, buffers.stream, None
    torch.index_select(weights.embeddings, 0, buffers.tokens, out=buffers.normed)
    stream.copy_(buffers.normed)
    for i, layer in enumerate(weights.layers):
        add_rms_norm(stream, added, layer.mixer_norm, eps, buffers.normed, rows)
        if i and buffers.hidden is not None:
            buffers.hidden[i - 1].copy_(stream)
        _mixer(weights, layer, store.layer(i), buffers, verify)
        add_rms_norm(stream, buffers.from_mixer, layer.mlp_norm, eps, buffers.normed, rows)
        product(buffers.normed, layer.gate_up, buffers.activated, rows, swiglu=True)
        product(buffers.activated, layer.down, buffers.from_mlp, rows)
        added = buffers.from_mlp
    add_rms_norm(stream, added, weights.norm, eps, buffers.final, rows)
    if buffers.hidden is not None:
        buffers.hidden[-1].copy_(stream)


def run_head(weights: GpuWeights, buffers: PassBuffers) -> None:
    """From the final norm to `buffers.logits`."""
    product(buffers.final, weights.head, buffers.logits, _rows(buffers))


def adjust_and_sample(buffers: PassBuffers) -> None:
    """From logits to `buffers.sampled` and `buffers.errors`; biases and penalties change the logits in place."""
    adjust_logits(buffers.logits, buffers.entries)
    sample(buffers.logits, buffers.sampler, buffers.sampled, buffers.errors)


def _mixer(
    weights: GpuWeights, layer: GpuLayer, memory: tuple[Tensor, FactorPool], buffers: PassBuffers, verify: Verify
) -> None:
    """A layer's recurrence: the normed stream in, what it adds out."""
    (states, pool), rows = memory, _rows(buffers)
    product(buffers.normed, layer.inputs, buffers.inputs, rows)
    x, a, b, gate = InputWidths.of(weights.config).split(buffers.inputs)
    tree_convolution(x, a, b, layer.convolution, pool, buffers.batch, buffers.rows)
    verify(buffers.rows, states, pool, buffers.batch, buffers.o)
    activation: Activation = "sigmoid" if weights.config.output_gate_activation == "sigmoid" else "silu"
    gated_norm(buffers.o, gate, layer.output_norm, weights.config.norm_eps, activation, buffers.mixed, rows)
    product(buffers.mixed, layer.output, buffers.from_mixer, rows)


def _rows(buffers: PassBuffers) -> Tensor:
    """int32 [1], how many rows count."""
    return buffers.batch.row_start[-1:]
