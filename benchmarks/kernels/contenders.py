"""What is timed: our kernels with the deferred commit, with a stand-alone one, and the rivals with snapshots.

Every contender verifies one pass layer by layer and then commits: `verify` runs for all layers, then `commit` once for
all of them, as in a real pass, where the verdict is known only after the last layer. A deferred commit is part of
`verify`. Commits of the rivals take one launch for all layers, the least that they could.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specla.benchmarks.kernels.launch import launch_of, mode_of, name_of
from specla.benchmarks.kernels.problem import RING, Problem
from specla.benchmarks.kernels.rivals import COLUMNS, scatter_accepted, verify_snapshot
from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.selector import Choice

MEMORY_LIMIT = 40 << 30
"""Rivals that need more than this for a case are left out, and said to be."""


class Contender(Protocol):
    """One way to verify and commit a pass over all layers of a problem.

    Attributes:
        name: what tables call it.
        passes: passes of one cycle, after which everything repeats; 1 for all but the ring.
        deferred: whether `verify` starts by applying the pending factors, and `commit` does nothing.
        tolerance: the largest relative error of outputs and states that its arithmetic may have.
    """

    name: str
    passes: int
    deferred: bool
    tolerance: float

    def verify(self, layer: int, step: int) -> None:
        """Outputs of one layer in pass `step` of the cycle."""

    def commit(self, step: int) -> None:
        """All layers' accepted paths become state."""

    def outputs(self, layer: int) -> Tensor:
        """[R, HV, V] of the last `verify`, which was of that layer: all layers write to the same tensor."""

    def states(self, layer: int) -> Tensor:
        """[B, HV, K, V] after `commit`."""


class Ours:
    """One of our kernels with the deferred commit; with a ring, the state is stored only when no more factors fit."""

    deferred = True

    def __init__(self, problem: Problem, choice: Choice, *, ring: bool = False, output: torch.dtype | None = None):
        """Outputs are rounded to the model's dtype unless `output` is another."""
        self.name = name_of(choice) + (", ring" if ring else "")
        self.tolerance = 1e-5 if mode_of(choice) == "exact" else 1e-3
        self._problem = problem
        self._state = problem.state.clone()
        self._pool = FactorPool(
            problem.pool.k.clone(), problem.pool.u.clone(), problem.pool.g.clone(), problem.pool.x
        )  # nobody reads x here
        self.passes = RING // problem.pending if ring else 1
        waiting = [problem.pending * (step + 1) for step in range(self.passes)]
        self._batches = [
            problem.batch(groups=choice.groups, pending=count, write_state=count == waiting[-1]) for count in waiting
        ]
        self._o = _outputs(problem, output)
        self._launch = launch_of(choice, problem.shape, self._batches[0].bucket, problem.state.device)

    def verify(self, layer: int, step: int) -> None:
        """One launch."""
        pool = FactorPool(*(x[layer] for x in self._pool))
        rows, state, o = self._problem.rows, self._state[layer], self._o
        self._launch(rows, state, pool, self._batches[step], o)

    def commit(self, step: int) -> None:
        """Deferred: nothing."""

    def outputs(self, layer: int) -> Tensor:
        """[R, HV, V]."""
        return self._o

    @property
    def pool(self) -> FactorPool:
        """Of all layers: [L, B, POOL_ROWS, ...]."""
        return self._pool

    def factors(self, layer: int) -> Tensor:
        """u of the rows, float32 [R, HV, V]."""
        return torch.cat([self._pool.u[layer, b, RING : RING + len(t)] for b, t in enumerate(self._problem.topologies)])

    def states(self, layer: int) -> Tensor:
        """With the pending factors."""
        return self._state[layer]


class StandAlone(Ours):
    """One of our kernels without pending factors, and a commit of its own: the accepted factors, in one more launch."""

    deferred = False

    def __init__(self, problem: Problem, choice: Choice, *, output: torch.dtype | None = None):
        """As `Ours`."""
        super().__init__(problem, choice, output=output)
        self.name += ", stand-alone commit"
        self._batches = [problem.batch(groups=choice.groups, pending=0, write_state=False)]
        device = problem.state.device
        self._accepted = torch.tensor(
            [[RING + r for r in p] for p in problem.accepted], dtype=torch.int32, device=device
        )
        self._count = torch.full((problem.sessions,), problem.pending, dtype=torch.int32, device=device)

    def commit(self, step: int) -> None:
        """One launch for all layers."""
        flush(self._state, self._pool, self._batches[0].slot, self._accepted, self._count)


class Snapshots:
    """A whole state stored for every row; trees read the parent's back."""

    passes, deferred, tolerance = 1, False, 1e-5

    def __init__(self, problem: Problem, *, tree: bool, columns: int = COLUMNS[0], output: torch.dtype | None = None):
        """`tree` false is for chains alone; a program has `columns` of V."""
        self.name = self.name_of(tree=tree, columns=columns)
        self._problem, self._tree, self._columns = problem, tree, columns
        self._state = problem.state.clone()
        rows = problem.rows.k.shape[0]
        self._snapshots = torch.empty(problem.layers, rows, *problem.state.shape[2:], device=problem.state.device)
        self._batch = problem.batch(groups=1, pending=0, write_state=False)
        last = [first + path[-1] for first, path in zip(problem.first_rows, problem.accepted, strict=True)]
        self._last = torch.tensor(last, dtype=torch.int32, device=problem.state.device)
        self._o = _outputs(problem, output)

    @staticmethod
    def name_of(*, tree: bool, columns: int) -> str:
        """As in the tables."""
        return f"{'parent reload' if tree else 'serial'}, snapshots, tiles of {columns}"

    @staticmethod
    def bytes(problem: Problem) -> int:
        """Memory that the snapshots take."""
        return problem.layers * problem.rows.k.shape[0] * problem.shape.state_bytes

    def verify(self, layer: int, step: int) -> None:
        """One launch."""
        rows, o = self._problem.rows, self._o
        verify_snapshot(
            rows, self._state[layer], self._snapshots[layer], self._batch, o, tree=self._tree, columns=self._columns
        )

    def commit(self, step: int) -> None:
        """One launch for all layers."""
        scatter_accepted(self._state, self._snapshots, self._batch.slot, self._last)

    def outputs(self, layer: int) -> Tensor:
        """[R, HV, V]."""
        return self._o

    def states(self, layer: int) -> Tensor:
        """After the copy."""
        return self._state[layer]


def _outputs(problem: Problem, dtype: torch.dtype | None) -> Tensor:
    """One output tensor, which the layers write to one after the other; poisoned: [R, HV, V]."""
    return torch.full_like(problem.rows.v, float("nan"), dtype=dtype or problem.rows.v.dtype)
