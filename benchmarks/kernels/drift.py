"""How far states drift from float64 over many committed tokens, in exact and fast mode.

Every pass is a chain of up to 8 rows of which all are accepted: its factors are applied by the next pass, whose u come
from the state so made, so errors feed back as they do in decoding. At 1, 10, 100, ... tokens a copy of the state takes
the factors that still wait and is compared.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specla.benchmarks.kernels.inputs import Inputs
from specla.benchmarks.kernels.launch import launch_of
from specla.benchmarks.kernels.problem import RING
from specla.benchmarks.kernels.reference64 import relative_error, step64
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.kernels.topologies import chain
from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.gpu.selector import Choice, Mode

STEPS = 10_000
ROWS_OF_A_PASS = 8
_BUCKET = Bucket(sessions=1, rows=ROWS_OF_A_PASS, tree_rows=ROWS_OF_A_PASS, pending=RING)
WANTED: dict[Mode, float] = {"exact": 1e-5, "fast": 1e-3}
KERNELS: dict[Mode, Choice] = {"exact": Choice("serial"), "fast": Choice("factorised")}


class Point(NamedTuple):
    """The relative error of the state after so many tokens."""

    step: int
    error: float


def checkpoints(last: int) -> list[int]:
    """1, 10, 100 and so on, up to and with `last`."""
    powers = []
    step = 1
    while step < last:
        powers.append(step)
        step *= 10
    return [*powers, last]


def spans(last: int, most: int) -> list[int]:
    """Lengths of passes of at most `most` tokens that end at every checkpoint up to `last`."""
    lengths = []
    for before, after in pairwise([0, *checkpoints(last)]):
        full, rest = divmod(after - before, most)
        lengths += [most] * full + ([rest] if rest else [])
    return lengths


def drift(
    shape: Shape, mode: Mode, *, steps: int = STEPS, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> list[Point]:
    """The curve of one mode's kernel for one session and layer."""
    draw = Inputs(shape, dtype=dtype, device=device, seed=3)
    tokens, start = draw.rows(steps), draw.states(1)
    states = _kernel_states(shape, KERNELS[mode], tokens, start.clone(), steps)
    wanted = start.double()
    found, done = [], 0
    for step in checkpoints(steps):
        wanted = _advance64(wanted, tokens, done, step)
        found.append(Point(step, relative_error(states[step], wanted)))
        done = step
    return found


def _advance64(state: Tensor, tokens: LayerRows, first: int, last: int) -> Tensor:
    """The float64 state [1, HV, K, V] after tokens first to last - 1."""
    group = tokens.v.shape[1] // tokens.k.shape[1]
    k = tokens.k[first:last].double().repeat_interleave(group, 1)
    v, g, beta = (x[first:last].double() for x in (tokens.v, tokens.g, tokens.beta))
    for i in range(last - first):
        state, _ = step64(state, k[i : i + 1], v[i : i + 1], g[i : i + 1], beta[i : i + 1])
    return state


def _kernel_states(shape: Shape, choice: Choice, tokens: LayerRows, state: Tensor, steps: int) -> dict[int, Tensor]:
    """States [1, HV, K, V] at the checkpoints, by the kernel."""
    H, HV, K, V = shape.heads, shape.value_heads, shape.key_width, shape.value_width
    device, dtype = state.device, tokens.k.dtype
    pool = FactorPool.empty(1, 2 * ROWS_OF_A_PASS, H, HV, K, V, dtype, device)
    rows = LayerRows.empty(ROWS_OF_A_PASS, H, HV, K, V, dtype, device)
    o, launch = torch.empty_like(rows.v), launch_of(choice, shape, _BUCKET, device)
    found, done, waiting, bank = {}, 0, range(0), 0
    ends = set(checkpoints(steps))
    batches: dict[tuple[range, range], PassBatch] = {}
    for length in spans(steps, ROWS_OF_A_PASS):
        own = range(bank, bank + length)
        if (own, waiting) not in batches:
            batches[own, waiting] = _batch(own, waiting, device)
        for place, x in zip(rows, tokens, strict=True):
            place[:length] = x[done : done + length]
        pool.k[0, bank : bank + length], pool.g[0, bank : bank + length] = rows.k[:length], rows.g[:length]
        launch(rows, state, pool, batches[own, waiting], o)
        done, waiting, bank = done + length, own, ROWS_OF_A_PASS - bank
        if done in ends:
            found[done] = _flushed(state, pool, waiting)
    return found


def _batch(own: range, waiting: range, device: torch.device) -> PassBatch:
    batch = PassBatch(_BUCKET, device)
    batch.fill([SessionPass(slot=0, topology=chain(len(own)), pool_rows=own, pending=waiting)])
    return batch


def _flushed(state: Tensor, pool: FactorPool, waiting: range) -> Tensor:
    """A copy of the state with the waiting factors in it."""
    copy, device = state.clone(), state.device
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    pending = torch.tensor([list(waiting)], dtype=torch.int32, device=device)
    flush(copy, pool, slot, pending, torch.full_like(slot, len(waiting)))
    return copy
