"""The Gated DeltaNet language model over prepared weights: one function for tree passes, one for prefill.

A block is x + mixer(norm(x)), then x + mlp(norm(x)). Tree passes leave the sessions' state as it is and return what a
later commit needs (`PassFactors`); prefill advances the state itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specla.kernels.chunked import chunk_gated_delta_rule
from specla.kernels.commit import Factors, commit_exact, commit_fast
from specla.kernels.convolution import tree_convolution
from specla.kernels.dense import DenseWeight, exact_linear, fast_linear
from specla.kernels.factorised import verify_fast
from specla.kernels.gated_delta import verify_exact
from specla.kernels.rowwise import GateParameters, gate_parameters, gates, l2_normalise, rms_norm, silu
from specla.kernels.tree import TreeBatch
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import EMBEDDINGS, HEAD

Mode = Literal["exact", "fast"]
Linear = Callable[[Tensor, DenseWeight], Tensor]

L2_EPS = 1e-6  # of the normalisation of q and k, fixed in fla's kernels
SCAN_CHUNK = 32  # tokens of one triangular system of prefill; 64 and 16 are slower at T from 16 to 256 on a CPU


class LayerWeights(NamedTuple):
    """One block, its projections merged.

    Columns of `in_proj`: q, k, v, then a and b up to the width of the gates' bias, then the output gate.
    """

    attn_norm: Tensor
    in_proj: DenseWeight
    conv: Tensor  # [W, D]
    gates: GateParameters
    o_norm: Tensor
    o_proj: DenseWeight
    mlp_norm: Tensor
    gate_up: DenseWeight
    down: DenseWeight


@dataclass(frozen=True)
class TargetWeights:
    """The model, ready for passes."""

    config: GatedDeltaNetConfig
    mode: Mode
    embeddings: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: DenseWeight

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights; fast mode holds its matrices twice (see `DenseWeight`)."""
        small = [x for layer in self.layers for x in (layer.attn_norm, layer.conv, layer.o_norm, layer.mlp_norm)]
        numbers = sum(w.out_features * w.in_features for w in self.dense_weights())
        copies = 2 if self.mode == "fast" else 1
        return sum(x.nbytes for x in (self.embeddings, self.norm, *small)) + 4 * copies * numbers

    def dense_weights(self) -> list[DenseWeight]:
        """Every matrix that a pass multiplies with."""
        inner = [w for layer in self.layers for w in (layer.in_proj, layer.o_proj, layer.gate_up, layer.down)]
        return [*inner, self.head]


@dataclass(frozen=True)
class PassFactors:
    """What one pass's R rows would do to state and windows, a list entry a layer."""

    k: list[Tensor]  # [R, H, K]
    u: list[Tensor]  # [R, HV, V]
    g: list[Tensor]  # [R, HV]
    conv_inputs: list[Tensor]  # [B (W - 1) + R, D]

    @cached_property
    def factors(self) -> Factors:
        """All layers' factors side by side, layer l's heads from l * H (l * HV) on, so that one commit serves all."""
        return Factors(*(torch.stack(x, 1).flatten(1, 2) for x in (self.k, self.u, self.g)))


class TreePass(NamedTuple):
    """What a tree pass returns.

    logits: float32 [R, vocab], or None where they were not wanted.
    hidden: the residual stream after each layer, float32 [R, hidden] each, then the final norm's output, if wanted.
    """

    logits: Tensor | None
    hidden: list[Tensor]
    factors: PassFactors


def prepare(config: GatedDeltaNetConfig, tensors: Mapping[str, Tensor], mode: Mode) -> TargetWeights:
    """Merge projections and lay the weights out for passes; `tensors` as `load_checkpoint` gives them."""
    layers = []
    for i in range(config.num_hidden_layers):
        layers.append(_prepare_layer(config, tensors, f"model.layers.{i}.", mode))
    embeddings = tensors[EMBEDDINGS].float()
    head = tensors[EMBEDDINGS if config.tie_word_embeddings else HEAD]
    norm = tensors["model.norm.weight"].float()
    return TargetWeights(config, mode, embeddings, tuple(layers), norm, _dense(head, mode))


def _dense(weight: Tensor, mode: Mode) -> DenseWeight:
    """Fast mode also keeps the plain layout, which is the faster one for a single row."""
    return DenseWeight(weight.float() if weight.dtype == torch.float16 else weight, keep_plain=mode == "fast")


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
    return LayerWeights(
        attn_norm=get("attn_norm.weight").float(),
        in_proj=_dense(torch.cat(parts), mode),
        conv=conv.squeeze(1).T.float().contiguous(),
        gates=gate,
        o_norm=get("attn.o_norm.weight").float(),
        o_proj=_dense(get("attn.o_proj.weight"), mode),
        mlp_norm=get("mlp_norm.weight").float(),
        gate_up=_dense(torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]), mode),
        down=_dense(get("mlp.down_proj.weight"), mode),
    )


def tree_pass(
    weights: TargetWeights,
    tokens: Tensor,
    batch: TreeBatch,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Sequence[int],
    want_logits: bool = True,
) -> TreePass:
    """Run all rows of a batch of sessions through the model; the stored state is read, never written.

    Args:
        weights: the model.
        tokens: int64 [R], the batch's rows.
        batch: which row follows which.
        recurrent_state: float32 [slots, L, HV, K, V], as it stands before each session's root.
        conv_state: float32 [slots, W - 1, L, D], likewise.
        slots: [B], each session's slot.
        want_logits: whether to multiply by the head.
    """
    linear: Linear = exact_linear if weights.mode == "exact" else fast_linear
    verify = verify_exact if weights.mode == "exact" else verify_fast
    states = _gather(slots)
    config = weights.config
    H, K, keys, D = config.num_heads, config.head_dim, config.key_dim, config.conv_dim
    R = batch.rows
    factors = PassFactors([], [], [], [])
    hidden = []
    x = weights.embeddings.index_select(0, tokens)  # [R, hidden]
    for i, layer in enumerate(weights.layers):
        projected = linear(rms_norm(x, layer.attn_norm, config.norm_eps), layer.in_proj)
        y, inputs = tree_convolution(projected[:, :D], states(conv_state[:, :, i]), layer.conv, batch)
        qk = l2_normalise(y[:, : 2 * keys].view(R, 2, H, K), L2_EPS)
        v = y[:, 2 * keys :].view(R, config.value_heads, config.head_v_dim)
        g, beta = gates(projected[:, D : D + layer.gates.bias.shape[0]], layer.gates)
        o, u = verify(qk, v, g, beta, states(recurrent_state[:, i]), batch)
        factors.k.append(qk[:, 1])
        factors.u.append(u)
        factors.g.append(g)
        factors.conv_inputs.append(inputs)
        x = x + linear(_mixer_output(config, layer, o, projected), layer.o_proj)
        x = x + _mlp(config, layer, x, linear)
        hidden.append(x)
    if not want_logits:
        return TreePass(None, hidden, factors)
    hidden.append(rms_norm(x, weights.norm, config.norm_eps))
    return TreePass(linear(hidden[-1], weights.head), hidden, factors)


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
    H, K, keys, D = config.num_heads, config.head_dim, config.key_dim, config.conv_dim
    T, hidden = tokens.shape[0], []
    x = weights.embeddings.index_select(0, tokens)  # [T, hidden]
    for i, layer in enumerate(weights.layers):
        projected = exact_linear(rms_norm(x, layer.attn_norm, config.norm_eps), layer.in_proj)
        y = _convolve_chunk(projected[:, :D], conv_state[:, i], layer.conv)
        qk = y[:, : 2 * keys].view(T, 2, H, K)
        qk = qk * (qk * qk).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
        v = y[:, 2 * keys :].view(1, T, config.value_heads, config.head_v_dim)
        g, beta = gates(projected[:, D : D + layer.gates.bias.shape[0]], layer.gates)
        o, final_state = chunk_gated_delta_rule(
            qk[None, :, 0],
            qk[None, :, 1],
            v,
            g[None],
            beta[None],
            initial_state=recurrent_state[None, i],
            chunk_size=SCAN_CHUNK,
        )
        recurrent_state[i] = final_state[0]
        x = x + exact_linear(_mixer_output(config, layer, o[0], projected), layer.o_proj)
        x = x + _mlp(config, layer, x, exact_linear)
        hidden.append(x)
    if want_final_norm:
        hidden.append(rms_norm(x, weights.norm, config.norm_eps))
    return hidden


def commit(
    weights: TargetWeights,
    factors: PassFactors,
    recurrent_state: Tensor,
    slots: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> None:
    """Apply accepted paths of an earlier pass to the stored recurrent state, all layers at once.

    Args:
        weights: the model.
        factors: of the pass that verified the paths.
        recurrent_state: float32 [slots, L, HV, K, V], written at `slots`.
        slots: a slot for each path.
        paths: rows of that pass's batch, root first; empty leaves a slot as it is.
    """
    apply = commit_exact if weights.mode == "exact" else commit_fast
    apply(recurrent_state.flatten(1, 2), slots, factors.factors, paths)


def _gather(slots: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """From a store [slots, ...] to the sessions' entries [B, ...], contiguous: a view for one session."""
    if len(slots) == 1:
        first = slots[0]
        return lambda store: store[first : first + 1]
    index = torch.tensor(slots)
    return lambda store: store.index_select(0, index)


def _mixer_output(config: GatedDeltaNetConfig, layer: LayerWeights, o: Tensor, projected: Tensor) -> Tensor:
    """Norm a head's output and gate it: [R, HV, V] to [R, HV * V]."""
    o = rms_norm(o, layer.o_norm, config.norm_eps).flatten(1)
    if not config.use_gate:
        return o
    gate = projected[:, -config.value_dim :]
    if config.output_gate_activation == "sigmoid":
        return o / torch.exp(-gate).add_(1)
    return o.mul_(silu(gate))


def _mlp(config: GatedDeltaNetConfig, layer: LayerWeights, x: Tensor, linear: Linear) -> Tensor:
    """SwiGLU of the normed stream: [R, hidden] to [R, hidden]."""
    both = linear(rms_norm(x, layer.mlp_norm, config.norm_eps), layer.gate_up)  # [R, 2 * mlp]
    gate, up = both[:, : config.mlp_dim], both[:, config.mlp_dim :]
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
