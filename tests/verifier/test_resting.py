"""Drafters that rest: tried again when due, and told what is right, whatever comes of them meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from verifier_harness import Coordinator, CountedEngine, HandClock, plain_text

from specla.v1 import verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, Verdict, VerdictItem
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.passes import PassResult, RunningPass
from specla.verifier_service.scheduler import Scheduler
from specla.verifier_service.speed_guard import PROBE_EVERY

PROMPT = [72, 101, 108, 108, 111]
TOKENS = 150
TABLE = {1: 0.0130, 2: 0.0138, 3: 0.0146, 5: 0.0165, 9: 0.0245, 17: 0.0430, 33: 0.0800}
BAD_UNTIL = 40  # tokens of the output


class WatchedEngine(CountedEngine):
    """Calls somebody at the end of each pass."""

    behind_pass: Callable[[], None] | None = None

    def end_pass(self, running: RunningPass) -> list[PassResult]:
        results = super().end_pass(running)
        if self.behind_pass is not None:
            self.behind_pass()
        return results


class OverlappingEngine(WatchedEngine):
    """Its passes overlap with the host on any device."""

    @property
    def overlaps(self) -> bool:
        return True


class Drafter:
    """Drafts chains inside `wake`, all wrong at first and all right later, and `late` once it has been told to rest."""

    def __init__(self, verifier: Scheduler, text: Sequence[int], late: Callable[[bytes], None] | None = None):
        self.text = [*PROMPT, *text]
        self.known: list[int] = []
        self.drafts: dict[int, int] = {}  # number to base_len
        self.verdicts: list[VerdictItem] = []
        self.tops: list[int] = []
        self.late = late
        self.link = verifier.connect_drafter(self.draft)

    def draft(self) -> None:
        for item in self.link.take():
            kind = item.WhichOneof("item")
            if kind == "closed":
                return
            news = getattr(item, kind)
            self.known += news.tokens
            assert len(self.known) == news.committed_len
            if kind == "verdict":
                self.verdicts.append(item)
                self.tops += [entry.ids[0] for entry in news.top]
            if news.node_budget:
                self.send(item.session_id, len(self.known), min(news.node_budget, 8))
            elif self.late is not None:
                self.late(item.session_id)

    def send(self, session: bytes, base_len: int, count: int) -> None:
        """A chain behind so many tokens, of which those that are not known yet are assumed."""
        wrong = int(base_len < len(PROMPT) + BAD_UNTIL)
        tokens = [(token + wrong) % 320 for token in self.text[base_len : base_len + count]]
        topology = verifier_pb2.Topology(
            base_len=base_len,
            root_token=self.text[base_len - 1],
            assumed=self.text[len(self.known) : base_len],
            tokens=tokens,
            parents=range(-1, len(tokens) - 1),
            log_probs=[-0.01] * len(tokens),
        )
        seq = 2 + len(self.drafts)
        self.drafts[seq] = base_len
        self.link.send([DraftItem(session_id=session, seq=seq, topology=topology)])

    @property
    def verified(self) -> list[tuple[int, Verdict]]:
        """Verdicts on drafts that had a pass, with their numbers."""
        verified = verifier_pb2.OUTCOME_VERIFIED
        return [(item.seq, item.verdict) for item in self.verdicts if item.verdict.outcome == verified]


@pytest.fixture(scope="module")
def text(tiny_target: Path) -> list[int]:
    return plain_text(tiny_target, PROMPT, TOKENS)


@pytest.fixture(params=[WatchedEngine, OverlappingEngine])
def engine(request: pytest.FixtureRequest, tiny_target: Path) -> WatchedEngine:
    made = request.param(VerifierConfig(target=tiny_target, threads=1, max_sessions=2), HandClock(), TABLE)
    assert isinstance(made, WatchedEngine)
    return made


@pytest.fixture
def verifier(engine: WatchedEngine) -> Iterator[Scheduler]:
    with Scheduler(engine, engine.config, engine.clock).start(PassTimes(TABLE)) as verifier:
        yield verifier


def run(verifier: Scheduler, drafter: Drafter, top_k: int = 0) -> float:
    """Seconds that the whole text takes."""
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=TOKENS, credit=0)
    coordinator.wait_for(session, "prefilled")
    attached = verifier_pb2.Attach(attach_token=coordinator.attach_token(session), top_k=top_k)
    drafter.link.send([DraftItem(session_id=session, seq=1, attach=attached)])
    for _ in range(3):  # it attaches, it drafts, and the draft is there before anybody waits for it
        verifier.list_sessions()
    assert drafter.drafts
    began = verifier._clock()
    coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=10**6))
    assert coordinator.finish(session) == drafter.text[len(PROMPT) :]
    return verifier._clock() - began


def test_one_that_has_become_good_is_found_out(verifier: Scheduler, text: list[int]) -> None:
    drafter = Drafter(verifier, text)
    spent_s = run(verifier, drafter)
    assert any(item.verdict.node_budget == 0 for item in drafter.verdicts), "it has rested"
    assert spent_s < (PROBE_EVERY + 45) * TABLE[1]


def test_a_late_draft_is_told_the_best_of_all_positions_that_it_is_told(
    engine: WatchedEngine, verifier: Scheduler, text: list[int]
) -> None:
    def late(session: bytes) -> None:
        """A draft for a length that has gone by comes behind the next pass."""
        if len(drafter.drafts) < 8:
            engine.behind_pass = lambda: send(session, len(drafter.known))

    def send(session: bytes, base_len: int) -> None:
        engine.behind_pass = None
        drafter.send(session, base_len, 2)

    drafter = Drafter(verifier, text, late)
    run(verifier, drafter, top_k=1)
    assert any(item.verdict.outcome == verifier_pb2.OUTCOME_STALE for item in drafter.verdicts)
    at = 0
    for item in drafter.verdicts:
        assert len(item.verdict.top) == len(item.verdict.tokens)
        at += len(item.verdict.tokens)
    assert drafter.tops == text[:at], "the likeliest is what greedy decoding takes"


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_draft_ahead_is_verified_where_it_belongs_or_not_at_all(
    verifier: Scheduler, text: list[int], ahead: int
) -> None:
    def late(session: bytes) -> None:
        if len(drafter.drafts) < 8:
            drafter.send(session, len(drafter.known) + ahead, 2)

    drafter = Drafter(verifier, text, late)
    run(verifier, drafter)
    assert len(drafter.verified) >= 4
    assert [verdict.base_len for _, verdict in drafter.verified] == [drafter.drafts[seq] for seq, _ in drafter.verified]
