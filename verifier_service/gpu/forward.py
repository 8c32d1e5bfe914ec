"""The launches of one pass: all rows of a bucket through the model, to sampled tokens. Nothing here knows a session.

Every size that changes from pass to pass is data on the device, so the same launches, captured once, serve every pass
of a bucket. What a pass reads and writes has a fixed address: see `PassBuffers` and `GpuStore`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from specla.kernels.gpu.adjusting import adjust_logits
from specla.kernels.gpu.between_mixers import DenseRow, DenseWeights, MeetingPlace, between_mixers, why_apart
from specla.kernels.gpu.convolution import tree_convolution
from specla.kernels.gpu.embedding import embed
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import verify_factorised
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.norms import Activation, add_rms_norm, gated_norm
from specla.kernels.gpu.overlap import Admit
from specla.kernels.gpu.pass_batch import PassBatch
from specla.kernels.gpu.product import product, product_parts
from specla.kernels.gpu.sampling import sample
from specla.kernels.gpu.selector import Choice
from specla.kernels.gpu.serial import verify_serial
from specla.verifier_service.gpu.buffers import PassBuffers, SampledPart
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuLayer, GpuWeights, InputWidths

_FEW_ROWS = 64

Verify = Callable[[LayerRows, Tensor, FactorPool, PassBatch, Tensor], None]
"""(rows, states, pool, batch, o): a verification kernel for one layer, with its workspace or tile."""


def verify_of(choice: Choice, buffers: PassBuffers) -> Verify:
    """The kernel that a choice names, for launches that follow other kernels of the same pass."""
    if choice.kernel == "serial":
        return partial(verify_serial, workspace=buffers.workspace, overlap=True, admit="start")
    return partial(verify_factorised, tile=choice.tile, overlap=True, admit="start")


def run_rows(weights: GpuWeights, store: GpuStore, buffers: PassBuffers, verify: Verify) -> None:
    """From tokens to the final norm: `final` and `hidden` of the activations, and the rows' factors in the pools."""
    embed(buffers.tokens, weights.embeddings, buffers.activations.stream, buffers.counted, overlap=True)
    place = _meeting(weights, store, buffers)
    if place is None:
        _run_layers(weights, store, buffers, verify)
    else:
        _run_layers_of_one_row(weights, store, buffers, verify, place)


def _run_layers(weights: GpuWeights, store: GpuStore, buffers: PassBuffers, verify: Verify) -> None:
    x, rows, eps, admit = buffers.activations, buffers.counted, weights.config.norm_eps, _admit(buffers)
    admits = _ProductAdmits.of(buffers)
    added: Tensor | None = None
    for i, layer in enumerate(weights.layers):
        add_rms_norm(x.stream, added, layer.mixer_norm, eps, x.normed, rows, overlap=True, admit=admit)
        _keep(buffers, i - 1)
        product(x.normed, layer.inputs, x.inputs, rows, overlap=True, admit=admits.inputs)
        _mix(weights, layer, store.layer(i), buffers, verify)
        product(x.mixed, layer.output, x.from_mixer, rows, overlap=True, admit=admits.output)
        add_rms_norm(x.stream, x.from_mixer, layer.mlp_norm, eps, x.normed, rows, overlap=True, admit=admit)
        product(x.normed, layer.gate_up, x.activated, rows, swiglu=True, overlap=True, admit=admits.gate_up)
        product(x.activated, layer.down, x.from_mlp, rows, overlap=True, admit=admits.down)
        added = x.from_mlp
    add_rms_norm(x.stream, added, weights.norm, eps, x.final, rows, overlap=True, admit=admit)
    _keep(buffers, len(weights.layers) - 1)


def _run_layers_of_one_row(
    weights: GpuWeights, store: GpuStore, buffers: PassBuffers, verify: Verify, place: MeetingPlace
) -> None:
    """The same, bit for bit, in four launches a layer instead of nine."""
    x, rows, eps, first = buffers.activations, buffers.counted, weights.config.norm_eps, weights.layers[0]
    add_rms_norm(x.stream, None, first.mixer_norm, eps, x.normed, rows, overlap=True, admit=_admit(buffers))
    product(x.normed, first.inputs, x.inputs, rows, overlap=True)
    row = DenseRow(x.mixed, x.stream, x.from_mixer, x.from_mlp, x.activated, x.inputs, x.final)
    for i, layer in enumerate(weights.layers):
        _mix(weights, layer, store.layer(i), buffers, verify)
        between_mixers(row, _dense(weights, i), eps, rows, place, overlap=True)
        _keep(buffers, i)


def _dense(weights: GpuWeights, index: int) -> DenseWeights:
    """What lies between a layer's mixer and the next one, or the head."""
    layer = weights.layers[index]
    if index + 1 == len(weights.layers):
        norm, inputs = weights.norm, None
    else:
        norm, inputs = weights.layers[index + 1].mixer_norm, weights.layers[index + 1].inputs
    return DenseWeights(layer.output, layer.mlp_norm, layer.gate_up, layer.down, norm, inputs)


def why_one_row_apart(weights: GpuWeights, store: GpuStore) -> str | None:
    """Why passes of one row take separate launches; None if their programs meet."""
    if store.meeting is None:
        return "not a Hopper GPU, or not its default stream"
    dense = _dense(weights, 0)
    return why_apart(dense, (product_parts(*dense.output.shape), product_parts(*dense.down.shape)))


def _meeting(weights: GpuWeights, store: GpuStore, buffers: PassBuffers) -> MeetingPlace | None:
    """Where a pass of one row has its programs meet; None if it takes separate launches."""
    apart = buffers.bucket.rows > 1 or why_one_row_apart(weights, store) is not None
    return None if apart else store.meeting


def run_head(weights: GpuWeights, buffers: PassBuffers, part: SampledPart) -> None:
    """From the final norm to a part's logits."""
    product(buffers.activations.final[part.rows], weights.head, part.logits, part.counted, overlap=True)


def sample_rows(weights: GpuWeights, buffers: PassBuffers) -> None:
    """From the final norm to `buffers.sampled` and `buffers.errors`, part by part; biases and penalties change the
    logits in place."""
    for part in buffers.parts:
        run_head(weights, buffers, part)
        adjust_logits(part.logits, buffers.entries, part=part.rows, overlap=True)
        sample(part.logits, buffers.sampler, buffers.sampled, buffers.errors, part=part.rows, overlap=True)


def _admit(buffers: PassBuffers) -> Admit:
    """When a norm lets the product behind it begin: at once with few rows, whose product waits for weights most."""
    return "start" if buffers.bucket.rows <= _FEW_ROWS else "waited"


class _ProductAdmits(NamedTuple):
    """When each of a layer's products lets the kernel behind it begin."""

    inputs: Admit
    output: Admit
    gate_up: Admit
    down: Admit

    @classmethod
    def of(cls, buffers: PassBuffers) -> _ProductAdmits:
        """At once where that was measured to pay.

        Then nothing keeps the kernels of two layers apart but what they wait for. The serial kernels count before they
        wait, and two sets of counters take turns, so their passes need a product that waits in every layer.
        """
        rows, serial = buffers.bucket.rows, buffers.serial
        if 8 < rows <= 16 and serial:
            return cls("waited", "start", "start", "start")
        if 16 < rows <= 32 and not serial:
            return cls("start", "start", "waited", "start")
        every: Admit = "start" if 8 < rows <= _FEW_ROWS and not serial else "waited"
        return cls(every, every, every, every)


def _keep(buffers: PassBuffers, layer: int) -> None:
    """Keeps the stream as it stands after a layer, if somebody asks for it."""
    if layer in buffers.layers:
        buffers.activations.hidden[buffers.layers.index(layer)].copy_(buffers.activations.stream)


def _mix(
    weights: GpuWeights, layer: GpuLayer, memory: tuple[Tensor, FactorPool], buffers: PassBuffers, verify: Verify
) -> None:
    """A layer's recurrence: from its projected inputs to its outputs, normed and gated."""
    (states, pool), x, config = memory, buffers.activations, weights.config
    raw, a, b, gate = InputWidths.of(config).split(x.inputs)
    tree_convolution(raw, a, b, layer.convolution, pool, buffers.batch, x.rows, overlap=True, admit="start")
    verify(x.rows, states, pool, buffers.batch, x.o)
    activation: Activation = "sigmoid" if config.output_gate_activation == "sigmoid" else "silu"
    gated_norm(
        x.o, gate, layer.output_norm, config.norm_eps, activation, x.mixed, buffers.counted, overlap=True, admit="start"
    )
