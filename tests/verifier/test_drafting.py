"""Drafters and sessions: attaching, drafting, verdicts, and that no draft ever changes a text."""

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from verifier_harness import Coordinator, CountedEngine, Drafter, HandClock, new_session_id

from specla.rpc.errors import AttachRefusedError, InvalidRequestError, TopologyRefusedError, UnknownSessionError
from specla.rpc.status import from_status
from specla.v1 import common_pb2, verifier_pb2
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.draft_wait import ALLOWED_S
from specla.verifier_service.engine import Engine
from specla.verifier_service.scheduler import Scheduler

PROMPT = [72, 101, 108, 108, 111]
# Candidates cost next to nothing here, so that the cost model keeps whatever is likely at all.
TIMES = {1: 0.01, 65: 0.0101}

MakeVerifier = Callable[..., Scheduler]


@pytest.fixture
def make_verifier(tiny_target: Path, device: str) -> Iterator[MakeVerifier]:
    running: list[Scheduler] = []

    def make(clock: HandClock | None = None, times: dict[int, float] = TIMES, **settings: Any) -> Scheduler:
        config = VerifierConfig(target=tiny_target, **{"threads": 1, "max_sessions": 4, "device": device, **settings})
        if clock is None:
            verifier = Scheduler(Engine(config), config)
        else:
            verifier = Scheduler(CountedEngine(config, clock, times), config, clock)
        running.append(verifier.start(PassTimes(times)))
        return verifier

    yield make
    for verifier in running:
        verifier.stop()


@pytest.fixture
def verifier(make_verifier: MakeVerifier) -> Scheduler:
    return make_verifier(HandClock())  # time passes in passes only: the same decisions on any machine


def attached(verifier: Scheduler, **start: Any) -> tuple[Coordinator, Drafter, bytes]:
    """A session without credit, and a drafter attached to it."""
    coordinator, drafter = Coordinator(verifier), Drafter(verifier)
    session = coordinator.start(PROMPT, **{"credit": 0, **start})
    coordinator.wait_for(session, "prefilled")
    drafter.attach(session, coordinator.attach_token(session))
    return coordinator, drafter, session


def credit(coordinator: Coordinator, session: bytes, up_to_len: int) -> None:
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=up_to_len))


def plain(verifier: Scheduler, **start: Any) -> list[int]:
    coordinator = Coordinator(verifier)
    return coordinator.finish(coordinator.start(PROMPT, **start))


def test_a_right_draft_is_accepted_whole(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    seq = drafter.chain(session, PROMPT, text[:4])
    credit(coordinator, session, len(PROMPT) + 5)
    answer = drafter.answer(seq).verdict
    assert answer.outcome == verifier_pb2.OUTCOME_VERIFIED
    assert list(answer.accepted_nodes) == [0, 1, 2, 3]
    assert list(answer.tokens) == text[:5]
    assert (answer.base_len, answer.committed_len) == (5, 10)
    assert answer.node_budget > 0
    committed = coordinator.wait_for(session, "committed").committed
    assert list(committed.tokens) == text[:5]
    assert list(committed.drafted) == [True] * 4 + [False]
    assert [(count.tokens, count.drafted) for count in committed.passes] == [(5, 4)]


def test_a_tree_is_followed_where_the_text_goes(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    wrong = [(token + 1) % 320 for token in text]
    topology = verifier_pb2.Topology(
        base_len=5,
        root_token=PROMPT[-1],
        tokens=[wrong[0], text[0], wrong[1], text[1], wrong[2]],
        parents=[-1, -1, 1, 1, 3],
        log_probs=[-0.7, -0.7, -0.7, -0.7, -0.1],
    )
    seq = drafter.item(session, topology=topology)
    credit(coordinator, session, len(PROMPT) + 3)
    answer = drafter.answer(seq).verdict
    assert list(answer.accepted_nodes) == [1, 3]
    assert list(answer.tokens) == text[:3]


def test_a_draft_never_passes_the_credit(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    seq = drafter.chain(session, PROMPT, text[:6])
    credit(coordinator, session, len(PROMPT) + 3)
    assert list(drafter.answer(seq).verdict.tokens) == text[:3]
    assert verifier.list_sessions()[0].committed_len == len(PROMPT) + 3


def test_a_draft_never_passes_the_end_of_the_text(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier, max_tokens=4)
    seq = drafter.chain(session, PROMPT, text[:6])
    credit(coordinator, session, 100)
    assert coordinator.finish(session) == text[:4]
    assert list(drafter.answer(seq).verdict.tokens) == text[:4]
    assert drafter.closed(session) == verifier_pb2.CLOSED_REASON_FINISHED
    count = coordinator.events(session, "committed")[0].committed.passes[0]
    assert count.tokens == 4


def random_topology(chance: random.Random, text: Sequence[int], known: Sequence[int]) -> verifier_pb2.Topology:
    """A tree of up to 8 candidates with some truth in it."""
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) to depth
    ahead = text[len(known) - len(PROMPT) :]
    for node in range(chance.randrange(0, 9)):
        parent = chance.randrange(-1, node)
        depth = 0 if parent < 0 else list(nodes.values())[parent] + 1
        token = ahead[depth] if depth < len(ahead) and chance.random() < 0.6 else chance.randrange(320)
        while (parent, token) in nodes:
            token = (token + 1) % 320
        nodes[parent, token] = depth
    return verifier_pb2.Topology(
        base_len=len(known),
        root_token=known[-1],
        tokens=[token for _, token in nodes],
        parents=[parent for parent, _ in nodes],
        log_probs=[-3 * chance.random() for _ in nodes],
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_trees_change_no_text(verifier: Scheduler, temperature: float) -> None:
    """Several sessions at once, each with trees of its own, drafted inside `wake` as in one process."""
    chance = random.Random(8)
    samplings = [common_pb2.Sampling(temperature=temperature, seed=seed) for seed in range(3)]
    texts = [plain(verifier, sampling=sampling, max_tokens=40) for sampling in samplings]
    coordinator = Coordinator(verifier)
    ids = [coordinator.start(PROMPT, sampling=sampling, max_tokens=40, credit=0) for sampling in samplings]
    known: dict[bytes, list[int]] = {}
    accepted = []

    def draft() -> None:
        for item in link.take():
            kind = item.WhichOneof("item")
            if kind == "closed":
                continue
            news = getattr(item, kind)
            if kind == "verdict":
                accepted.extend(news.accepted_nodes)
            known.setdefault(item.session_id, []).extend(news.tokens)
            assert len(known[item.session_id]) == news.committed_len
            text = texts[ids.index(item.session_id)]
            topology = random_topology(chance, text, known[item.session_id])
            link.send([verifier_pb2.DraftItem(session_id=item.session_id, seq=next(seqs), topology=topology)])

    seqs = iter(range(1, 10**6))
    link = verifier.connect_drafter(draft)
    for session in ids:
        attach = verifier_pb2.Attach(attach_token=coordinator.attach_token(session))
        link.send([verifier_pb2.DraftItem(session_id=session, seq=next(seqs), attach=attach)])
        credit(coordinator, session, 1000)
    assert [coordinator.finish(session) for session in ids] == texts
    assert len(accepted) > 10
    for session, text in zip(ids, texts, strict=True):
        assert known[session] == PROMPT + text


def test_outcomes_of_drafts_that_get_no_pass(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    first = drafter.chain(session, PROMPT, text[:2])
    second = drafter.chain(session, PROMPT, text[:1])
    assert drafter.answer(first).verdict.outcome == verifier_pb2.OUTCOME_SUPERSEDED
    credit(coordinator, session, len(PROMPT) + 2)
    assert drafter.answer(second).verdict.outcome == verifier_pb2.OUTCOME_VERIFIED
    late = drafter.chain(session, PROMPT, text[:3])
    answer = drafter.answer(late).verdict
    assert answer.outcome == verifier_pb2.OUTCOME_STALE
    assert answer.committed_len == len(PROMPT) + 2
    assert list(answer.tokens) == []


def test_a_session_without_a_draft_decodes_by_itself(make_verifier: MakeVerifier) -> None:
    """The session waits as long as that can pay off, and no longer (fault: a dead drafter stalls its session)."""
    clock = HandClock()
    verifier = make_verifier(clock)
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    credit(coordinator, session, len(PROMPT) + 1)
    verifier.list_sessions()
    assert coordinator.tokens(session) == []  # it waits for the drafter, which was asked
    clock.now += ALLOWED_S
    verifier.list_sessions()
    own = drafter.wait(lambda: [item for item in drafter.items if item.WhichOneof("item") == "verdict"])[0]
    assert own.seq == 0
    assert own.verdict.outcome == verifier_pb2.OUTCOME_OWN_PASS
    assert list(own.verdict.tokens) == text[:1]


def test_other_sessions_never_wait_for_a_drafter(verifier: Scheduler) -> None:
    """Beside a session whose drafter is silent; time passes in passes only, so that waiting would be for ever."""
    coordinator, _, session = attached(verifier, credit=1000, max_tokens=16)
    assert len(plain(verifier)) == 16
    assert len(coordinator.finish(session)) == 16  # it lost patience while the other one ran


def test_an_empty_draft_asks_for_no_wait(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    seq = drafter.chain(session, PROMPT, [])
    credit(coordinator, session, len(PROMPT) + 1)
    answer = drafter.answer(seq).verdict
    assert answer.outcome == verifier_pb2.OUTCOME_VERIFIED
    assert list(answer.tokens) == text[:1]


def test_drafting_ahead(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    known = PROMPT + text
    drafter.chain(session, PROMPT, text[:2])
    ahead = verifier_pb2.Topology(
        base_len=8, root_token=text[2], assumed=text[:3], tokens=text[3:5], parents=[-1, 0], log_probs=[-0.1, -0.1]
    )
    right = drafter.item(session, topology=ahead)
    wrong = drafter.item(
        session,
        topology=verifier_pb2.Topology(
            base_len=9, root_token=1, assumed=[text[0], text[1], (text[2] + 1) % 320, 1], tokens=[], parents=[]
        ),
    )
    credit(coordinator, session, len(PROMPT) + 6)
    answer = drafter.answer(right).verdict
    assert answer.base_len == 8
    assert list(answer.tokens) == known[8:11]
    assert drafter.answer(wrong).verdict.outcome == verifier_pb2.OUTCOME_STALE


def test_a_faulty_draft_is_answered_and_nothing_of_the_session_changes(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    good = drafter.chain(session, PROMPT, text[:3])
    base = {"base_len": 5, "root_token": PROMPT[-1], "tokens": [1, 2], "parents": [-1, 0], "log_probs": [-1, -1]}
    faults: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"parents": [1, 0]}, TopologyRefusedError),
        ({"tokens": [1, 320]}, InvalidRequestError),
        ({"log_probs": [float("nan"), -1]}, InvalidRequestError),
        ({"root_token": 1}, InvalidRequestError),
        ({"base_len": 9}, InvalidRequestError),
    ]
    for fields, kind in faults:
        seq = drafter.item(session, topology=verifier_pb2.Topology(**{**base, **fields}))
        assert isinstance(from_status(drafter.answer(seq).error), kind)
    credit(coordinator, session, 1000)
    assert list(drafter.answer(good).verdict.accepted_nodes) == [0, 1, 2]
    drafter.item(session, detach=verifier_pb2.Detach())
    assert coordinator.finish(session) == text


def test_duplicates_are_ignored(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    seq = drafter.chain(session, PROMPT, text[:3])
    drafter.item(session, seq=seq, topology=verifier_pb2.Topology(base_len=5, root_token=PROMPT[-1]))
    credit(coordinator, session, len(PROMPT) + 4)
    assert list(drafter.answer(seq).verdict.tokens) == text[:4]
    assert len([item for item in drafter.items if item.seq == seq]) == 1


def test_only_the_newest_token_attaches_and_the_former_drafter_is_replaced(verifier: Scheduler) -> None:
    coordinator, first, session = attached(verifier)
    second = Drafter(verifier)
    token = coordinator.attach_token(session)
    seq = second.item(session, attach=verifier_pb2.Attach(attach_token=b"x" * 16))
    assert isinstance(from_status(second.answer(seq).error), AttachRefusedError)
    assert second.attach(session, token, have_len=3).tokens == PROMPT[3:]
    assert first.closed(session) == verifier_pb2.CLOSED_REASON_REPLACED
    seq = first.chain(session, PROMPT, [1])
    assert isinstance(from_status(first.answer(seq).error), AttachRefusedError)
    changes = [event.drafter_changed for event in coordinator.events(session, "drafter_changed")]
    assert [(change.attached, change.epoch) for change in changes] == [(True, 1), (False, 1), (True, 2)]
    assert changes[1].reason == verifier_pb2.CLOSED_REASON_REPLACED


def test_a_revoked_token_is_worth_nothing(verifier: Scheduler) -> None:
    coordinator, drafter, session = attached(verifier)
    token = coordinator.events(session, "attach_issued")[0].attach_issued.attach_token
    coordinator.command(session, revoke_attach=verifier_pb2.RevokeAttach())
    assert drafter.closed(session) == verifier_pb2.CLOSED_REASON_REVOKED
    seq = drafter.item(session, attach=verifier_pb2.Attach(attach_token=token))
    assert isinstance(from_status(drafter.answer(seq).error), AttachRefusedError)


def test_a_lost_drafter_is_told_to_the_coordinator_and_the_text_goes_on(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator, drafter, session = attached(verifier)
    drafter.chain(session, PROMPT, text[:3])
    credit(coordinator, session, len(PROMPT) + 4)
    coordinator.wait(lambda: len(coordinator.tokens(session)) == 4)
    drafter.link.close()
    change = coordinator.wait(lambda: coordinator.events(session, "drafter_changed")[1:])[0].drafter_changed
    assert not change.attached
    assert change.reason == verifier_pb2.CLOSED_REASON_LOST
    credit(coordinator, session, 1000)
    assert coordinator.finish(session) == text


def test_late_items_of_an_ended_session_get_closed(make_verifier: MakeVerifier) -> None:
    clock = HandClock()
    verifier = make_verifier(clock)
    coordinator, drafter, session = attached(verifier)
    coordinator.command(session, cancel=verifier_pb2.Cancel())
    assert drafter.closed(session) == verifier_pb2.CLOSED_REASON_CANCELLED
    seq = drafter.chain(session, PROMPT, [1])
    assert drafter.answer(seq).closed.reason == verifier_pb2.CLOSED_REASON_CANCELLED
    clock.now += 61
    verifier.list_sessions()
    seq = drafter.chain(session, PROMPT, [1])
    assert isinstance(from_status(drafter.answer(seq).error), UnknownSessionError)
    seq = drafter.chain(new_session_id(), PROMPT, [1])
    assert isinstance(from_status(drafter.answer(seq).error), UnknownSessionError)


def test_a_useless_drafter_is_paused_and_probed(make_verifier: MakeVerifier) -> None:
    """Boasting drafts that are always wrong, drafted in `wake`; passes of more rows cost real time."""
    verifier = make_verifier(times={1: 0.0005, 2: 0.001, 17: 0.004}, max_draft_wait_s=0.0)
    tokens = 200
    text = plain(verifier, max_tokens=tokens)
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=tokens, credit=0)
    budgets = []
    known: list[int] = []

    def draft() -> None:
        for item in link.take():
            kind = item.WhichOneof("item")
            if kind in ("closed", "error"):
                continue
            news = getattr(item, kind)
            known.extend(news.tokens)
            budgets.append(news.node_budget)
            if news.node_budget and len(known) - len(PROMPT) < tokens:
                wrong = (text[len(known) - len(PROMPT)] + 1) % 320
                topology = verifier_pb2.Topology(
                    base_len=len(known), root_token=known[-1], tokens=[wrong], parents=[-1], log_probs=[-0.01]
                )
                link.send([verifier_pb2.DraftItem(session_id=session, seq=1000 + len(known), topology=topology)])

    link = verifier.connect_drafter(draft)
    attach = verifier_pb2.Attach(attach_token=coordinator.attach_token(session))
    link.send([verifier_pb2.DraftItem(session_id=session, seq=1, attach=attach)])
    credit(coordinator, session, 10000)
    assert coordinator.finish(session) == text
    passes = [count for event in coordinator.events(session, "committed") for count in event.committed.passes]
    assert sum(count.drafted for count in passes) < 40  # calibration trims what never comes true
    assert known == PROMPT + text


def test_features_come_with_verdicts_and_on_demand(verifier: Scheduler) -> None:
    keep = common_pb2.FeatureSpec(layers=[0, 1, -1], window=32)
    coordinator, drafter = Coordinator(verifier), Drafter(verifier)
    session = coordinator.start(PROMPT, credit=0, keep=keep)
    coordinator.wait_for(session, "prefilled")
    token = coordinator.attach_token(session)
    want = common_pb2.FeatureSpec(layers=[1], window=32)
    news = drafter.attach(session, token, want=want)
    assert news.features.from_position == 0
    assert list(news.features.values.shape) == [4, 1, 64]  # the last prompt token is the root, not yet run
    seq = drafter.chain(session, PROMPT, [])
    credit(coordinator, session, len(PROMPT) + 1)
    features = drafter.answer(seq).verdict.features
    assert features.from_position == 4
    assert list(features.values.shape) == [1, 1, 64]
    request = verifier_pb2.ReadFeaturesRequest(session_id=session, attach_token=token, from_position=0, to_position=5)
    (slab,) = verifier.read_features(request)
    assert slab.from_position == 0
    assert slab.values.data == news.features.values.data + features.values.data
    assert len(struct.unpack(f"<{5 * 64}f", slab.values.data)) == 5 * 64


def test_features_are_read_with_the_right_token_only(verifier: Scheduler) -> None:
    coordinator, drafter, session = attached(verifier)
    request = verifier_pb2.ReadFeaturesRequest(session_id=session, attach_token=b"x", to_position=1)
    with pytest.raises(AttachRefusedError):
        verifier.read_features(request)
    request.attach_token = coordinator.events(session, "attach_issued")[0].attach_issued.attach_token
    request.to_position = 90
    with pytest.raises(InvalidRequestError):
        verifier.read_features(request)
    request.session_id = new_session_id()
    with pytest.raises(UnknownSessionError):
        verifier.read_features(request)
    seq = drafter.item(session, attach=verifier_pb2.Attach(want=common_pb2.FeatureSpec(layers=[0], window=1)))
    assert isinstance(from_status(drafter.answer(seq).error), AttachRefusedError)


def test_the_targets_best_tokens_on_request(verifier: Scheduler) -> None:
    coordinator, drafter = Coordinator(verifier), Drafter(verifier)
    session = coordinator.start(PROMPT, credit=0)
    coordinator.wait_for(session, "prefilled")
    drafter.attach(session, coordinator.attach_token(session), top_k=3)
    seq = drafter.chain(session, PROMPT, [])
    credit(coordinator, session, len(PROMPT) + 1)
    answer = drafter.answer(seq).verdict
    assert len(answer.top) == len(answer.tokens) == 1
    assert answer.top[0].ids[0] == answer.tokens[0]
    assert list(answer.top[0].log_probs) == sorted(answer.top[0].log_probs, reverse=True)
    assert len(answer.top[0].ids) == 3


def test_a_drafter_whose_wake_fails_is_lost_and_the_session_lives(verifier: Scheduler) -> None:
    text = plain(verifier)
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, credit=0)

    def broken() -> None:
        raise RuntimeError("a bug in a drafter")

    link = verifier.connect_drafter(broken)
    attach = verifier_pb2.Attach(attach_token=coordinator.attach_token(session))
    link.send([verifier_pb2.DraftItem(session_id=session, seq=1, attach=attach)])
    credit(coordinator, session, 1000)
    assert coordinator.finish(session) == text
    assert link.lost is not None
