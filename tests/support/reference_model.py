"""A Gated DeltaNet language model in float64, built from the reference operations: slow, and meant to be read.

All tokens, a prompt and any tree behind it, are the rows of one tree that starts from an empty state.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specla.kernels import reference


class ReferenceModel:
    """A checkpoint folder as a function from rows to logits."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}

    def logits(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """Logits float64 [N, vocab] after each row; `parents` default to a chain."""
        parents = list(range(-1, len(tokens) - 1)) if parents is None else parents
        x = self.weights["model.embeddings.weight"][torch.tensor(tokens)]  # [N, hidden]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._mixer(self._norm(x, prefix + "attn_norm"), prefix + "attn.", parents)
            x = x + self._mlp(self._norm(x, prefix + "mlp_norm"), prefix + "mlp.")
        x = self._norm(x, "model.norm")
        tied = self.config["tie_word_embeddings"]
        return x @ self.weights["model.embeddings.weight" if tied else "lm_head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return reference.rms_norm(x, self.weights[name + ".weight"], self.config["norm_eps"])

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        g = x @ gate.T
        return (g * torch.sigmoid(g) * (x @ up.T)) @ down.T

    def _mixer(self, x: Tensor, prefix: str, parents: Sequence[int]) -> Tensor:
        c, n = self.config, x.shape[0]
        heads, value_heads, width = c["num_heads"], c["num_v_heads"] or c["num_heads"], c["head_dim"]
        v_width = int(width * c["expand_v"])
        q, k, v = (self._convolved(x, prefix + name, parents) for name in "qkv")
        q = reference.l2_normalise(q.view(n, heads, width), scale=width**-0.5)
        k = reference.l2_normalise(k.view(n, heads, width))
        a, b = (x @ self.weights[f"{prefix}{name}_proj.weight"].T for name in "ab")
        a_log, dt_bias = self.weights[prefix + "A_log"], self.weights[prefix + "dt_bias"]
        g, beta = reference.gates(a, b, a_log, dt_bias, c["allow_neg_eigval"])
        state = torch.zeros(value_heads, width, v_width, dtype=torch.float64)
        o, _ = reference.verify_tree(q, k, v.view(n, value_heads, v_width), g, beta, state, parents)
        o = reference.rms_norm(o, self.weights[prefix + "o_norm.weight"], c["norm_eps"]).flatten(1)
        if c["use_gate"]:
            gate = x @ self.weights[prefix + "g_proj.weight"].T
            o = o * gate * torch.sigmoid(gate)
        return o @ self.weights[prefix + "o_proj.weight"].T

    def _convolved(self, x: Tensor, name: str, parents: Sequence[int]) -> Tensor:
        raw = x @ self.weights[name + "_proj.weight"].T
        weight = self.weights[name + "_conv1d.weight"].squeeze(1).T  # [W, D]
        window = torch.zeros(weight.shape[0] - 1, raw.shape[1], dtype=torch.float64)
        return reference.convolution(raw, window, weight, parents)
