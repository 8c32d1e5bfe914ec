"""One case: so many sessions with trees of so many rows, pass after pass as the engine would run them.

What a pass has to commit, and whether it stores the states, follows the backend's own rule. That makes a cycle of a
few different passes (plain decoding stores once in five), each a captured graph of its own; a sample is the time of
whole cycles over their passes. Nothing between two passes is counted: that is the host's part, which is measured
apart (host.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.benchmarks.kernels.timing import HEAD_START
from specla.benchmarks.kernels.topologies import eagle_like, tree
from specla.kernels.gpu.adjusting import LogitEntries
from specla.kernels.gpu.factor_pool import PoolRows
from specla.kernels.gpu.pass_batch import SessionPass, stores
from specla.kernels.gpu.selector import Choice, LayerShape, Mode, Selector
from specla.kernels.sampling import RowSampling, SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.verifier_service.gpu.buckets import MOST_PENDING, PENDING, bucket_of, worth_waiting
from specla.verifier_service.gpu.pass_run import PassKey, PassRun
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuWeights

ACCEPTED = 3
"""Rows that a pass over a tree accepts, the root included: three tokens with the bonus."""

SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
_SMALL = (4, 4, 8)  # branching, depth and rows of what is too small for an EAGLE-like tree
_LEAST_MS = 4.0  # of one sample


@dataclass(frozen=True)
class Case:
    """What is timed."""

    sessions: int
    rows: int
    mode: Mode

    @property
    def name(self) -> str:
        """As in the tables."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.sessions} session{'s' if self.sessions > 1 else ''} x {rows}"

    @property
    def topology(self) -> Topology:
        """Of every session."""
        if self.rows == 1:
            return Topology.root_only()
        return tree(*_SMALL) if self.rows == _SMALL[2] else eagle_like(self.rows)


class Step(NamedTuple):
    """One pass of a cycle, for any session."""

    pool_rows: list[int]
    pending: list[int]
    history: list[int]
    write_state: bool


def steps_of(topology: Topology, pool: int, taps: int, worth: int) -> list[Step]:
    """The passes of one cycle once it repeats, by the backend's rule.

    Args:
        topology: of every pass.
        pool: rows of a session's pool.
        taps: of the convolution.
        worth: how many accepted rows are worth waiting.
    """
    rows, accepted = PoolRows(pool, taps), min(ACCEPTED, len(topology))
    found: list[Step] = []
    count, depth = len(topology), len(topology.levels)
    while True:
        pending = list(rows.pending)
        write = stores(len(pending), depth, count, pool, PENDING, MOST_PENDING, worth)
        taken = rows.take(count)
        found.append(Step(taken, pending, list(rows.history), write))
        if write:
            rows.flushed()
        rows.accept(taken[:accepted], state_written=False)
        stored = [i for i, step in enumerate(found) if step.write_state]
        if len(stored) == 3:  # two whole cycles are behind: the second has the window of committed rows
            return found[stored[0] + 1 : stored[1] + 1] if stored[0] else found[stored[1] + 1 : stored[2] + 1]


class Bench(NamedTuple):
    """What all cases share."""

    weights: GpuWeights
    store: GpuStore
    selector: Selector
    entries: LogitEntries
    pool: Any

    @classmethod
    def make(cls, weights: GpuWeights, selector: Selector, sessions: int, tree_rows: int, total_rows: int) -> Bench:
        """Room for the largest case; states and pools hold random numbers of a trained model's size."""
        config, device = weights.config, weights.device
        store = GpuStore(config, sessions, tree_rows, MOST_PENDING, weights.dtype, device)
        drawn = torch.Generator(device).manual_seed(0)
        store.states.normal_(generator=drawn).mul_(0.1)
        for x in store.pools:
            x.normal_(generator=drawn).mul_(0.05)
        store.pools.g.abs_().neg_()
        entries = LogitEntries(total_rows, config.vocab_size, 1024, device)
        return cls(weights, store, selector, entries, torch.cuda.graph_pool_handle())

    def choose(self, case: Case) -> Choice:
        """The kernel that the selector gives the case."""
        config = self.weights.config
        shape = LayerShape(config.head_dim, config.head_v_dim, config.value_heads)
        return self.selector.choose(
            case.mode, shape, [case.topology] * case.sessions, pending=PENDING, dtype=self.weights.dtype
        )

    def key(self, case: Case) -> PassKey:
        """The bucket and the kernel."""
        choice, most = self.choose(case), case.sessions * case.rows
        taps = self.weights.config.conv_size
        return PassKey(bucket_of([case.topology] * case.sessions, most, taps, choice.groups), choice, True, ())

    def arena_of(self, key: PassKey) -> Tensor:
        """Memory for a key's passes."""
        weights = self.weights
        return torch.empty(key.arena_bytes(weights.config, weights.dtype), dtype=torch.uint8, device=weights.device)


class Cycle:
    """A case's passes, captured; see `specla.benchmarks.kernels.timing.in_turns`."""

    def __init__(self, name: str, runs: Sequence[PassRun]) -> None:
        """`runs` follow each other, over and over."""
        self.name, self._runs, self._cycles = name, runs, 1
        self.sample()
        self._cycles = max(1, math.ceil(_LEAST_MS * 1e3 / (self.sample() * len(runs))))

    def sample(self) -> float:
        """Microseconds of a pass."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START)
        begin.record()
        for _ in range(self._cycles):
            for run in self._runs:
                run.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / (self._cycles * len(self._runs))


def fill(run: PassRun, case: Case, step: Step, tokens: int) -> None:
    """Puts a step's pass into a run's inputs."""
    topology, count = case.topology, case.sessions * case.rows
    run.buffers.batch.fill(
        [
            SessionPass(
                slot=slot,
                topology=topology,
                pool_rows=step.pool_rows,
                pending=step.pending,
                history=step.history,
                write_state=step.write_state,
            )
            for slot in range(case.sessions)
        ]
    )
    run.buffers.put_tokens([(7 * row + 1) % tokens for row in range(count)])
    run.buffers.put_sampling(
        RowSampling(
            sessions=[SessionSampling(SAMPLING, tokens) for _ in range(case.sessions)],
            row_session=[session for session in range(case.sessions) for _ in range(case.rows)],
            positions=[100 + int(depth) for _ in range(case.sessions) for depth in topology.depth],
            parent_row=[-1] * count,
            row_tokens=[1] * count,
        )
    )


def cycle_of(bench: Bench, case: Case) -> Cycle:
    """Captures a case."""
    key = bench.key(case)
    arena = bench.arena_of(key)
    runs = []
    worth, pool = worth_waiting(serial=key.serial), bench.store.pools.g.shape[2]
    for step in steps_of(case.topology, pool, bench.weights.config.conv_size, worth):
        run = PassRun(bench.weights, bench.store, key, arena, bench.entries, bench.pool)
        fill(run, case, step, bench.weights.config.vocab_size)
        runs.append(run)
    return Cycle(case.name, runs)
