"""The Gated DeltaNet language model: its prepared weights, what a tree pass returns, and prefill.

A block is x + mixer(norm(x)), then x + mlp(norm(x)). Tree passes (tree_pass.py) leave the sessions' state as it is and
return what a later commit needs (`PassFactors`); prefill advances the state itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from specla.kernels.chunked import chunk_gated_delta_rule
from specla.kernels.dense import DenseWeight, exact_linear
from specla.kernels.rowwise import GateParameters, gate_parameters, gates, rms_norm, silu
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import EMBEDDINGS, HEAD

Mode = Literal["exact", "fast"]
Kernels = Literal["compiled", "torch"]
Linear = Callable[[Tensor, DenseWeight], Tensor]

L2_EPS = torch.tensor(1e-6)  # of the normalisation of q and k, fixed in fla's kernels
SCAN_CHUNK = 32  # tokens of one triangular system of prefill; 64 and 16 are slower at T from 16 to 256 on a CPU


class LayerWeights(NamedTuple):
    """One block: projections merged, and the weight of each norm folded into the projection behind it.

    Outputs of `in_proj`: q, k and v, then a and b up to the width of the gates' bias, then the output gate.
    """

    in_proj: DenseWeight
    conv: Tensor  # [W, D]
    gates: GateParameters
    o_proj: DenseWeight
    gate_up: DenseWeight
    down: DenseWeight


@dataclass(frozen=True)
class TargetWeights:
    """The model, ready for passes."""

    config: GatedDeltaNetConfig
    mode: Mode
    kernels: Kernels
    embeddings: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: DenseWeight
    stream_eps: Tensor  # norm_eps * hidden_size, for `unit_rms`
    head_eps: Tensor  # norm_eps * V

    def dense_weights(self) -> list[DenseWeight]:
        """Every matrix that a pass multiplies with."""
        inner = [w for layer in self.layers for w in (layer.in_proj, layer.o_proj, layer.gate_up, layer.down)]
        return [*inner, self.head]


class PassFactors(Protocol):
    """What one pass's rows would do to states and windows; kept until the session runs again."""

    def apply(
        self,
        recurrent_state: Tensor,
        conv_state: Tensor,
        slots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Apply accepted paths of the pass to the stores, all layers at once.

        Args:
            recurrent_state: float32 [slots, L, HV, K, V], written at `slots`.
            conv_state: float32 [slots, W - 1, L, D], likewise.
            slots: a slot for each path, all different.
            paths: rows of the pass, root first, none empty.
        """


class TreePass(NamedTuple):
    """What a tree pass returns.

    logits: float32 [R, vocab], or None where they were not wanted.
    hidden: the residual stream after each layer, float32 [R, hidden] each, then the final norm's output, if wanted.
    """

    logits: Tensor | None
    hidden: list[Tensor]
    factors: PassFactors


def prepare(config: GatedDeltaNetConfig, tensors: Mapping[str, Tensor], mode: Mode, kernels: Kernels) -> TargetWeights:
    """Merge projections and lay the weights out for passes; `tensors` as `load_checkpoint` gives them."""
    layers = []
    for i in range(config.num_hidden_layers):
        layers.append(_prepare_layer(config, tensors, f"model.layers.{i}.", mode))
    embeddings = tensors[EMBEDDINGS].float()
    head = tensors[EMBEDDINGS if config.tie_word_embeddings else HEAD]
    norm = tensors["model.norm.weight"].float()
    return TargetWeights(
        config=config,
        mode=mode,
        kernels=kernels,
        embeddings=embeddings,
        layers=tuple(layers),
        norm=norm,
        head=_dense(head.float(), mode),
        stream_eps=torch.tensor(config.norm_eps * config.hidden_size),
        head_eps=torch.tensor(config.norm_eps * config.head_v_dim),
    )


def _dense(weight: Tensor, mode: Mode) -> DenseWeight:
    """Fast mode also keeps the plain layout, which is the faster one for a single row."""
    return DenseWeight(weight, keep_plain=mode == "fast")


def _prepare_layer(config: GatedDeltaNetConfig, tensors: Mapping[str, Tensor], prefix: str, mode: Mode) -> LayerWeights:
    def get(name: str) -> Tensor:
        return tensors[prefix + name]

    gate = gate_parameters(get("attn.A_log"), get("attn.dt_bias"), config.allow_neg_eigval)
    parts = [get(f"attn.{name}_proj.weight") for name in "qkvab"]
    padding = gate.bias.shape[0] - 2 * config.value_heads
    parts.append(parts[0].new_zeros(padding, config.hidden_size))
    if config.use_gate:
        parts.append(get("attn.g_proj.weight"))
    conv = torch.cat([get(f"attn.{name}_conv1d.weight") for name in "qkv"])  # [D, 1, W]
    gate_up = torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
    return LayerWeights(
        in_proj=_dense(_fold(torch.cat(parts), get("attn_norm.weight")), mode),
        conv=conv.squeeze(1).T.float().contiguous(),
        gates=gate,
        o_proj=_dense(_fold(get("attn.o_proj.weight"), get("attn.o_norm.weight")), mode),
        gate_up=_dense(_fold(gate_up, get("mlp_norm.weight")), mode),
        down=_dense(get("mlp.down_proj.weight").float(), mode),
    )


def _fold(projection: Tensor, norm: Tensor) -> Tensor:
    """The projection [out, in] behind `unit_rms` that equals the given one behind an RMS norm of this weight.

    The norm's weight [D] repeats along the inputs, a head at a time.
    """
    scale = norm.float() * math.sqrt(norm.shape[0])
    return projection.float() * scale.repeat(projection.shape[1] // norm.shape[0])


def unit_rms(x: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension: an RMS norm of epsilon eps / D, but for sqrt(D) and its weight.

    `eps` is a scalar tensor because PyTorch would turn a number into one at every call.
    """
    scale = (x * x).sum(-1, keepdim=True).add_(eps).rsqrt_()
    return x * scale


def prefill_chunk(
    weights: TargetWeights, tokens: Tensor, recurrent_state: Tensor, conv_state: Tensor, want_final_norm: bool
) -> list[Tensor]:
    """Run consecutive tokens of one session through the model, and advance its state and windows in place.

    Its bits depend on the tokens, on where the chunk ends and on the state before it, on nothing else.

    Args:
        weights: the model.
        tokens: int64 [T].
        recurrent_state: float32 [L, HV, K, V], written.
        conv_state: float32 [W - 1, L, D], written.
        want_final_norm: whether to add the final norm's output to the result.

    Returns:
        The residual stream after each layer, float32 [T, hidden] each, then, if wanted, the final norm's output.
    """
    config = weights.config
    T, hidden = tokens.shape[0], []
    x = weights.embeddings.index_select(0, tokens)  # [T, hidden]
    for layer, state, window in zip(weights.layers, recurrent_state, conv_state.unbind(1), strict=True):
        raw, ab, gate = projected(weights, layer, x, exact_linear)
        qk, v = _convolve_chunk(raw, window, layer.conv).split([2 * config.key_dim, config.value_dim], 1)
        qk = unit_rms(qk.view(1, T, 2, config.num_heads, config.head_dim), L2_EPS)
        g, beta = gates(ab, layer.gates)
        o, final_state = chunk_gated_delta_rule(
            qk[:, :, 0],
            qk[:, :, 1],
            v.view(1, T, config.value_heads, config.head_v_dim),
            g[None],
            beta[None],
            initial_state=state[None],
            chunk_size=SCAN_CHUNK,
        )
        state.copy_(final_state[0])
        x = x + exact_linear(mixer_output(weights, o[0], gate), layer.o_proj)
        x = x + mlp(weights, layer, x, exact_linear)
        hidden.append(x)
    if want_final_norm:
        hidden.append(rms_norm(x, weights.norm, config.norm_eps))
    return hidden


def projected(
    weights: TargetWeights, layer: LayerWeights, x: Tensor, linear: Linear
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Norm and project: raw convolution inputs [R, D], the gates' a and b [R, P], the output gate [R, HV V] if any."""
    config = weights.config
    projected = linear(unit_rms(x, weights.stream_eps), layer.in_proj)
    widths = [config.conv_dim, layer.gates.bias.shape[0]]
    if config.use_gate:
        raw, ab, gate = projected.split([*widths, config.value_dim], 1)
        return raw, ab, gate
    raw, ab = projected.split(widths, 1)
    return raw, ab, None


def mixer_output(weights: TargetWeights, o: Tensor, gate: Tensor | None) -> Tensor:
    """Norm the heads' outputs and gate them: [R, HV, V] to [R, HV * V]."""
    o = unit_rms(o, weights.head_eps).flatten(1)
    if gate is None:
        return o
    if weights.config.output_gate_activation == "sigmoid":
        return o / torch.exp(-gate).add_(1)
    return o.mul_(silu(gate))


def mlp(weights: TargetWeights, layer: LayerWeights, x: Tensor, linear: Linear) -> Tensor:
    """SwiGLU of the normed stream: [R, hidden] to [R, hidden]."""
    both = linear(unit_rms(x, weights.stream_eps), layer.gate_up)  # [R, 2 * mlp]
    gate, up = both.split(weights.config.mlp_dim, 1)
    return linear(silu(gate).mul_(up), layer.down)


def _convolve_chunk(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution and silu of T rows behind a window [W - 1, D], which is moved on to the last of them."""
    width, T = weight.shape[0], x.shape[0]
    inputs = torch.cat((window, x))  # [W - 1 + T, D]
    y = inputs[:T] * weight[0]
    for tap in range(1, width):
        y.addcmul_(inputs[tap : tap + T], weight[tap])
    window.copy_(inputs[T:])
    return silu(y)
