"""Tree passes as PyTorch operations: exact mode level by level, fast mode factorised.

Readable beside the formulas, and for machines that cannot compile; compiled_pass.py does the same in fewer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specla.kernels.commit import Factors, commit_exact, commit_fast
from specla.kernels.convolution import tree_convolution
from specla.kernels.dense import exact_linear, fast_linear
from specla.kernels.factorised import verify_fast
from specla.kernels.gated_delta import verify_exact
from specla.kernels.rowwise import gates, l2_normalise, rms_norm
from specla.kernels.tree import TreeBatch
from specla.verifier_service.targets.gated_deltanet import (
    Linear,
    Mode,
    TargetWeights,
    TreePass,
    mixer_output,
    mlp,
    projected,
)


@dataclass(frozen=True)
class TorchFactors:
    """What one pass's R rows would do to state and windows, a list entry a layer (see `PassFactors`)."""

    mode: Mode
    batch: TreeBatch
    k: list[Tensor]  # [R, H, K]
    u: list[Tensor]  # [R, HV, V]
    g: list[Tensor]  # [R, HV]
    conv_inputs: list[Tensor]  # [B (W - 1) + R, D]

    @cached_property
    def factors(self) -> Factors:
        """All layers' factors side by side, layer l's heads from l * H (l * HV) on, so that one commit serves all."""
        return Factors(*(torch.stack(x, 1).flatten(1, 2) for x in (self.k, self.u, self.g)))

    def apply(
        self,
        recurrent_state: Tensor,
        conv_state: Tensor,
        slots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Recurrent states by their factors, windows by selection."""
        commit = commit_exact if self.mode == "exact" else commit_fast
        commit(recurrent_state.flatten(1, 2), slots, self.factors, paths)
        width = conv_state.shape[1] + 1
        for slot, path in zip(slots, paths, strict=True):
            index = self.batch.window_after(width, path[-1])
            windows = [inputs.index_select(0, index) for inputs in self.conv_inputs]
            torch.stack(windows, 1, out=conv_state[slot])  # [W - 1, L, D]


def torch_tree_pass(
    weights: TargetWeights,
    tokens: Tensor,
    batch: TreeBatch,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Sequence[int],
    want_logits: bool = True,
) -> TreePass:
    """`tree_pass` in PyTorch operations: exact level by level, fast factorised."""
    linear: Linear = exact_linear if weights.mode == "exact" else fast_linear
    verify = verify_exact if weights.mode == "exact" else verify_fast
    config, R = weights.config, batch.rows
    factors = TorchFactors(weights.mode, batch, [], [], [], [])
    hidden = []
    states, windows = _sessions(recurrent_state, slots, 1), _sessions(conv_state, slots, 2)
    x = weights.embeddings.index_select(0, tokens)  # [R, hidden]
    for layer, state, window in zip(weights.layers, states, windows, strict=True):
        raw, ab, gate = projected(weights, layer, x, linear)
        y, inputs = tree_convolution(raw, window, layer.conv, batch)
        qk, v = y.split([2 * config.key_dim, config.value_dim], 1)
        qk = l2_normalise(qk.view(R, 2, config.num_heads, config.head_dim))
        g, beta = gates(ab, layer.gates)
        o, u = verify(qk, v.view(R, config.value_heads, config.head_v_dim), g, beta, state, batch)
        factors.k.append(qk[:, 1])
        factors.u.append(u)
        factors.g.append(g)
        factors.conv_inputs.append(inputs)
        x = x + linear(mixer_output(weights, o, gate), layer.o_proj)
        x = x + mlp(weights, layer, x, linear)
        hidden.append(x)
    if not want_logits:
        return TreePass(None, hidden, factors)
    hidden.append(rms_norm(x, weights.norm, config.norm_eps))
    return TreePass(linear(hidden[-1], weights.head), hidden, factors)


def _sessions(store: Tensor, slots: Sequence[int], layer_dim: int) -> Iterable[Tensor]:
    """A store's entries of these slots, layer by layer, contiguous [B, ...]: views for one session."""
    if len(slots) == 1:
        return store[slots[0] : slots[0] + 1].unbind(layer_dim)
    index = torch.tensor(slots)
    return (layer.index_select(0, index) for layer in store.unbind(layer_dim))
