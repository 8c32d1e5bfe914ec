"""Pieces of prompts: where they begin and end, which go together, and what a release between begin and end leaves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from generations import GREEDY, engine_of
from torch import Tensor
from verifier_harness import Coordinator, HandClock, new_session_id

from specla.kernels.topology import Topology
from specla.v1 import verifier_pb2
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.backend import Chunk
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.cpu_backend import CpuBackend, FinishedChunks
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FeatureWindow
from specla.verifier_service.passes import PassItem, PassResult, RunningPass
from specla.verifier_service.scheduler import Scheduler
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


class Noted(NamedTuple):
    """Chunks whose end is noted by who waits for it."""

    streams: list[list[Tensor]]
    number: int
    waited: list[int]

    def wait(self) -> list[list[Tensor]]:
        self.waited.append(self.number)
        return self.streams


class RunsByItself(TakesCompany):
    """As if on a device of its own."""

    overlaps = True

    def __init__(self, weights: TargetWeights) -> None:
        super().__init__(weights)
        self.waited: list[int] = []

    def run_chunks(self, chunks: Sequence[Chunk]) -> Noted:  # type: ignore[override]
        return Noted(super().run_chunks(chunks).wait(), len(self.runs), self.waited)


@pytest.fixture
def ahead(made: tuple[Engine, TakesCompany]) -> tuple[Engine, RunsByItself]:
    engine, _ = made
    backend = RunsByItself(cast(TargetWeights, engine.target.weights))
    return Engine(engine.config, backend, engine.target), backend


def test_the_next_chunk_of_a_prompt_is_begun_before_the_last_has_ended(ahead: tuple[Engine, RunsByItself]) -> None:
    engine, backend = ahead
    session = open_with(engine, 3 * CHUNK + 10)
    for chunks, waited in ((1, []), (2, []), (3, [3])):
        engine.end_prefill(engine.begin_prefill([session]))
        assert session.run_len == chunks * CHUNK
        assert backend.waited == waited, "a chain reads the last one's"
    engine.end_prefill(engine.begin_prefill([session]))
    assert session.ready
    engine.release(session)


def test_a_chunk_is_waited_for_where_somebody_decodes_or_reads_its_streams(ahead: tuple[Engine, RunsByItself]) -> None:
    engine, backend = ahead
    keep = FeatureWindow((0,), 4 * CHUNK)
    reads = engine.open(b"", list(range(2 * CHUNK + 1)), [], GREEDY, Stopping(max_tokens=4), keep)
    engine.end_prefill(engine.begin_prefill([reads]))
    assert backend.waited == [1]
    engine.release(reads)
    decodes, other = open_with(engine, 20), open_with(engine, 2 * CHUNK)
    engine.end_prefill(engine.begin_prefill([decodes]))
    assert decodes.ready
    engine.end_prefill(engine.begin_prefill([other]))
    assert backend.waited == [1, 2]
    engine.release(decodes)
    engine.release(other)


def test_a_pass_begins_behind_what_is_under_way(ahead: tuple[Engine, RunsByItself]) -> None:
    engine, backend = ahead
    long = open_with(engine, 2 * CHUNK)
    engine.end_prefill(engine.begin_prefill([long]))
    assert backend.waited == []
    short = open_with(engine, 0)
    assert short.ready, "its only token is the first root"
    running = engine.begin_pass([PassItem(short, Topology.root_only())])
    assert backend.waited == [1]
    (result,) = engine.end_pass(running)
    assert result.error is None
    engine.run_pass([PassItem(short, Topology.root_only())])
    assert backend.waited == [1], "once is enough"
    engine.release(short)
    engine.release(long)


class TakesLong(Noted):
    """A second, by a clock turned by hand."""

    def wait(self) -> list[list[Tensor]]:
        CLOCK.now += 1.0
        return super().wait()


class Watched(RunsByItself):
    """Chunks take long, and somebody is called when one is begun."""

    begun: Callable[[], None] | None = None

    def run_chunks(self, chunks: Sequence[Chunk]) -> Noted:  # type: ignore[override]
        if self.begun is not None:
            self.begun()
        return TakesLong(*super().run_chunks(chunks))


CLOCK = HandClock()


class Clocked(Engine):
    """Its passes take 10 ms."""

    def end_pass(self, running: RunningPass) -> list[PassResult]:
        CLOCK.now += 0.01
        return super().end_pass(running)


def test_what_is_under_way_is_none_of_a_passs_time(made: tuple[Engine, TakesCompany]) -> None:
    """A prompt is given up while a chunk of it runs, and a session comes that has its first pass at once."""
    plain, _ = made
    backend = Watched(cast(TargetWeights, plain.target.weights))
    engine = Clocked(plain.config, backend, plain.target)
    with Scheduler(engine, engine.config, CLOCK).start(PassTimes({1: 0.01})) as verifier:
        coordinator, long, short = Coordinator(verifier), new_session_id(), new_session_id()

        def give_up() -> None:
            coordinator.command(long, cancel=verifier_pb2.Cancel())
            coordinator.start([5], max_tokens=1, session_id=short)

        backend.begun = give_up
        coordinator.start([5] * (2 * CHUNK + 1), session_id=long)
        coordinator.finish(short)
        assert backend.waited == [1]
        assert verifier._passes.times.predict(1) == pytest.approx(0.01)
