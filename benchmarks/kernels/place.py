"""Times every choice at one place of the selector's grid, tree after tree, with graphs that are captured once.

As in a server, a graph belongs to a bucket and the tree is data: a new tree is filled into the arrays that the captured
launches read. So a place costs one capture a choice, however many trees it is timed on.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

import torch

from specla.benchmarks.kernels.candidates import capture
from specla.benchmarks.kernels.inputs import Inputs
from specla.benchmarks.kernels.launch import launch_of, name_of
from specla.benchmarks.kernels.problem import POOL_ROWS, RING
from specla.benchmarks.kernels.shapes import Shape, bytes_apart
from specla.benchmarks.kernels.timing import Work, in_turns, layers_needed
from specla.benchmarks.kernels.topologies import accepted_rows
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.gpu.selector import Choice
from specla.kernels.topology import Topology

_MANY = 8
"""Sessions that take the serial kernel's form for many programs, for every shape that is timed."""

_LEAST_ROWS = 4
"""Rows of the smallest trees that are timed: with these, too, layers must not find their data in the cache."""


class PlaceTimer:
    """Graphs of all choices for sessions x trees of up to `rows` rows, over layers enough for cold caches."""

    def __init__(
        self,
        shape: Shape,
        sessions: int,
        rows: int,
        choices: Collection[Choice],
        *,
        l2: int,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ):
        """Captures; choices that the GPU cannot hold are left out, and named in `refused`.

        Args:
            shape: of the layers.
            sessions: of the pass; all have the same tree.
            rows: of the bucket.
            choices: what to time.
            l2: bytes of the L2 cache.
            device: where to run.
            dtype: the model's.
        """
        self._sessions, self._device = sessions, device
        draw = Inputs(shape, dtype=dtype, device=device, seed=0)
        apart = bytes_apart(shape, sessions=sessions, rows=sessions * _LEAST_ROWS, pending=_LEAST_ROWS)
        layers = layers_needed(apart, l2)
        self._rows, self._state = draw.rows(sessions * rows), draw.states(layers, sessions)
        self._o = torch.empty_like(self._rows.v)
        sizes = (shape.heads, shape.value_heads, shape.key_width, shape.value_width)
        flat = FactorPool.empty(layers * sessions, POOL_ROWS, *sizes, dtype, device)
        self._pool = FactorPool(*(x.view(layers, sessions, *x.shape[1:]) for x in flat))
        self._pool.k.copy_(draw.keys(1, 1, POOL_ROWS))
        self._pool.u.copy_(draw.normal(1, 1, POOL_ROWS, shape.value_heads, shape.value_width))
        self._pool.g.copy_(draw.decays(1, 1, POOL_ROWS))
        self._batches: dict[int, PassBatch] = {}
        for groups in dict.fromkeys(choice.groups for choice in choices):
            bucket = Bucket(sessions=sessions, rows=sessions * rows, tree_rows=rows, pending=RING, groups=groups)
            self._batches[groups] = PassBatch(bucket, device)
        self._fill(Topology.root_only())
        self._graphs, self.refused = capture({choice: self._work(choice, shape, layers) for choice in choices})

    @property
    def choices(self) -> list[Choice]:
        """Those that are timed."""
        return list(self._graphs)

    def samples(
        self, topology: Topology, *, rounds: int, among: Collection[Choice] | None = None
    ) -> dict[Choice, list[float]]:
        """Microseconds of a layer by choice, a sample a round, in turns.

        The deferred commit of half the deepest path (`accepted_rows`, at most RING) is included, and that the states of
        every third session are stored, a single one's always: passes of an engine store one of two to five.
        """
        self._fill(topology)
        timed = self.choices if among is None else list(among)
        found = in_turns([self._graphs[choice] for choice in timed], rounds)
        return {choice: found[name_of(choice)] for choice in timed}

    def medians(self, topology: Topology, *, rounds: int) -> dict[Choice, float]:
        """Microseconds of a layer by choice."""
        return {choice: statistics.median(samples) for choice, samples in self.samples(topology, rounds=rounds).items()}

    def _fill(self, topology: Topology) -> None:
        pending = min(accepted_rows(topology), RING)
        sessions = [
            SessionPass(
                slot=slot,
                topology=topology,
                pool_rows=range(RING, RING + len(topology)),
                pending=range(pending),
                write_state=slot % 3 == 0,
            )
            for slot in range(self._sessions)
        ]
        for batch in self._batches.values():
            batch.fill(sessions)

    def _work(self, choice: Choice, shape: Shape, layers: int) -> Work:
        batch = self._batches[choice.groups]
        launch = launch_of(choice, shape, batch.bucket, self._state.device)

        def run(count: int = layers) -> None:
            for layer in range(count):
                pool = FactorPool(*(x[layer] for x in self._pool))
                launch(self._rows, self._state[layer], pool, batch, self._o)

        return Work(name_of(choice), layers, lambda: run(1), run)


def warm(shape: Shape, rows: int, choice: Choice, device: str = "cuda") -> None:
    """Compiles one choice for a bucket of so many rows, whatever the number of sessions: for few and for many."""
    for sessions in (1, _MANY) if choice == Choice("serial") else (1,):
        PlaceTimer(shape, sessions, rows, [choice], l2=0, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
