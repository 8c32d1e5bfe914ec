"""Times the host's part of a pass: filling its arrays with trees never seen before, and with the same ones again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from specla.benchmarks.kernels.problem import RING
from specla.benchmarks.kernels.topologies import random_tree
from specla.benchmarks.report import Row
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass

CASE = "the host's part of a pass"
SIZES = ((1, 64), (16, 16), (64, 16))
"""Sessions, and rows of each."""

GROUPS = 4
SAMPLES = 50
_WARMING = 3


def measure_host(device: str = "cuda") -> list[Row]:
    """Microseconds of `PassBatch.fill`, the start of its copy included; the device has nothing else to do."""
    found = []
    for sessions, rows in SIZES:
        bucket = Bucket(sessions=sessions, rows=sessions * rows, tree_rows=rows, pending=RING, groups=GROUPS)
        batch = PassBatch(bucket, device)
        passes = [_pass(sessions, rows, seed) for seed in range(_WARMING + SAMPLES)]
        name = f"{sessions} session{'s' if sessions > 1 else ''} x {rows} rows"
        for kind, contents in (("fresh", passes), ("repeated", passes[-1:] * len(passes))):
            found.append(Row.of(CASE, f"fill, {kind} trees, {name}", _timed(batch, contents), "us"))
    return found


def _pass(sessions: int, rows: int, seed: int) -> list[SessionPass]:
    """Random trees, all different, each with a few pending factors."""
    return [
        SessionPass(
            slot=slot,
            topology=random_tree(rows, 1000 * seed + slot),
            pool_rows=list(range(RING, RING + rows)),
            pending=[0, 1, 2, 3],
            history=[1, 2, 3],
        )
        for slot in range(sessions)
    ]


def _timed(batch: PassBatch, passes: Sequence[Sequence[SessionPass]]) -> list[float]:
    """Microseconds of each, without the first few."""
    samples = []
    for sessions in passes:
        if batch.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        batch.fill(sessions)
        samples.append((time.perf_counter() - begun) * 1e6)
    return samples[_WARMING:]
