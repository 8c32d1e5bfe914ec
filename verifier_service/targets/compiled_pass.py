"""Tree passes as matrix products and compiled steps between them (kernels/compiled.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specla.kernels import compiled
from specla.kernels.compiled import Array
from specla.kernels.dense import exact_linear, fast_linear
from specla.kernels.rowwise import rms_norm
from specla.kernels.tree import TreeBatch
from specla.verifier_service.targets.gated_deltanet import Linear, TargetWeights, TreePass


@dataclass(frozen=True)
class CompiledFactors:
    """What one pass's R rows would do to state and windows (see `PassFactors`)."""

    batch: TreeBatch
    k: Array  # [L, R, H, K]
    u: Array  # [L, R, HV, V]
    alpha: Array  # [L, R, HV]
    inputs: Array  # [L, B (W - 1) + R, D]

    def apply(
        self,
        recurrent_state: Tensor,
        conv_state: Tensor,
        slots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Recurrent states by their factors, windows by selection."""
        which, rows = np.array(slots), np.array([row for path in paths for row in path])
        offsets = np.cumsum([0, *map(len, paths)])
        compiled.commit(recurrent_state.numpy(), which, self.k, self.u, self.alpha, rows, offsets)
        width = conv_state.shape[1] + 1
        sources = np.array([self.batch.window_after(width, path[-1]).numpy() for path in paths])
        compiled.advance_windows(conv_state.numpy(), which, self.inputs, sources)


def compiled_tree_pass(
    weights: TargetWeights,
    tokens: Tensor,
    batch: TreeBatch,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Sequence[int],
    want_logits: bool = True,
) -> TreePass:
    """`tree_pass`, compiled; in fast mode only the matrix products differ."""
    linear: Linear = exact_linear if weights.mode == "exact" else fast_linear
    config, R, L = weights.config, batch.rows, len(weights.layers)
    walk, width = batch.walk, config.conv_size
    taps = batch.taps(width).numpy().reshape(width, R)
    states, windows, which = recurrent_state.numpy(), conv_state.numpy(), np.array(slots)
    with_silu = config.output_gate_activation != "sigmoid"
    stream_eps, head_eps = config.norm_eps * config.hidden_size, config.norm_eps * config.head_v_dim
    gate_at = config.conv_dim + weights.layers[0].gates.bias.shape[0] if config.use_gate else -1
    factors = CompiledFactors(
        batch,
        _empty(L, R, config.num_heads, config.head_dim),
        _empty(L, R, config.value_heads, config.head_v_dim),
        _empty(L, R, config.value_heads),
        _empty(L, batch.sessions * (width - 1) + R, config.conv_dim),
    )
    scratch, y = _empty(walk.places, config.head_dim, config.head_v_dim), _empty(R, config.conv_dim)
    mixed, hidden_rows = torch.empty(R, config.value_dim), torch.empty(R, config.mlp_dim)
    normed, middle = torch.empty(R, config.hidden_size), _empty(R, config.hidden_size)
    stream = torch.empty(L, R, config.hidden_size)
    x = weights.embeddings.index_select(0, tokens).numpy()
    compiled.add_and_norm(x, np.zeros_like(x), stream_eps, x, normed.numpy())
    for i, (layer, after) in enumerate(zip(weights.layers, stream.numpy(), strict=True)):
        compiled.mix(
            linear(normed, layer.in_proj).numpy(),
            windows,
            layer.conv.numpy(),
            layer.gates.bias.numpy(),
            layer.gates.decay_rate.numpy(),
            layer.gates.beta_scale,
            states,
            which,
            i,
            walk.offsets,
            walk.parents,
            taps,
            walk.kept,
            scratch,
            y,
            factors.inputs[i],
            factors.k[i],
            factors.u[i],
            factors.alpha[i],
            config.conv_dim,
            gate_at,
            with_silu,
            head_eps,
            mixed.numpy(),
        )
        compiled.add_and_norm(x, linear(mixed, layer.o_proj).numpy(), stream_eps, middle, normed.numpy())
        compiled.swiglu(linear(normed, layer.gate_up).numpy(), hidden_rows.numpy())
        compiled.add_and_norm(middle, linear(hidden_rows, layer.down).numpy(), stream_eps, after, normed.numpy())
        x = after
    hidden = list(stream.unbind(0))
    if not want_logits:
        return TreePass(None, hidden, factors)
    hidden.append(rms_norm(hidden[-1], weights.norm, config.norm_eps))
    return TreePass(linear(hidden[-1], weights.head), hidden, factors)


def _empty(*shape: int) -> Array:
    return np.empty(shape, np.float32)
