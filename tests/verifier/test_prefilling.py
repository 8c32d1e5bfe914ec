"""Pieces of prompts: where they begin and end, which go together, and what a release between begin and end leaves."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from generations import GREEDY, engine_of

from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.backend import Chunk
from specla.verifier_service.cpu_backend import CpuBackend, FinishedChunks
from specla.verifier_service.engine import Engine
from specla.verifier_service.session import Session
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.gated_deltanet import TargetWeights

CHUNK = 48


class TakesCompany(CpuBackend):
    """Up to a hundred tokens at once."""

    def __init__(self, weights: TargetWeights) -> None:
        super().__init__(weights, StateStore(weights.config, 4))
        self.runs: list[list[int]] = []

    def goes_together(self, tokens: Sequence[int]) -> bool:
        return sum(tokens) <= 100

    def run_chunks(self, chunks: Sequence[Chunk]) -> FinishedChunks:
        self.runs.append([len(chunk.tokens) for chunk in chunks])
        return super().run_chunks(chunks)


@pytest.fixture
def made(tiny_target: Path) -> tuple[Engine, TakesCompany]:
    plain = engine_of(tiny_target, prefill_chunk=CHUNK)
    backend = TakesCompany(cast(TargetWeights, plain.target.weights))
    return Engine(plain.config, backend, plain.target), backend


def open_with(engine: Engine, tokens: int) -> Session:
    return engine.open(b"", [(7 * i) % 300 for i in range(tokens + 1)], [], GREEDY, Stopping(max_tokens=4))


def test_chunks_go_together_as_the_backend_allows(made: tuple[Engine, TakesCompany]) -> None:
    engine, backend = made
    sessions = [open_with(engine, tokens) for tokens in (48, 90, 20, 40)]  # the third is short: a chain
    running = engine.begin_prefill(sessions)
    assert running.sessions == sessions[:2], "48 and 48 fit, 40 more do not"
    assert [session.run_len for session in sessions] == [0, 0, 0, 0], "nobody moves on before the end"
    assert engine.end_prefill(running) == 96
    assert [session.run_len for session in sessions] == [48, 48, 0, 0]
    assert sessions[0].ready
    assert engine.end_prefill(engine.begin_prefill([sessions[2], sessions[3]])) == 20, "a chain goes alone"
    assert engine.end_prefill(engine.begin_prefill([sessions[3], sessions[1]])) == 82
    assert all(session.ready for session in sessions)
    assert backend.runs == [[48, 48], [40, 42]]
    for session in sessions:
        engine.release(session)


@pytest.mark.parametrize("tokens", [20, 40])
def test_a_session_released_meanwhile_moves_nowhere(made: tuple[Engine, TakesCompany], tokens: int) -> None:
    engine, _ = made
    session, other = open_with(engine, tokens), open_with(engine, 40)
    running = engine.begin_prefill([session, other])
    engine.release(session)
    engine.end_prefill(running)
    assert session.run_len == 0
    assert other.ready == (tokens == 40)
    engine.release(other)


def test_the_text_is_the_same_alone_and_in_company(made: tuple[Engine, TakesCompany]) -> None:
    engine, _ = made
    found = []
    for company in (False, True):
        sessions = [open_with(engine, 90), *([open_with(engine, 45)] if company else [])]
        while not sessions[0].ready:
            engine.end_prefill(engine.begin_prefill([x for x in sessions if not x.ready]))
        backend = cast(CpuBackend, engine.backend)
        slot = sessions[0].slot
        assert slot is not None
        found.append(backend.store.recurrent_state[slot].clone())
        for session in sessions:
            engine.release(session)
    assert bool((found[0] == found[1]).all())
