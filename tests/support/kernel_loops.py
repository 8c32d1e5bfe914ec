"""The interface of flash-linear-attention's recurrent kernel as loops over the float64 reference."""

from itertools import pairwise

import torch
from torch import Tensor

from specla.kernels import reference


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs and final states of [B, T, ...], or of sequences packed into [1, T, ...]."""
    if cu_seqlens is None:
        parts, sequences = [slice(None)] * q.shape[0], range(q.shape[0])
    else:
        parts = [slice(a, b) for a, b in pairwise(cu_seqlens.tolist())]
        sequences = [0] * len(parts)
    outputs, finals = [], []
    for state, at, i in zip(initial_state, parts, sequences, strict=True):
        rows = [x[i][at] for x in (scale * q, k, v, g, beta)]
        count = len(rows[0])
        o, u = reference.verify_tree(*rows, state, range(-1, count - 1))
        outputs.append(o.to(v.dtype))
        finals.append(reference.commit(state, rows[1], u, rows[3], range(count)).float())
    o = torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None]
    return o, torch.stack(finals) if output_final_state else None
