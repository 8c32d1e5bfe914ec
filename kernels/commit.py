"""The deferred commit: an accepted path's factors (k, u, g) are applied to the stored state at the next pass.

This is the only code that writes a stored recurrent state after prefill, and it reads accepted rows alone, so a
rejected candidate cannot leave a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """What one layer's rows of one pass do to the state: S <- e^g S + k u^T."""

    k: Tensor
    """float32 [R, H, K], normalised."""
    u: Tensor
    """float32 [R, HV, V]."""
    g: Tensor
    """float32 [R, HV], log decay."""


def commit_exact(state: Tensor, slots: Sequence[int], factors: Factors, paths: Sequence[Sequence[int]]) -> None:
    """Applies accepted paths one token after the other, with the bits of serial decoding.

    Args:
        state: float32 [slots, HV, K, V], written in place at the named slots alone.
        slots: [B], each session's slot, all different.
        factors: of the pass that made the paths.
        paths: for each session the accepted rows of `factors`, from its root on; empty leaves its state untouched.
    """
    k, u, decay = _columns(state, factors)
    together = _same_step(slots, paths)
    if together is not None:
        slot, rows = together
        state[slot].mul_(decay[rows]).addcmul_(k[rows], u[rows])
        return
    for slot_index, path in zip(slots, paths, strict=True):
        if path:
            stored = state[slot_index]
            for row in path:
                stored.mul_(decay[row]).addcmul_(k[row], u[row])


def commit_fast(state: Tensor, slots: Sequence[int], factors: Factors, paths: Sequence[Sequence[int]]) -> None:
    """Applies each accepted path at once: S <- e^(sum g) S + sum_j e^(sum of g after j) k_j u_j^T.

    Arguments as for `commit_exact`; results agree with it up to rounding, and bit for bit for paths of one row.
    """
    if max(map(len, paths), default=0) <= 1:
        commit_exact(state, slots, factors, paths)
        return
    group = factors.u.shape[1] // factors.k.shape[1]
    for slot, path in zip(slots, paths, strict=True):
        if not path:
            continue
        index = torch.tensor(path)
        g = factors.g.index_select(0, index)  # [m, HV]
        after = g.flip(0).cumsum(0).flip(0)  # after[j]: the sum of g from j on
        weight = torch.exp(torch.cat((after[1:], torch.zeros_like(g[:1]))))
        u = factors.u.index_select(0, index) * weight.unsqueeze(-1)  # [m, HV, V]
        k = factors.k.index_select(0, index).repeat_interleave(group, 1)  # [m, HV, K]
        stored = state[slot].mul_(torch.exp(after[0])[:, None, None])
        stored.baddbmm_(k.permute(1, 2, 0), u.transpose(0, 1))


def _columns(state: Tensor, factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """k [R, HV, K, 1], u [R, HV, 1, V] and the decay [R, HV, 1, 1]."""
    k, value_heads = factors.k, state.shape[1]
    if k.shape[1] != value_heads:
        k = k.repeat_interleave(value_heads // k.shape[1], 1)
    return k.unsqueeze(-1), factors.u.unsqueeze(-2), torch.exp(factors.g)[:, :, None, None]


def _same_step(slots: Sequence[int], paths: Sequence[Sequence[int]]) -> tuple[slice, slice] | None:
    """Slots and rows as slices, where several sessions accept one row each and both lie side by side."""
    if len(slots) < 2 or any(len(path) != 1 for path in paths):
        return None
    slot, row = slots[0], paths[0][0]
    for i, (s, path) in enumerate(zip(slots, paths, strict=True)):
        if s != slot + i or path[0] != row + i:
            return None
    return slice(slot, slot + len(slots)), slice(row, row + len(slots))
