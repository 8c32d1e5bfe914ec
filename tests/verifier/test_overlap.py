"""What the scheduler does while a pass runs: news of the pass before, sessions that come and go, and nothing wrong."""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from verifier_harness import PATIENCE_S, Coordinator, Drafter, HandClock

from specla.rpc.errors import InternalError, ServiceUnavailableError, SessionCancelledError
from specla.v1 import common_pb2, verifier_pb2
from specla.verifier_service import news, roster
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.engine import Engine
from specla.verifier_service.mailbox import Mailbox
from specla.verifier_service.passes import PassItem, PassResult, RunningPass
from specla.verifier_service.prefilling import RunningPrefill
from specla.verifier_service.scheduler import Scheduler
from specla.verifier_service.session import Session

PROMPT = [72, 101, 108, 108, 111]
TIMES = {1: 0.002, 2: 0.0021, 5: 0.0025, 9: 0.004, 17: 0.007}


class OverlappingEngine(Engine):
    """Its passes overlap with the host on any device, and a test may act while one runs."""

    running = False
    passes = 0
    while_running: Callable[[int], None] | None = None

    @property
    def overlaps(self) -> bool:
        return True

    def begin_pass(self, items: Sequence[PassItem]) -> RunningPass:
        begun = super().begin_pass(items)
        self.running = True
        self.passes += 1
        if self.while_running is not None:
            self.while_running(self.passes)
        return begun

    def end_pass(self, running: RunningPass) -> list[PassResult]:
        results = super().end_pass(running)
        self.running = False
        return results


@pytest.fixture
def engine(tiny_target: Path, device: str) -> OverlappingEngine:
    return OverlappingEngine(VerifierConfig(target=tiny_target, threads=1, max_sessions=3, device=device))


@pytest.fixture
def verifier(engine: OverlappingEngine) -> Iterator[Scheduler]:
    with Scheduler(engine, engine.config).start(PassTimes(TIMES)) as started:
        yield started


@pytest.fixture
def plain(tiny_target: Path, device: str) -> Iterator[Coordinator]:
    """A coordinator of a verifier whose passes do not overlap."""
    config = VerifierConfig(target=tiny_target, threads=1, max_sessions=3, device=device)
    with Scheduler(Engine(config), config).start(PassTimes(TIMES)) as verifier:
        yield Coordinator(verifier)


def sampling(**wishes: object) -> common_pb2.Sampling:
    return common_pb2.Sampling(temperature=0.9, seed=5, **wishes)


PASS_S = 0.0004


class CountedOverlappingEngine(OverlappingEngine):
    """Its passes take PASS_S, by a clock turned by hand."""

    clock: HandClock

    def end_pass(self, running: RunningPass) -> list[PassResult]:
        self.clock.now += PASS_S
        return super().end_pass(running)


@pytest.mark.parametrize(
    ("every_s", "counts"), [(0.0, [1] * 12), (PASS_S, [1] * 12), (2.5 * PASS_S, [1, 3, 3, 3, 2]), (1.0, [1, 11])]
)
def test_tokens_are_told_while_the_next_pass_runs(
    tiny_target: Path, device: str, monkeypatch: pytest.MonkeyPatch, every_s: float, counts: list[int]
) -> None:
    """One by one, none later than with the next pass; or of short passes several at a time, the last at once."""
    monkeypatch.setattr(news, "TELL_EVERY_S", every_s - 1e-9)
    config = VerifierConfig(target=tiny_target, threads=1, max_sessions=3, device=device)
    engine, clock, session = CountedOverlappingEngine(config), HandClock(), b"s" * 16
    engine.clock = clock
    told, ended = list[tuple[int, bool]](), threading.Event()

    class Watching(Coordinator):
        def _wake(self) -> None:
            if hasattr(self, "link"):
                fresh = self.link.take()
                self.items += fresh
                told.extend(
                    (len(event.committed.tokens), engine.running)
                    for event in fresh
                    if event.WhichOneof("event") == "committed"
                )
                if self.events(session, "finished"):
                    ended.set()
            super()._wake()

    with Scheduler(engine, config, clock).start(PassTimes(TIMES)) as verifier:
        coordinator = Watching(verifier)
        coordinator.start(PROMPT, max_tokens=12, session_id=session)
        assert ended.wait(PATIENCE_S)
        kinds = [event.WhichOneof("event") for event in coordinator.events(session)]
        assert kinds[-1] == "finished"
        assert set(kinds[2:-1]) == {"committed"}
        assert [count for count, _ in told] == counts
        assert [running for _, running in told] == [True] * (len(counts) - 1) + [False]  # no pass is behind the last


def test_what_is_answered_while_a_pass_runs_does_not_wait_for_its_end(
    engine: OverlappingEngine, verifier: Scheduler
) -> None:
    first, second, told = b"g" * 16, b"h" * 16, list[tuple[int, bool]]()

    class Watching(Coordinator):
        def _wake(self) -> None:
            super()._wake()
            with self._news:
                if self.events(first, "failed") and not told:
                    told.append((engine.passes, engine.running))

    coordinator = Watching(verifier)

    def cancel(passes: int) -> None:
        if passes == 4:
            coordinator.command(first, cancel=verifier_pb2.Cancel())

    engine.while_running = cancel
    for session in (first, second):
        coordinator.start(PROMPT, max_tokens=30, session_id=session)
    coordinator.finish(second)
    assert told == [(4, True)]


class WatchedPrefill(Engine):
    """Calls somebody before each piece of a prompt and behind each pass; its passes do not overlap."""

    before_piece: Callable[[Sequence[Session]], None] | None = None
    behind_pass: Callable[[], None] | None = None

    def begin_prefill(self, sessions: Sequence[Session]) -> RunningPrefill:
        if self.before_piece is not None:
            self.before_piece(sessions)
        return super().begin_prefill(sessions)

    def end_pass(self, running: RunningPass) -> list[PassResult]:
        results = super().end_pass(running)
        if self.behind_pass is not None:
            self.behind_pass()
        return results


def test_tokens_do_not_wait_for_a_piece_of_a_prompt_where_nothing_overlaps(tiny_target: Path) -> None:
    config = VerifierConfig(target=tiny_target, threads=1, max_sessions=3)
    engine, told = WatchedPrefill(config), list[tuple[int, int]]()
    passes = 0
    with Scheduler(engine, config).start(PassTimes(TIMES)) as verifier:
        coordinator, session = Coordinator(verifier), b"i" * 16

        def note(waiting: Sequence[Session]) -> None:
            with coordinator._news:
                told.append((passes, len(coordinator.tokens(session))))

        def come() -> None:
            nonlocal passes
            passes += 1
            if passes == 3:
                engine.before_piece = note
                coordinator.start(PROMPT * 20, max_tokens=2)

        engine.behind_pass = come
        coordinator.start(PROMPT, max_tokens=20, session_id=session)
        coordinator.finish(session)
    assert told
    assert all(found == count for count, found in told)


def test_a_long_prompt_is_not_starved_by_short_ones_that_come_and_go(tiny_target: Path) -> None:
    """However many wait in a turn: here as many as a turn's number is not divided by."""
    config = VerifierConfig(target=tiny_target, threads=1, max_sessions=9, prefill_chunk=48)
    engine, turns = WatchedPrefill(config), list[bool]()
    with Scheduler(engine, config).start(PassTimes(TIMES)) as verifier:
        coordinator = Coordinator(verifier)

        def come(waiting: Sequence[Session]) -> None:
            turns.append(waiting[0].prompt_len > 100)
            if len(turns) < 50:
                wanted = next(n for n in range(2, 9) if (len(turns) + 1) % n)
                for _ in range(wanted - len(waiting) + (not turns[-1])):
                    coordinator.start(PROMPT, max_tokens=1)

        engine.before_piece = come
        coordinator.finish(coordinator.start([5] * 481, max_tokens=1))
    of_the_long = [turn for turn, its in enumerate(turns) if its]
    assert len(of_the_long) == 10
    assert max(b - a for a, b in pairwise(of_the_long)) <= 5, "at most five wait"


def test_texts_are_those_of_passes_that_do_not_overlap(verifier: Scheduler, plain: Coordinator) -> None:
    coordinator = Coordinator(verifier)
    wishes = [sampling(), sampling(top_p=0.9, presence_penalty=0.5), sampling(top_logprobs=2)]
    found = [coordinator.start(PROMPT, max_tokens=20, sampling=wish) for wish in wishes]
    wanted = [plain.start(PROMPT, max_tokens=20, sampling=wish) for wish in wishes]
    for session, reference in zip(found, wanted, strict=True):
        assert coordinator.finish(session) == plain.finish(reference)
    logprobs = [event.committed.logprobs for event in coordinator.events(found[2], "committed")]
    assert sum(map(len, logprobs)) == 20


def test_a_session_cancelled_while_its_pass_runs(
    engine: OverlappingEngine, verifier: Scheduler, plain: Coordinator
) -> None:
    """It ends at once, its slot goes to a session that starts in the same pass, and nobody's text changes."""
    coordinator = Coordinator(verifier)
    ids = [b"a" * 16, b"b" * 16, b"c" * 16, b"d" * 16]
    other = [7, 8, 9, 10, 11, 12, 13]

    def cancel(passes: int) -> None:
        if passes == 6:
            coordinator.command(ids[0], cancel=verifier_pb2.Cancel())
            coordinator.start(other, max_tokens=9, session_id=ids[3], sampling=sampling())

    engine.while_running = cancel
    for session in ids[:3]:
        coordinator.start(PROMPT, max_tokens=30, session_id=session, sampling=sampling())
    assert isinstance(coordinator.failure(ids[0]), SessionCancelledError)
    kinds = [event.WhichOneof("event") for event in coordinator.events(ids[0])]
    assert kinds[-1] == "failed"  # no token comes behind it
    wanted = plain.finish(plain.start(PROMPT, max_tokens=30, sampling=sampling()))
    assert coordinator.tokens(ids[0]) == wanted[: len(coordinator.tokens(ids[0]))]
    assert coordinator.finish(ids[1]) == coordinator.finish(ids[2]) == wanted
    assert coordinator.finish(ids[3]) == plain.finish(plain.start(other, max_tokens=9, sampling=sampling()))
    assert engine.free_slots == 3


def test_a_deadline_that_passes_while_a_pass_runs_ends_the_session_behind_its_tokens(
    engine: OverlappingEngine, verifier: Scheduler
) -> None:
    coordinator = Coordinator(verifier)

    def pass_over(passes: int) -> None:
        if passes == 4:
            for live in verifier._roster:
                live.deadline = 0.0

    engine.while_running = pass_over
    session = coordinator.start(PROMPT, max_tokens=30)
    coordinator.failure(session)
    kinds = [event.WhichOneof("event") for event in coordinator.events(session)]
    assert kinds[-2:] == ["committed", "failed"]
    assert len(coordinator.tokens(session)) == 3  # of the passes before; that of the fourth is not told
    assert engine.free_slots == 3


def test_a_drafter_that_leaves_while_its_draft_is_verified(engine: OverlappingEngine, verifier: Scheduler) -> None:
    coordinator, drafter = Coordinator(verifier), Drafter(verifier)
    known = coordinator.finish(coordinator.start(PROMPT, max_tokens=20))
    session = coordinator.start(PROMPT, max_tokens=20, credit=0)
    drafter.attach(session, coordinator.attach_token(session))
    drafter.chain(session, PROMPT, known[:4])
    begun = engine.passes

    def revoke(passes: int) -> None:
        if passes == begun + 2:
            coordinator.command(session, revoke_attach=verifier_pb2.RevokeAttach())

    engine.while_running = revoke
    verifier.list_sessions()  # the draft is in
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=100))
    assert coordinator.finish(session) == known
    assert drafter.closed(session) == verifier_pb2.CLOSED_REASON_REVOKED
    assert engine.passes < begun + 20  # a part of it was drafted


def test_a_session_is_not_starved_by_many_that_come_and_go(engine: OverlappingEngine, verifier: Scheduler) -> None:
    steady, come, last, ended = b"j" * 16, list[bytes](), list[int](), threading.Event()

    class Watching(Coordinator):
        def _wake(self) -> None:
            super()._wake()
            with self._news:
                if self.events(steady, "finished") and not ended.is_set():
                    last.append(engine.passes)
                    ended.set()

    coordinator = Watching(verifier)

    def come_and_go(passes: int) -> None:
        if passes < 60:
            if come:
                coordinator.command(come[-1], cancel=verifier_pb2.Cancel())
            come.append(coordinator.start([passes, 1, 2, 3], max_tokens=50))

    engine.while_running = come_and_go
    before = engine.passes
    coordinator.start(PROMPT, max_tokens=40, session_id=steady)
    assert ended.wait(PATIENCE_S)
    assert last[0] - before <= 41  # in every pass since it was ready, and told while the next one ran
    coordinator.wait(lambda: all(coordinator.events(session, "failed") for session in come[:-1]))


def test_a_fault_while_a_pass_runs_fails_its_sessions_once(
    engine: OverlappingEngine, verifier: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(verifier)
    first, second = b"e" * 16, b"f" * 16

    def broken(running: RunningPass) -> list[PassResult]:
        raise RuntimeError("the device is gone")

    def cancel(passes: int) -> None:
        if passes == 3:
            coordinator.command(first, cancel=verifier_pb2.Cancel())
            monkeypatch.setattr(engine, "end_pass", broken)

    engine.while_running = cancel
    for session in (first, second):
        coordinator.start(PROMPT, max_tokens=30, session_id=session)
    assert isinstance(coordinator.failure(first), SessionCancelledError)
    assert "device" not in str(coordinator.failure(second))
    monkeypatch.undo()
    assert [len(coordinator.events(session, "failed")) for session in (first, second)] == [1, 1]
    assert engine.free_slots == 3
    assert len(coordinator.finish(coordinator.start(PROMPT))) == 16


def test_what_fails_while_a_pass_runs_leaves_no_pass_unended(
    engine: OverlappingEngine, verifier: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the scheduler's own ends the verifier, as between passes: behind the pass, and its tokens are told."""
    coordinator, session = Coordinator(verifier), b"k" * 16

    def broken() -> None:
        raise RuntimeError("expiry is broken")

    def spoil(passes: int) -> None:
        if passes == 4:
            monkeypatch.setattr(verifier._roster, "expire", broken)

    engine.while_running = spoil
    coordinator.start(PROMPT, max_tokens=30, session_id=session)
    failure = coordinator.failure(session)
    assert isinstance(failure, ServiceUnavailableError)
    assert "the verifier has failed" in str(failure)
    assert not engine.running
    assert len(coordinator.tokens(session)) == 4


def test_what_cannot_be_told_fails_its_session_alone(
    engine: OverlappingEngine, verifier: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, first, second = Coordinator(verifier), b"l" * 16, b"m" * 16
    made = roster.committed_event

    def broken(session_id: bytes, passes: Sequence[tuple[PassResult, int]]) -> verifier_pb2.SessionEvent:
        if session_id == first and engine.passes >= 4:
            raise RuntimeError("no event of that")
        return made(session_id, passes)

    monkeypatch.setattr(roster, "committed_event", broken)
    wanted = coordinator.finish(coordinator.start(PROMPT, max_tokens=3))
    assert engine.passes == 3
    for session in (first, second):
        coordinator.start(PROMPT, max_tokens=20, session_id=session)
    assert isinstance(coordinator.failure(first), InternalError)
    assert coordinator.finish(second)[:3] == wanted
    assert len(coordinator.tokens(second)) == 20
    assert engine.free_slots == 3


@pytest.mark.parametrize("lost", [False, True])
def test_a_session_that_ends_with_what_cannot_be_told_fails_alone(
    engine: OverlappingEngine, verifier: Scheduler, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Its text is complete, or its coordinator is gone, before anybody was told of its last tokens."""
    coordinator, other, first, second = Coordinator(verifier), Coordinator(verifier), b"n" * 16, b"o" * 16
    made = roster.committed_event

    def broken(session_id: bytes, passes: Sequence[tuple[PassResult, int]]) -> verifier_pb2.SessionEvent:
        if session_id == first:
            raise RuntimeError("no event of that")
        return made(session_id, passes)

    def leave(passes: int) -> None:
        if passes == 1 and lost:
            coordinator.link.close()

    engine.while_running = leave
    monkeypatch.setattr(roster, "committed_event", broken)
    coordinator.start(PROMPT, max_tokens=8 if lost else 1, session_id=first)
    if not lost:
        assert isinstance(coordinator.failure(first), InternalError)
    other.finish(other.start(PROMPT, max_tokens=20, session_id=second))
    assert len(other.tokens(second)) == 20
    assert engine.free_slots == 3


def test_what_fails_while_a_piece_of_a_prompt_runs_leaves_none_unended(
    engine: OverlappingEngine, verifier: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, ended = Coordinator(verifier), list[bool]()
    begin, end = engine.begin_prefill, engine.end_prefill

    def broken() -> None:
        raise RuntimeError("expiry is broken")

    def spoil(sessions: Sequence[Session]) -> RunningPrefill:
        monkeypatch.setattr(verifier._roster, "expire", broken)
        ended.append(False)
        return begin(sessions)

    def note(running: RunningPrefill) -> int:
        ended[-1] = True
        return end(running)

    monkeypatch.setattr(engine, "begin_prefill", spoil)
    monkeypatch.setattr(engine, "end_prefill", note)
    failure = coordinator.failure(coordinator.start(PROMPT, max_tokens=30))
    assert isinstance(failure, ServiceUnavailableError)
    assert ended == [True]


def test_early_work_never_overtakes() -> None:
    mailbox, done = Mailbox(), list[int]()
    for number, early in enumerate([True, True, False, True]):
        mailbox.post(lambda number=number: done.append(number), early=early)

    def do(work: Sequence[Callable[[], object]]) -> None:
        for each in work:
            each()

    do(mailbox.take_early())
    assert done == [0, 1]
    do(mailbox.take_early())
    assert done == [0, 1]
    do(mailbox.take())
    assert done == [0, 1, 2, 3]
    assert len(mailbox) == 0
