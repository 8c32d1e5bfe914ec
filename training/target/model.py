"""The trainable Gated DeltaNet language model; parameter names and arithmetic are those of fla's class."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

from specla.kernels.chunked import chunk_gated_delta_rule
from specla.training.target.config import TargetShape

L2_EPS = 1e-6


class Boundaries(NamedTuple):
    """Where documents begin inside packed rows.

    starts: `[B, T]` bool, true at a document's first token. inside: `[conv_size - 1, B, T, 1]` bool; entry i - 1 is
    true where the token i places back belongs to the same document.
    """

    starts: Tensor
    inside: Tensor


def boundaries(ids: Tensor, end_of_text: int, conv_size: int) -> Boundaries:
    """Find document starts in packed rows `[B, T]`: the tokens after an end-of-text token."""
    starts = F.pad(ids[:, :-1] == end_of_text, (1, 0))
    segment = starts.cumsum(1)
    shifted = [F.pad(segment[:, :-i], (i, 0), value=-1) for i in range(1, conv_size)]
    return Boundaries(starts, torch.stack([(s == segment).unsqueeze(-1) for s in shifted]))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return y.to(x.dtype)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution, then silu; the window holds zeros before a document's first token."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        """`[B, T, channels]` to the same."""
        taps = self.weight.squeeze(1).to(x.dtype)  # [channels, size], the last tap is the current token's
        y = x * taps[:, -1]
        for i in range(1, min(taps.shape[1], x.shape[1])):
            past = F.pad(x[:, :-i], (0, 0, i, 0))
            y = y + (past if inside is None else past * inside[i - 1]) * taps[:, -1 - i]
        return F.silu(y)


class GatedDeltaNet(nn.Module):
    """The mixer: projections, short convolutions, the gated delta rule, a gated norm."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        D, HV = shape.hidden_size, shape.value_heads
        keys, values = shape.num_heads * shape.head_dim, HV * shape.head_v_dim
        self.q_proj = nn.Linear(D, keys, bias=False)
        self.k_proj = nn.Linear(D, keys, bias=False)
        self.v_proj = nn.Linear(D, values, bias=False)
        self.a_proj = nn.Linear(D, HV, bias=False)
        self.b_proj = nn.Linear(D, HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(1e-3, 16).log())
        # Time steps log-uniform in [0.001, 0.1]; the bias is softplus' inverse of them.
        dt = torch.exp(torch.rand(HV) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.q_conv1d = ShortConvolution(keys, shape.conv_size)
        self.k_conv1d = ShortConvolution(keys, shape.conv_size)
        self.v_conv1d = ShortConvolution(values, shape.conv_size)
        self.g_proj = nn.Linear(D, values, bias=False)
        self.o_norm = RMSNorm(shape.head_v_dim, shape.norm_eps)
        self.o_proj = nn.Linear(values, D, bias=False)

    def forward(self, x: Tensor, where: Boundaries | None) -> Tensor:
        """`[B, T, hidden]` to the same."""
        shape, inside = self.shape, None if where is None else where.inside
        q = self.q_conv1d(self.q_proj(x), inside).unflatten(-1, (shape.num_heads, shape.head_dim))
        k = self.k_conv1d(self.k_proj(x), inside).unflatten(-1, (shape.num_heads, shape.head_dim))
        v = self.v_conv1d(self.v_proj(x), inside).unflatten(-1, (shape.value_heads, shape.head_v_dim))
        g = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias)
        if where is not None:
            g = g.masked_fill(where.starts.unsqueeze(-1), float("-inf"))
        beta = self.b_proj(x).float().sigmoid() * (2.0 if shape.allow_neg_eigval else 1.0)
        o = chunk_gated_delta_rule(l2_normalised(q), l2_normalised(k), v, g, beta).o  # [B, T, HV, V]
        gate = self.g_proj(x).unflatten(-1, o.shape[2:])
        return self.o_proj((self.o_norm(o) * F.silu(gate)).flatten(2))  # type: ignore[no-any-return]


def l2_normalised(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dimension, float32, as fla normalises queries and keys."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Mixer and MLP, each behind a norm and around a residual."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attn = GatedDeltaNet(shape)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, where: Boundaries | None) -> Tensor:
        """`[B, T, hidden]` to the same."""
        x = x + self.attn(self.attn_norm(x), where)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, ids: Tensor, where: Boundaries | None) -> Tensor:
        """`[B, T]` ids to `[B, T, hidden]` features, the last norm applied."""
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, where)
        return self.norm(x)  # type: ignore[no-any-return]


class TargetModel(nn.Module):
    """The language model; `state_dict()` has fla's names, the head is the embedding."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.lm_head.weight = self.model.embeddings.weight
        deep = (2 * shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=shape.initializer_range * (deep if last else 1.0))

    def forward(self, ids: Tensor, where: Boundaries | None = None) -> Tensor:
        """`[B, T]` ids to `[B, T, vocabulary]` logits."""
        return self.lm_head(self.model(ids, where))  # type: ignore[no-any-return]
