"""Random rows and trees for the tests of the recurrence."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.kernels.topology import Topology


class Rows(NamedTuple):
    """Inputs of a pass, float32: qk [R, 2, H, K], v [R, HV, V], g and beta [R, HV]."""

    qk: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def take(self, rows: Sequence[int]) -> "Rows":
        index = torch.tensor(list(rows))
        return Rows(*(x.index_select(0, index) for x in self))


def chain(rows: int) -> Topology:
    return Topology.from_wire([i - 1 for i in range(rows - 1)])


def random_tree(rng: random.Random, rows: int) -> Topology:
    """From bushy to chain-like, in any order in which parents come first."""
    reach = rng.choice([1, 2, 4, rows])
    return Topology.from_wire([rng.randint(max(-1, i - reach), i - 1) for i in range(rows - 1)])


def random_rows(generator: torch.Generator, rows: int, heads: int, value_heads: int, K: int, V: int) -> Rows:
    """Normalised q and k (q scaled by K^-1/2), decays from mild to strong, beta from 0 to 2."""
    qk = torch.nn.functional.normalize(torch.randn(rows, 2, heads, K, generator=generator), dim=-1)
    qk[:, 0] *= K**-0.5
    g = -torch.exp(4 * torch.randn(rows, value_heads, generator=generator) - 2)
    beta = 2 * torch.rand(rows, value_heads, generator=generator)
    return Rows(qk, torch.randn(rows, value_heads, V, generator=generator), g, beta)


def rms_ratio(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    difference = (got.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp(min=1e-30))
