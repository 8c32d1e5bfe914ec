"""Generation for evaluation: the trainable model run token by token, its state carried along.

Plain and batched; serving is the verifier's business.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

from specla.kernels.chunked import chunk_gated_delta_rule
from specla.training.target.model import Block, GatedDeltaNet, ShortConvolution, TargetModel, l2_normalised

END_OF_TEXT_ID = 0
CHECK_EVERY = 16


class LayerState(NamedTuple):
    """windows: last inputs of the q, k and v convolutions, `[B, conv_size - 1, channels]` each.
    recurrent: `[B, HV, K, V]` float32."""

    windows: tuple[Tensor, Tensor, Tensor]
    recurrent: Tensor


def advance(model: TargetModel, ids: Tensor, states: list[LayerState] | None) -> tuple[Tensor, list[LayerState]]:
    """Run `[B, T]` ids from the states (None: from nothing); returns `[B, T, hidden]` features and the new states."""
    x: Tensor = model.model.embeddings(ids)
    after = []
    for i, block in enumerate(model.model.layers):
        assert isinstance(block, Block)
        mixed, state = _mix(block.attn, block.attn_norm(x), states[i] if states else None)
        x = x + mixed
        x = x + block.mlp(block.mlp_norm(x))
        after.append(state)
    return model.model.norm(x), after


def _mix(attn: GatedDeltaNet, x: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
    shape = attn.shape
    inputs = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    convolutions = attn.q_conv1d, attn.k_conv1d, attn.v_conv1d
    windows = state.windows if state else tuple(_empty(y, shape.conv_size) for y in inputs)
    rows = [torch.cat([w, y], 1) for w, y in zip(windows, inputs, strict=True)]
    q, k, v = (_convolve(c, r) for c, r in zip(convolutions, rows, strict=True))
    q = l2_normalised(q.unflatten(-1, (shape.num_heads, shape.head_dim)))
    k = l2_normalised(k.unflatten(-1, (shape.num_heads, shape.head_dim)))
    v = v.unflatten(-1, (shape.value_heads, shape.head_v_dim)).float()
    g = -attn.A_log.float().exp() * F.softplus(attn.a_proj(x).float() + attn.dt_bias)
    beta = attn.b_proj(x).float().sigmoid() * (2.0 if shape.allow_neg_eigval else 1.0)
    if state is not None and x.shape[1] == 1:
        o, recurrent = _one_token(q, k, v, g, beta, state.recurrent)
    else:
        o, recurrent = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state.recurrent if state else None)
    gate = attn.g_proj(x).unflatten(-1, o.shape[2:])
    kept = tuple(r[:, 1 - shape.conv_size :] for r in rows)
    return attn.o_proj((attn.o_norm(o) * F.silu(gate)).flatten(2)), LayerState((kept[0], kept[1], kept[2]), recurrent)


def _empty(y: Tensor, conv_size: int) -> Tensor:
    return y.new_zeros(y.shape[0], conv_size - 1, y.shape[2])


def _convolve(convolution: ShortConvolution, rows: Tensor) -> Tensor:
    size = convolution.weight.shape[-1]
    convolved: Tensor = convolution(rows, None)
    return convolved[:, size - 1 :]


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence itself for T = 1."""
    group = v.shape[2] // q.shape[2]
    q, k = (y.squeeze(1).repeat_interleave(group, 1) for y in (q, k))  # [B, HV, K]
    state = g.squeeze(1).exp()[..., None, None] * state
    u = beta.squeeze(1).unsqueeze(-1) * (v.squeeze(1) - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
    o = (q.unsqueeze(-2) @ state).squeeze(-2) * q.shape[-1] ** -0.5
    return o.unsqueeze(1), state


@torch.no_grad()
def generate(
    model: TargetModel,
    prompts: Sequence[list[int]],
    *,
    new: int,
    temperature: float = 0.0,
    seed: int = 0,
    enough: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue token prompts by up to `new` tokens each, stopping at end of text (which is not returned).

    Args:
        prompts: non-empty lists of ids; each is prefilled by itself, then all are decoded together.
        temperature: 0 takes the likeliest token, ties to the lowest id.
        seed: of the draws.
        enough: asked every 16 tokens whether a continuation so far suffices; it then ends there.
    """
    device = next(model.parameters()).device
    rng = torch.Generator(device).manual_seed(seed)
    starts = [advance(model, torch.tensor([prompt], device=device), None) for prompt in prompts]
    features = torch.cat([x[:, -1] for x, _ in starts])  # [B, hidden]
    states = [_stack([layers[i] for _, layers in starts]) for i in range(len(starts[0][1]))]
    texts: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    for step in range(1, new + 1):
        logits = model.lm_head(features).float()
        if temperature > 0:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng).squeeze(1)
        else:
            ids = logits.argmax(-1)
        for row, token in zip(running, ids.tolist(), strict=True):
            texts[row].append(token)
        check = enough if enough is not None and step % CHECK_EVERY == 0 else None
        going = [
            i for i, row in enumerate(running)
            if texts[row][-1] != END_OF_TEXT_ID and not (check and check(texts[row]))
        ]  # fmt: skip
        if not going:
            break
        if len(going) < len(running):
            running = [running[i] for i in going]
            ids, states = ids[going], [_select(state, going) for state in states]
        x, states = advance(model, ids.unsqueeze(1), states)
        features = x[:, 0]
    return [text[:-1] if text[-1:] == [END_OF_TEXT_ID] else text for text in texts]


def _stack(states: list[LayerState]) -> LayerState:
    q, k, v = (torch.cat(windows) for windows in zip(*(s.windows for s in states), strict=True))
    return LayerState((q, k, v), torch.cat([s.recurrent for s in states]))


def _select(state: LayerState, rows: list[int]) -> LayerState:
    q, k, v = (window[rows] for window in state.windows)
    return LayerState((q, k, v), state.recurrent[rows])
