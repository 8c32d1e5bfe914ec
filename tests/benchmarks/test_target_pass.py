"""Whole-pass benchmark without a GPU: the cycle of passes that a case repeats, its goals, its weights."""

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from specla.benchmarks.target_pass.cases import ACCEPTED, Case, steps_of
from specla.benchmarks.target_pass.goals import LIBRARY, OURS, Measured, goals
from specla.benchmarks.target_pass.model import RandomTensors
from specla.kernels.gpu.pass_batch import stores
from specla.verifier_service.gpu.buckets import MOST_PENDING, PENDING, worth_waiting
from specla.verifier_service.gpu.store import pool_rows
from specla.verifier_service.targets.config import GatedDeltaNetConfig

TAPS = 4
SMALL = GatedDeltaNetConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2, head_dim=16, expand_v=1.0, intermediate_size=64
)


@pytest.mark.parametrize("worth", [worth_waiting(serial=True), worth_waiting(serial=False)])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_a_cycle_is_what_the_backend_would_run_over_and_over(rows: int, worth: int) -> None:
    topology = Case(1, rows, "exact").topology
    assert len(topology) == rows
    pool = pool_rows(64, MOST_PENDING, TAPS)
    steps = steps_of(topology, pool, TAPS, worth)
    accepted = min(ACCEPTED, rows)
    assert [step.write_state for step in steps] == [False] * (len(steps) - 1) + [True]
    for i, step in enumerate(steps):
        assert len(step.pool_rows) == rows
        assert set(step.pool_rows).isdisjoint([*step.pending, *step.history])
        assert len(step.pending) == (i + 1) * accepted <= PENDING
        assert step.write_state == stores(
            len(step.pending), len(topology.levels), rows, pool, PENDING, MOST_PENDING, worth
        )
        assert step.pending[-accepted:] == steps[i - 1].pool_rows[:accepted] or i == 0
        assert -1 not in step.history


@pytest.mark.parametrize(("rows", "serial", "once_in"), [(1, True, 5), (1, False, 16), (16, True, 2), (16, False, 4)])
def test_how_often_a_state_is_stored(rows: int, serial: bool, once_in: int) -> None:
    """The more rows may wait, the more seldom; fewer where each of them takes its own time."""
    topology, worth = Case(1, rows, "exact").topology, worth_waiting(serial=serial)
    assert len(steps_of(topology, pool_rows(64, MOST_PENDING, TAPS), TAPS, worth)) == once_in


def test_goals_are_met_by_what_was_measured_alone() -> None:
    nothing = goals(Measured())
    assert all(math.isnan(goal.got) and not goal.met for goal in nothing)
    passes = {
        Case(1, 1, "fast").name: [800.0, 900.0, 1000.0],
        Case(1, 16, "fast").name: [800.0, 990.0, 1200.0],
        Case(64, 1, "fast").name: [1000.0],
        Case(64, 8, "fast").name: [1500.0],
    }
    found = Measured(
        passes={"fast": passes},
        host={"fast": [50.0, 70.0, 55.0]},
        memory={"fast": 1.3},
        prefill={OURS: [2.0], LIBRARY: [3.0]},
    )
    by_name = {goal.name: (goal.got, goal.met) for goal in goals(found) if not math.isnan(goal.got)}
    assert {name.removesuffix(", fast"): got for name, got in by_name.items()} == {
        "one-token pass, 1 session": (0.9, False),
        "one-token pass, 1 session, at the least": (0.9, True),
        "16 rows over one-token pass, 1 session": (1.1, False),
        "64 sessions x 8 rows: 3 tokens a pass over plain decoding": (2.0, True),
        "host time on the critical path of an iteration, 1 session x 16 rows": (55.0, True),
        "memory a session at 16 rows over its bare state, 64 sessions": (1.3, True),
        "prefill, 8,192 tokens: the library's time over ours": (1.5, True),
    }
    assert [goal.name for goal in goals(found)] == [goal.name for goal in nothing]


def test_random_tensors_are_the_same_each_time() -> None:
    tensors, rounded = RandomTensors(SMALL, "cpu"), RandomTensors(SMALL, "cpu", torch.bfloat16)
    assert len(tensors) == len(list(tensors)) == len(set(tensors))
    name = "model.layers.0.attn.q_proj.weight"
    assert torch.equal(tensors[name], tensors[name])
    assert not torch.equal(tensors[name], tensors["model.layers.0.attn.k_proj.weight"])
    assert torch.equal(rounded[name], tensors[name].bfloat16().float())
    assert not torch.equal(rounded[name], tensors[name])
    assert torch.equal(rounded["model.layers.0.attn.A_log"], tensors["model.layers.0.attn.A_log"])
