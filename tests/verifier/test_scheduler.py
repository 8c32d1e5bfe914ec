"""Sessions through the scheduler, joined in one process: their life, their credit, their end, and what may go wrong."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from verifier_harness import Coordinator, Drafter, HandClock, new_session_id

from specla.rpc.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    ServiceUnavailableError,
    SessionCancelledError,
    UnknownSessionError,
)
from specla.v1 import common_pb2, verifier_pb2
from specla.v1.verifier_pb2 import SessionCommand
from specla.verifier_service import scheduler as scheduler_module
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.engine import Engine
from specla.verifier_service.publish import MAX_ITEMS
from specla.verifier_service.scheduler import Scheduler

PROMPT = [72, 101, 108, 108, 111]
TIMES = {1: 0.002, 2: 0.0021, 5: 0.0025, 9: 0.004, 17: 0.007}

MakeVerifier = Callable[..., Scheduler]


@pytest.fixture
def make_verifier(tiny_target: Path, device: str) -> Iterator[MakeVerifier]:
    running: list[Scheduler] = []

    def make(clock: HandClock | None = None, **settings: Any) -> Scheduler:
        config = VerifierConfig(target=tiny_target, **{"threads": 1, "max_sessions": 4, "device": device, **settings})
        verifier = Scheduler(Engine(config), config, **({"clock": clock} if clock else {}))
        running.append(verifier.start(PassTimes(TIMES)))
        return verifier

    yield make
    for verifier in running:
        verifier.stop()


@pytest.fixture
def verifier(make_verifier: MakeVerifier) -> Scheduler:
    return make_verifier()


def test_a_session_that_comes_in_the_middle_of_a_turn_does_not_wait_for_the_next_beat(
    make_verifier: MakeVerifier,
) -> None:
    """Where passes do not run by themselves, it is opened before a pass is chosen: then there is something to do."""
    verifier = make_verifier(HandClock())
    coordinator = Coordinator(verifier)
    session = verifier.ask(lambda: coordinator.start(PROMPT, max_tokens=3)).result()
    assert len(coordinator.finish(session)) == 3


def test_a_session_from_start_to_end(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=12)
    assert len(coordinator.finish(session)) == 12
    kinds = [event.WhichOneof("event") for event in coordinator.events(session)]
    assert kinds[:2] == ["opened", "prefilled"]
    assert kinds[-1] == "finished"
    assert set(kinds[2:-1]) == {"committed"}
    finished = coordinator.events(session, "finished")[0].finished
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert finished.committed_len == len(PROMPT) + 12
    committed = [event.committed for event in coordinator.events(session, "committed")]
    assert committed[0].offset == len(PROMPT)
    assert sum(count.tokens for event in committed for count in event.passes) == 12
    assert coordinator.events(session, "prefilled")[0].prefilled.prompt_tokens == len(PROMPT)
    assert verifier.list_sessions() == []


def test_a_session_pauses_at_its_credit_and_goes_on(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    whole = coordinator.finish(coordinator.start(PROMPT))
    session = coordinator.start(PROMPT, credit=len(PROMPT) + 3)
    coordinator.wait(lambda: len(coordinator.tokens(session)) == 3)
    for _ in range(3):
        assert [info.committed_len for info in verifier.list_sessions()] == [len(PROMPT) + 3]
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=1))  # less than before: changes nothing
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=len(PROMPT) + 16))
    assert coordinator.finish(session) == whole


def test_without_credit_nothing_is_committed(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=0)
    coordinator.wait_for(session, "prefilled")
    assert verifier.list_sessions()[0].committed_len == len(PROMPT)
    assert coordinator.tokens(session) == []


def test_sessions_in_one_pass_have_the_texts_they_have_alone(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    prompts = [[1, 2, 3], [200, 100], [50], [9, 9, 9, 9, 9, 9, 9]]
    sampling = [common_pb2.Sampling(seed=i) for i in range(4)]
    alone = [coordinator.finish(coordinator.start(p, sampling=s)) for p, s in zip(prompts, sampling, strict=True)]
    ids = [coordinator.start(p, sampling=s) for p, s in zip(prompts, sampling, strict=True)]
    assert [coordinator.finish(session) for session in ids] == alone
    other_seed = coordinator.start(prompts[0], sampling=common_pb2.Sampling(seed=99))
    assert coordinator.finish(other_seed) != alone[0]


def test_a_resumed_text_goes_on_as_if_it_had_not_stopped(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    sampling = common_pb2.Sampling(seed=5)
    whole = coordinator.finish(coordinator.start(PROMPT, sampling=sampling))
    resumed = coordinator.start(PROMPT, sampling=sampling, resumed_ids=whole[:7])
    assert coordinator.finish(resumed) == whole[7:]
    first = coordinator.events(resumed, "committed")[0].committed
    assert first.offset == len(PROMPT) + 7


def test_log_probabilities_on_request(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=4, sampling=common_pb2.Sampling(temperature=0, top_logprobs=2))
    tokens = coordinator.finish(session)
    entries = [entry for event in coordinator.events(session, "committed") for entry in event.committed.logprobs]
    assert len(entries) == 4
    for token, entry in zip(tokens, entries, strict=True):
        assert entry.top[0].id == token
        assert entry.chosen == pytest.approx(entry.top[0].logprob)
        assert entry.top[0].logprob >= entry.top[1].logprob


def test_a_stop_string_ends_the_session_where_the_coordinator_says(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=len(PROMPT) + 6)
    coordinator.wait(lambda: len(coordinator.tokens(session)) == 6)
    coordinator.command(session, stop=verifier_pb2.Stop(at_len=len(PROMPT) + 4))
    finished = coordinator.wait_for(session, "finished").finished
    assert finished.reason == common_pb2.FINISH_REASON_STOP_STRING
    assert finished.committed_len == len(PROMPT) + 4
    assert verifier.list_sessions() == []


def test_a_stop_beyond_the_text_is_refused(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=len(PROMPT) + 2)
    coordinator.wait(lambda: len(coordinator.tokens(session)) == 2)
    coordinator.command(session, stop=verifier_pb2.Stop(at_len=len(PROMPT) + 3))
    error = coordinator.failure(session)
    assert isinstance(error, InvalidRequestError)
    assert error.field == "stop.at_len"
    assert len(verifier.list_sessions()) == 1


def test_a_stop_id_is_named(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    tokens = coordinator.finish(coordinator.start(PROMPT))
    stop_id = tokens[4]
    session = coordinator.start(PROMPT, stopping={"stop_ids": [stop_id]})
    assert coordinator.finish(session) == tokens[: tokens.index(stop_id) + 1]
    finished = coordinator.events(session, "finished")[0].finished
    assert finished.reason == common_pb2.FINISH_REASON_STOP_ID
    assert finished.matched_stop_id == stop_id


def test_a_cancelled_session_is_gone_and_others_are_unharmed(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    whole = coordinator.finish(coordinator.start([7, 8, 9], max_tokens=40))
    doomed = coordinator.start(PROMPT, max_tokens=2000)
    other = coordinator.start([7, 8, 9], max_tokens=40)
    coordinator.wait(lambda: len(coordinator.tokens(doomed)) > 2)
    coordinator.command(doomed, cancel=verifier_pb2.Cancel())
    coordinator.command(doomed, cancel=verifier_pb2.Cancel())
    assert isinstance(coordinator.failure(doomed), SessionCancelledError)
    assert coordinator.finish(other) == whole
    assert len(coordinator.events(doomed, "failed")) == 1
    assert verifier.list_sessions() == []


def test_the_loss_of_a_link_cancels_its_sessions_only(verifier: Scheduler) -> None:
    lost, kept = Coordinator(verifier), Coordinator(verifier)
    lost.wait_for(lost.start(PROMPT, max_tokens=2000), "prefilled")
    other = kept.start(PROMPT, credit=0)
    kept.wait_for(other, "prefilled")
    lost.link.close()
    assert [info.session_id for info in verifier.list_sessions()] == [other]


def test_slots_are_freed_once_and_used_again(make_verifier: MakeVerifier) -> None:
    verifier = make_verifier(max_sessions=2)
    coordinator = Coordinator(verifier)
    whole = coordinator.finish(coordinator.start(PROMPT))
    held = [coordinator.start(PROMPT, credit=0) for _ in range(2)]
    for session in held:
        coordinator.wait_for(session, "prefilled")
    refused = coordinator.failure(coordinator.start(PROMPT))
    assert isinstance(refused, CapacityError)
    assert refused.retry_after_s > 0
    for session in held:
        coordinator.command(session, cancel=verifier_pb2.Cancel())
        coordinator.command(session, stop=verifier_pb2.Stop(at_len=5))
    for _ in range(3):
        again = [coordinator.start(PROMPT) for _ in range(2)]
        assert [coordinator.finish(session) for session in again] == [whole, whole]


def test_a_refused_start_is_answered_once(make_verifier: MakeVerifier) -> None:
    """Coordinators send credit and IssueAttach right behind it: these must not be taken for answers of their own."""
    verifier = make_verifier(max_sessions=1)
    coordinator = Coordinator(verifier)
    held = coordinator.start(PROMPT, credit=0)
    coordinator.wait_for(held, "prefilled")
    refused = coordinator.start(PROMPT)
    coordinator.command(refused, issue_attach=verifier_pb2.IssueAttach())
    coordinator.command(refused, cancel=verifier_pb2.Cancel())
    assert isinstance(coordinator.failure(refused), CapacityError)
    coordinator.command(held, cancel=verifier_pb2.Cancel())
    coordinator.wait_for(held, "failed")
    assert len(coordinator.events(refused)) == 1
    stranger = new_session_id()
    coordinator.command(stranger, credit=verifier_pb2.Credit(up_to_len=9))
    assert isinstance(coordinator.failure(stranger), UnknownSessionError)


def test_a_message_of_too_many_items_ends_its_link_at_once(make_verifier: MakeVerifier) -> None:
    verifier = make_verifier()
    coordinator, flood, drafts = Coordinator(verifier), Coordinator(verifier), Drafter(verifier)
    session = coordinator.start(PROMPT, credit=0)
    flood.link.send([SessionCommand()] * (MAX_ITEMS + 1))
    drafts.link.send([verifier_pb2.DraftItem()] * (MAX_ITEMS + 1))
    for reader in (flood, drafts):
        lost = reader.wait(lambda reader=reader: reader.link.lost)
        assert isinstance(lost, InvalidRequestError)
        assert str(MAX_ITEMS) in lost.hint
        assert reader.items == []
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=1000))
    assert coordinator.finish(session)


def test_a_faulty_command_is_answered_and_the_others_proceed(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    good = new_session_id()
    whole = coordinator.finish(coordinator.start(PROMPT))
    broken = {
        coordinator.start([]): InvalidRequestError,
        coordinator.start([320]): InvalidRequestError,
        coordinator.start([1] * 40000): PromptTooLongError,
        coordinator.start(PROMPT, session_id=b"short"): InvalidRequestError,
        coordinator.start(PROMPT, stopping={"max_tokens": -1}): InvalidRequestError,
        coordinator.start(PROMPT, sampling=common_pb2.Sampling(temperature=float("nan"))): InvalidRequestError,
        coordinator.start(PROMPT, sampling=common_pb2.Sampling(top_p=0)): InvalidRequestError,
    }
    coordinator.start(PROMPT, session_id=good)
    for session, kind in broken.items():
        assert isinstance(coordinator.failure(session), kind)
    assert coordinator.finish(good) == whole


def test_unknown_foreign_and_used_sessions(verifier: Scheduler) -> None:
    coordinator, other = Coordinator(verifier), Coordinator(verifier)
    unknown = new_session_id()
    coordinator.command(unknown, credit=verifier_pb2.Credit(up_to_len=9))
    assert isinstance(coordinator.failure(unknown), UnknownSessionError)
    session = coordinator.start(PROMPT, credit=0)
    coordinator.wait_for(session, "prefilled")
    other.command(session, cancel=verifier_pb2.Cancel())
    assert isinstance(other.failure(session), InvalidRequestError)
    other.start(PROMPT, session_id=session)
    other.wait(lambda: len(other.events(session, "failed")) > 1)
    other.command(session)  # says nothing
    other.wait(lambda: len(other.events(session, "failed")) > 2)
    assert [info.session_id for info in verifier.list_sessions()] == [session]
    assert coordinator.events(session, "failed") == []


def test_a_deadline_ends_the_session(make_verifier: MakeVerifier) -> None:
    clock = HandClock()
    verifier = make_verifier(clock)
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=len(PROMPT) + 2, time_left=Duration(seconds=5))
    coordinator.wait(lambda: len(coordinator.tokens(session)) == 2)
    clock.now += 4.9
    assert len(verifier.list_sessions()) == 1
    clock.now += 0.2
    assert verifier.ask(lambda: None).result() is None
    assert isinstance(coordinator.failure(session), DeadlineError)
    assert verifier.list_sessions() == []


def test_a_session_that_stands_still_is_reaped(make_verifier: MakeVerifier) -> None:
    clock = HandClock()
    verifier = make_verifier(clock, idle_timeout_s=30)
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=len(PROMPT) + 1)
    coordinator.wait(lambda: coordinator.tokens(session))
    clock.now += 29
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=len(PROMPT) + 1))
    assert len(verifier.list_sessions()) == 1  # the command has been run
    clock.now += 29
    assert len(verifier.list_sessions()) == 1
    clock.now += 2
    verifier.list_sessions()
    assert isinstance(coordinator.failure(session), SessionCancelledError)


def test_a_long_prompt_starves_nobody_and_is_not_starved(make_verifier: MakeVerifier) -> None:
    verifier = make_verifier(prefill_chunk=64)
    coordinator = Coordinator(verifier)
    busy = coordinator.start(PROMPT, max_tokens=3000)
    coordinator.wait(lambda: len(coordinator.tokens(busy)) > 2)
    before = len(coordinator.tokens(busy))
    long = coordinator.start([i % 320 for i in range(64 * 12)], max_tokens=4)
    coordinator.wait_for(long, "prefilled")
    during = len(coordinator.tokens(busy)) - before
    assert during >= 8  # a pass between any two pieces
    assert len(coordinator.finish(long)) == 4
    coordinator.command(busy, cancel=verifier_pb2.Cancel())


def test_a_fault_in_a_pass_fails_its_sessions_and_nothing_else(
    verifier: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=0)
    coordinator.wait_for(session, "prefilled")

    def broken(items: object) -> None:
        raise RuntimeError("secret prompt text")

    with monkeypatch.context() as patch:
        patch.setattr(verifier._engine, "begin_pass", broken)
        coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=100))
        error = coordinator.failure(session)
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    assert len(error.metadata["error_id"]) == 12
    assert verifier.health()
    assert len(coordinator.finish(coordinator.start(PROMPT))) == 16


def test_health_follows_the_thread(verifier: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verifier.health()
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=0)
    coordinator.wait_for(session, "prefilled")

    def dies() -> None:
        raise SystemError("the scheduler itself is broken")

    monkeypatch.setattr(verifier._roster, "expire", dies)
    verifier.ask(lambda: None)  # the thread looks up
    assert isinstance(coordinator.failure(session), ServiceUnavailableError)
    coordinator.wait(lambda: coordinator.link.lost)
    verifier.stop()
    assert not verifier.health()
    with pytest.raises(ServiceUnavailableError):
        verifier.list_sessions()
    assert isinstance(Coordinator(verifier).link.lost, ServiceUnavailableError)


def test_a_stop_lets_sessions_end_and_takes_no_new_ones(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=60)
    coordinator.wait_for(session, "prefilled")
    verifier._mailbox.post(lambda: verifier._begin_drain(verifier._clock() + 30))
    late = coordinator.start(PROMPT)
    assert len(coordinator.finish(session)) == 60
    assert isinstance(coordinator.failure(late), ServiceUnavailableError)
    coordinator.wait(lambda: coordinator.link.lost)


def test_a_stop_without_patience_fails_what_lives(verifier: Scheduler) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=3000)
    coordinator.wait_for(session, "prefilled")
    verifier.stop(0.0)
    assert isinstance(coordinator.failure(session), ServiceUnavailableError)
    assert verifier._engine.free_slots == 4


def test_the_target_says_who_it_is(verifier: Scheduler, make_verifier: MakeVerifier) -> None:
    target = verifier.target()
    assert target.dims.vocab_size == 320
    assert target.limits.max_sessions == 4
    assert target.limits.max_rows == 65
    assert len(target.tokenizer_hash) == 64
    assert make_verifier().target().verifier_id != target.verifier_id
    assert make_verifier().target().numerics_id == target.numerics_id


def test_a_load_that_is_interrupted_leaves_no_engine(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the target loads: the caller gets nothing to stop, so it must stop by itself."""
    go_on = threading.Event()

    def slow_engine(config: VerifierConfig) -> Engine:
        go_on.wait(10)
        return Engine(config)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler_module, "Engine", slow_engine)
    before = signal.signal(signal.SIGALRM, interrupt)
    known = set(threading.enumerate())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            Scheduler.load(VerifierConfig(target=tiny_target, threads=1, max_sessions=1))
    finally:
        signal.signal(signal.SIGALRM, before)
    (loading,) = set(threading.enumerate()) - known
    go_on.set()
    loading.join(20)
    assert not loading.is_alive()
