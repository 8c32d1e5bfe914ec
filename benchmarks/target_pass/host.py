"""The host's part of an iteration: what the GPU waits for between two passes of an engine in this process.

An engine runs passes back to back: items in, tokens out, sessions moved on. What an iteration takes beyond the pass
itself is on the critical path. The same passes are timed alone on the device, between the iterations: replayed back to
back, so that nothing waits for the host. Those that store states take some 50 us longer than others, so each iteration
is compared with passes of its own kind.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import NamedTuple

import torch

from specla.benchmarks.target_pass.cases import SAMPLING, Case, Cycle
from specla.kernels.gpu.selector import Mode
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.passes import PassItem
from specla.verifier_service.session import Session
from specla.verifier_service.target import Target

PASSES = 120
_WARMING = 20
_ALONE = 6  # times of passes of one kind


class Iterations(NamedTuple):
    """Microseconds."""

    whole: list[float]
    """From call to call."""
    alone: list[float]
    """The passes alone, on the device."""
    host: list[float]
    """Each iteration less the passes alone that store as many states."""


def engine_of(weights: GpuWeights, mode: Mode, *, sessions: int, max_rows: int) -> Engine:
    """An engine on weights that are loaded already."""
    target = Target(
        config=weights.config,
        weights=weights,
        model_name="random weights",
        numerics_id="random weights",
        tokenizer_hash="",
    )
    config = VerifierConfig(
        device="cuda",
        numerics=mode,
        max_sessions=sessions,
        max_rows=max_rows,
        max_batch_rows=max(256, sessions * max_rows),
    )
    return Engine(config, target=target)


@torch.inference_mode()
def iterations(engine: Engine, case: Case, passes: int = PASSES) -> Iterations:
    """Of consecutive passes, in the mode that a scheduler runs them in."""
    assert isinstance(engine.backend, GpuBackend)
    engine.backend.prepare([case.topology] * case.sessions)  # else they run on what the start-up proof was made for
    items = [_item(engine, case, seed) for seed in range(case.sessions)]
    whole, alone = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    pending = engine.backend.store.in_use.words[:, 0]
    for number in range(_WARMING + passes):
        before, begun = pending.copy(), time.perf_counter()
        engine.run_pass(items)
        taken = (time.perf_counter() - begun) * 1e6
        stored = int((pending <= before).sum())
        if number >= _WARMING:
            whole[stored].append(taken)
            if len(alone[stored]) < _ALONE:
                run = engine.backend.pass_of([case.topology] * case.sessions)
                alone[stored].append(Cycle("", [run]).sample())
    for item in items:
        engine.release(item.session)
    host = [us - statistics.median(alone[stored]) for stored, times in whole.items() for us in times]
    return Iterations([us for times in whole.values() for us in times], [us for x in alone.values() for us in x], host)


def _item(engine: Engine, case: Case, seed: int) -> PassItem:
    """A session that never ends, with candidates that are hardly ever right."""
    session: Session = engine.open(b"", [1, 2, 3, seed % 1000], [], SAMPLING, Stopping(max_tokens=1 << 30))
    while not engine.prefill(session, 1 << 20):
        pass
    tokens = [(31 * (seed + row) + 5) % 32_000 for row in range(case.rows - 1)]
    return PassItem(session, case.topology, tokens)
