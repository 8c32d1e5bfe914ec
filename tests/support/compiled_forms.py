"""The compiled steps behind the interfaces of the PyTorch forms, so that one test serves both."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specla.kernels import compiled
from specla.kernels.commit import Factors
from specla.kernels.gated_delta import check_shapes
from specla.kernels.tree import TreeBatch


def verify_compiled(
    qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, batch: TreeBatch
) -> tuple[Tensor, Tensor]:
    """`gated_delta.verify_exact`, compiled."""
    check_shapes(qk, v, g, beta, state, batch)
    walk = batch.walk
    q, k = (x.contiguous().numpy() for x in qk.unbind(1))
    o, u = torch.full(v.shape, torch.nan), torch.full(v.shape, torch.nan)
    compiled.recur(
        q,
        k,
        v.flatten(1).contiguous().numpy(),
        0,
        torch.exp(g).contiguous().numpy(),
        beta.contiguous().numpy(),
        state.unsqueeze(1).contiguous().numpy(),
        np.arange(batch.sessions),
        0,
        walk.offsets,
        walk.parents,
        walk.kept,
        np.full((walk.places, *state.shape[2:]), np.nan, np.float32),
        u.numpy(),
        o.numpy(),
    )
    return o, u


def commit_compiled(state: Tensor, slots: Sequence[int], factors: Factors, paths: Sequence[Sequence[int]]) -> None:
    """`commit.commit_exact`, compiled."""
    compiled.commit(
        state.unsqueeze(1).numpy(),
        np.array(slots),
        factors.k.unsqueeze(0).contiguous().numpy(),
        factors.u.unsqueeze(0).contiguous().numpy(),
        torch.exp(factors.g).unsqueeze(0).contiguous().numpy(),
        np.array([row for path in paths for row in path], np.int64),
        np.cumsum([0, *map(len, paths)]),
    )
