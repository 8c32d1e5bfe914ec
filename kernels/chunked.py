"""The chunked gated delta rule in plain PyTorch: prefill of the verifier and the mixer that training differentiates.

The sequence is cut into chunks. Inside a chunk every corrected value u depends on the earlier ones through a unit
lower triangular system, solved for all chunks at once; only the state at the chunk boundaries is carried serially.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

SOLVE_BLOCK = 16


class ChunkedOutput(NamedTuple):
    """Outputs of a sequence and the state after its last token.

    o: `[B, T, HV, V]`, in the dtype of `v`. final_state: `[B, HV, K, V]`, float32 (float64 for float64 inputs).
    """

    o: Tensor
    final_state: Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> ChunkedOutput:
    """Run the gated delta rule over whole sequences, chunk by chunk; differentiable in every tensor argument.

    For each head, with S of shape K x V: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = K^-1/2 S^T q
    (Yang et al., "Gated Delta Networks", 2024; chunked as in "Parallelizing Linear Transformers with the Delta
    Rule", 2024). Arithmetic is float32 whatever the inputs and whatever autocast says, float64 for float64 inputs.

    Args:
        q: `[B, T, H, K]`, l2-normalised, not yet scaled.
        k: `[B, T, H, K]`, l2-normalised.
        v: `[B, T, HV, V]`, HV a multiple of H: value head i reads query and key head i // (HV / H).
        g: `[B, T, HV]`, log decay, at most 0; minus infinity clears the state before that token.
        beta: `[B, T, HV]`, write strength, 0 to 2.
        initial_state: `[B, HV, K, V]` or None for zeros.
        chunk_size: tokens a chunk, a multiple of 16. T need not be a multiple of it.

    Raises:
        ValueError: shapes that do not fit together, an empty sequence, or a chunk size that is no multiple of 16.
    """
    _check(q, k, v, g, beta, initial_state, chunk_size)
    with torch.autocast(q.device.type, enabled=False):
        return _chunked(q, k, v, g, beta, initial_state, chunk_size)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, C: int
) -> ChunkedOutput:
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    out_dtype = v.dtype
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    N = -(-T // C)

    q, k, v = (_to_chunks(x, HV, N, C, dtype) for x in (q, k, v))  # [B, HV, N, C, K or V]
    g, beta = (_to_chunks(x.unsqueeze(-1), HV, N, C, dtype).squeeze(-1) for x in (g, beta))  # [B, HV, N, C]
    q = q * K**-0.5

    decay = _pairwise_decay(g)  # [B, HV, N, C, C]: exp(g_{j+1} + ... + g_i), lower triangular
    from_start = g.cumsum(-1).exp().unsqueeze(-1)  # [B, HV, N, C, 1]: decay since before the chunk
    to_end = decay[..., -1, :].unsqueeze(-1)  # [B, HV, N, C, 1]: decay from a token to the chunk's end

    b_k = beta.unsqueeze(-1) * k
    inverse = unit_lower_inverse((b_k @ k.mT * decay).tril(-1))
    u_free = inverse @ (beta.unsqueeze(-1) * v)  # u as if the chunk began from a zero state
    w = inverse @ (b_k * from_start)  # what the state at the chunk's beginning takes away from it
    k_end = (k * to_end).mT
    chunk_decay = from_start[..., -1:, :]  # [B, HV, N, 1, 1]

    state = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    states, us = [], []
    for i in range(N):
        u = u_free[:, :, i] - w[:, :, i] @ state
        states.append(state)
        us.append(u)
        state = chunk_decay[:, :, i] * state + k_end[:, :, i] @ u

    scores = q @ k.mT * decay
    o = (q * from_start) @ torch.stack(states, 2) + scores @ torch.stack(us, 2)  # [B, HV, N, C, V]
    o = o.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return ChunkedOutput(o.to(out_dtype), state)


def _to_chunks(x: Tensor, HV: int, N: int, C: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, H, D]` to `[B, HV, N, C, D]`; the padding's zeros leave the state as it is (beta 0, decay 1)."""
    B, T, H, D = x.shape
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, N * C - T)).transpose(1, 2)
    if H != HV:
        x = x.repeat_interleave(HV // H, 1)
    return x.reshape(B, HV, N, C, D)


def _pairwise_decay(g: Tensor) -> Tensor:
    """`[..., C]` log decays to `[..., C, C]` products of decays over (j, i], zero above the diagonal.

    Summed along each path: a difference of running totals loses digits after a strong decay and is NaN after an
    infinite one. Masked before the exponential, so that no gradient meets 0 * infinity.
    """
    C = g.shape[-1]
    ones = torch.ones(C, C, dtype=torch.bool, device=g.device)
    path = g.unsqueeze(-1).expand(*g.shape, C).masked_fill(~ones.tril(-1), 0.0)  # row l, column j: g_l where l > j
    return path.cumsum(-2).masked_fill(~ones.tril(), float("-inf")).exp()


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 with its own gradient, so that no step of the substitution is kept for the backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor) -> Tensor:
        inverse = _substitute(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]  # type: ignore[attr-defined]
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Invert I + A for strictly lower triangular A, by substitution in blocks of 16 and elimination between blocks.

    The product (I - A)(I + A^2)(I + A^4)... equals it on paper only: for correlated keys its terms grow far beyond
    the result and cancel. Differentiable.

    Args:
        a: `[..., C, C]`, float32 or float64; C a multiple of 16; zero on and above the diagonal.

    Returns:
        `[..., C, C]`, unit lower triangular.
    """
    inverse: Tensor = _UnitLowerInverse.apply(a)  # type: ignore[no-untyped-call]
    return inverse


def _substitute(a: Tensor) -> Tensor:
    C, b = a.shape[-1], SOLVE_BLOCK
    spans = [slice(i, i + b) for i in range(0, C, b)]
    blocks = torch.stack([a[..., s, s] for s in spans], -3)  # [..., C / 16, 16, 16]
    diagonal = torch.eye(b, dtype=a.dtype, device=a.device).expand_as(blocks)
    for j in range(b - 1):
        # Column j is zero down to row j, so rows that are already final stay as they are.
        diagonal = diagonal - blocks[..., :, j : j + 1] * diagonal[..., j : j + 1, :]

    inverse = diagonal[..., 0, :, :]
    for i in range(1, len(spans)):
        corner = diagonal[..., i, :, :]
        left = -(corner @ (a[..., spans[i], : i * b] @ inverse))  # [..., 16, 16 i]
        inverse = torch.cat([F.pad(inverse, (0, b)), torch.cat([left, corner], -1)], -2)
    return inverse


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, chunk_size: int
) -> None:
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(f"q and k must have one shape [B, T, H, K]; got {tuple(q.shape)} and {tuple(k.shape)}")
    B, T, H, K = q.shape
    if T == 0:
        raise ValueError("the sequence is empty; give at least one token")
    if v.ndim != 4 or v.shape[:2] != (B, T) or v.shape[2] % H:
        raise ValueError(f"v must be [{B}, {T}, HV, V] with HV a multiple of {H}; got {tuple(v.shape)}")
    HV, V = v.shape[2:]
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != (B, T, HV):
            raise ValueError(f"{name} must be [{B}, {T}, {HV}]; got {tuple(x.shape)}")
    if initial_state is not None and initial_state.shape != (B, HV, K, V):
        raise ValueError(f"initial_state must be [{B}, {HV}, {K}, {V}]; got {tuple(initial_state.shape)}")
    if chunk_size <= 0 or chunk_size % SOLVE_BLOCK:
        raise ValueError(f"chunk_size must be a positive multiple of {SOLVE_BLOCK}; got {chunk_size}")
