"""Attach tokens that wait until something speaks for their drafter. Time is counted, as in test_speed.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from verifier_harness import Coordinator, CountedEngine, HandClock, plain_text

from specla.v1 import verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, SessionCommand, VerdictItem
from specla.verifier_service import issuer, pass_runner
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.repetition import LEAST, LOOK_EVERY, Repetition
from specla.verifier_service.scheduler import Scheduler
from specla.verifier_service.speed_guard import (
    ALLOWED_SHARE,
    LOST_IN_A_ROW,
    PROBE_BUDGET,
    PROBE_EVERY,
    TRIED_ANYWAY,
    Reputation,
)

PROMPT = [72, 101, 108, 108, 111]
TOKENS = 200
TABLE = {1: 0.0130, 2: 0.0138, 3: 0.0146, 5: 0.0165, 9: 0.0245, 17: 0.0430, 33: 0.0800}
PLAIN_S = TOKENS * TABLE[1]


class OverlappingEngine(CountedEngine):
    """Its passes overlap with the host on any device: what is looked for is looked for while the next one runs."""

    @property
    def overlaps(self) -> bool:
        return True


class Drafter:
    """Attaches with any token that it is given, drafts chains inside `wake`: wrong ones, or from some length on right
    ones."""

    def __init__(self, verifier: Scheduler, text: Sequence[int], *, right_from: float, takes_s: float = 0.012) -> None:
        self.right_from, self.takes_s = right_from, takes_s
        self.texts: dict[bytes, list[int]] = {}
        self.attached_at: dict[bytes, int] = {}
        self.budgets: list[int] = []
        self._verifier, self._text, self._seq = verifier, [*PROMPT, *text], 0
        self.link = verifier.connect_drafter(self._draft)

    def attach(self, session_id: bytes, token: bytes) -> None:
        self._send(session_id, attach=verifier_pb2.Attach(attach_token=token))

    def _send(self, session_id: bytes, **item: verifier_pb2.Attach | verifier_pb2.Topology) -> None:
        self._seq += 1
        self.link.send([DraftItem(session_id=session_id, seq=self._seq, **item)])

    def _draft(self) -> None:
        for item in self.link.take():
            if item.WhichOneof("item") in ("attached", "verdict"):
                self._hear(item)

    def _hear(self, item: VerdictItem) -> None:
        news = getattr(item, item.WhichOneof("item"))
        known = self.texts.setdefault(item.session_id, [])
        self.attached_at.setdefault(item.session_id, news.committed_len)
        known += news.tokens
        self.budgets.append(news.node_budget)
        if news.node_budget:
            self._verifier._clock.now += self.takes_s  # type: ignore[attr-defined]
            wrong = len(known) < self.right_from
            tokens = [(token + wrong) % 320 for token in self._text[len(known) :][: min(news.node_budget, 8)]]
            topology = verifier_pb2.Topology(
                base_len=len(known),
                root_token=known[-1],
                tokens=tokens,
                parents=range(-1, len(tokens) - 1),
                log_probs=[-0.1] * len(tokens),
            )
            self._send(item.session_id, topology=topology)


class Inviting(Coordinator):
    """Asks for its drafter in every session, and hands each token to it as soon as it comes."""

    def __init__(self, verifier: Scheduler, drafter: Drafter, drafter_id: str = "one") -> None:
        self.verifier, self.drafter, self.drafter_id = verifier, drafter, drafter_id
        self.tokens_issued: dict[bytes, list[bytes]] = {}
        super().__init__(verifier)

    def _wake(self) -> None:
        if hasattr(self, "link"):
            fresh = self.link.take()
            self.items += fresh
            for event in fresh:
                if event.WhichOneof("event") == "attach_issued":
                    self.tokens_issued.setdefault(event.session_id, []).append(event.attach_issued.attach_token)
                    self.drafter.attach(event.session_id, event.attach_issued.attach_token)
        super()._wake()

    def invite(self, max_tokens: int) -> bytes:
        """A session that has asked for its drafter, and may not run yet."""
        session_id = self.start(PROMPT, max_tokens=max_tokens, credit=0)
        self.wait_for(session_id, "prefilled")
        self.command(session_id, issue_attach=verifier_pb2.IssueAttach(drafter_id=self.drafter_id))
        self.verifier.list_sessions()
        self.verifier.list_sessions()  # the drafter's Attach, too, has been taken in
        return session_id

    def run(self, session_id: bytes) -> float:
        """Seconds until its text has ended."""
        began = self.verifier._clock()
        self.command(session_id, credit=verifier_pb2.Credit(up_to_len=10**6))
        self.finish(session_id)
        return self.verifier._clock() - began


def serving(
    target: Path,
    kind: type[CountedEngine],
    drafting: str = "measured",
    table: dict[int, float] = TABLE,
    sessions: int = 4,
) -> Scheduler:
    clock = HandClock()
    config = VerifierConfig(target=target, threads=1, max_sessions=sessions, drafting=drafting)
    return Scheduler(kind(config, clock, table), config, clock).start(PassTimes(table))


@pytest.fixture(params=[CountedEngine, OverlappingEngine])
def verifier(tiny_target: Path, request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    with serving(tiny_target, request.param) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def text(tiny_target: Path) -> list[int]:
    return plain_text(tiny_target, PROMPT, TOKENS)


@pytest.fixture
def repeats_at(text: list[int]) -> int:
    """Tokens of the output at which the text is seen to repeat itself."""
    watch = Repetition()
    return next(n for n in range(1, TOKENS) if watch.begins([*PROMPT, *text[:n]], 0))


def spare_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reputation, "spares", lambda self: True)
    monkeypatch.setattr(Reputation, "gave_up", property(lambda self: True))


def known_to_be_worthless(verifier: Scheduler, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> Inviting:
    """A coordinator whose drafter has attached once, and all of whose later sessions are to be spared."""
    coordinator = Inviting(verifier, drafter)
    coordinator.run(coordinator.invite(1))
    spare_all(monkeypatch)
    drafter.budgets.clear()
    return coordinator


def test_most_sessions_do_without_a_drafter_that_has_brought_nothing(verifier: Scheduler, text: list[int]) -> None:
    """All but one of eight; they take what plain decoding takes, and the drafter never hears of them."""
    drafter = Drafter(verifier, text, right_from=1e9)
    coordinator, sure = Inviting(verifier, drafter), LOST_IN_A_ROW + 2 * TRIED_ANYWAY
    spent_s, asked = list[float](), list[bool]()
    for _ in range(sure):
        session_id = coordinator.invite(30)
        spent_s.append(coordinator.run(session_id))
        assert coordinator.tokens(session_id) == text[:30]
        asked.append(session_id in coordinator.tokens_issued)
        assert asked[-1] == (session_id in drafter.texts)
    assert asked[:LOST_IN_A_ROW] == [True] * LOST_IN_A_ROW
    for begin in (LOST_IN_A_ROW, LOST_IN_A_ROW + TRIED_ANYWAY):
        assert asked[begin : begin + TRIED_ANYWAY].count(True) == 1
    spared_s = [seconds for seconds, tried in zip(spent_s, asked, strict=True) if not tried]
    assert spared_s == pytest.approx([30 * TABLE[1]] * len(spared_s), abs=1e-9)


def test_they_get_it_when_their_text_begins_to_repeat_itself(
    verifier: Scheduler, text: list[int], repeats_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter(verifier, text, right_from=len(PROMPT) + repeats_at - LEAST, takes_s=0.0003)
    coordinator = known_to_be_worthless(verifier, drafter, monkeypatch)
    session_id = coordinator.invite(TOKENS)
    assert session_id not in coordinator.tokens_issued
    spent_s = coordinator.run(session_id)
    assert coordinator.tokens(session_id) == text
    assert 0 <= drafter.attached_at[session_id] - len(PROMPT) - repeats_at <= LOOK_EVERY + 2
    assert drafter.budgets[0] == PROBE_BUDGET, "a try"
    assert min(drafter.budgets) > 0, "which went well"
    assert PLAIN_S / spent_s > 1.5


def test_a_try_that_fails_counts_and_is_not_made_again_in_the_same_repetition(
    verifier: Scheduler, text: list[int], repeats_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter(verifier, text, right_from=1e9, takes_s=0.0003)
    coordinator = known_to_be_worthless(verifier, drafter, monkeypatch)
    (reputation,) = verifier._drafts._reputations.values()
    session_id = coordinator.invite(repeats_at + 60)
    coordinator.run(session_id)
    assert session_id in drafter.attached_at
    assert reputation.woken_in_vain == 1
    tried = [budget > 0 for budget in drafter.budgets]
    assert tried == sorted(tried, reverse=True), "one try"


def test_they_get_it_once_they_have_done_without_for_long(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: False)
    monkeypatch.setattr(issuer, "FIRST_REST", 1)
    drafter = Drafter(verifier, text, right_from=0, takes_s=0.0003)
    coordinator = known_to_be_worthless(verifier, drafter, monkeypatch)
    session_id = coordinator.invite(TOKENS)
    coordinator.run(session_id)
    assert coordinator.tokens(session_id) == text
    assert 0 <= drafter.attached_at[session_id] - len(PROMPT) - PROBE_EVERY <= LOOK_EVERY + 2
    assert drafter.budgets[0] == PROBE_BUDGET
    (reputation,) = verifier._drafts._reputations.values()
    assert reputation.woken_in_vain == 0


@pytest.mark.parametrize("takes_s", [0.0001, 0.0004, 0.002])
@pytest.mark.parametrize("kind", [CountedEngine, OverlappingEngine])
def test_together_sessions_try_no_more_than_all_of_them_can_afford(
    tiny_target: Path, text: list[int], monkeypatch: pytest.MonkeyPatch, kind: type[CountedEngine], takes_s: float
) -> None:
    """Passes as quick as drafts, something that always speaks for a try, and four sessions that wait for each one's.
    The first four get to know the drafter."""
    monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: True)
    table = {rows: 0.0002 + 0.000002 * rows for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)}
    waves, tokens, many = 15, 150, 4

    def speed(right_from: float) -> float:
        """Over plain decoding."""
        with serving(tiny_target, kind, table=table) as verifier:
            coordinator = Inviting(verifier, Drafter(verifier, text, right_from=right_from, takes_s=takes_s))
            spent_s = [wave(verifier, coordinator, tokens, many) for _ in range(waves)]
        return (waves - 1) * tokens * table[many] / sum(spent_s[1:])

    assert speed(right_from=1e9) > 0.96
    least = {0.0001: 2.5, 0.0004: 0.94, 0.002: 0.96}  # drafts are worth it, just so, not
    assert speed(right_from=0.0) > least[takes_s]


def wave(verifier: Scheduler, coordinator: Inviting, tokens: int, sessions: int) -> float:
    """Seconds that so many texts took together."""
    ids = [coordinator.invite(tokens) for _ in range(sessions)]
    began, credit = verifier._clock(), verifier_pb2.Credit(up_to_len=10**6)
    coordinator.link.send([SessionCommand(session_id=session, credit=credit) for session in ids])
    for session in ids:
        coordinator.finish(session)
    verifier.list_sessions()
    return verifier._clock() - began


def test_a_good_drafter_is_not_kept_from_many_sessions_that_begin_at_once(tiny_target: Path, text: list[int]) -> None:
    """Deposits of some may make the others wait for a moment, and no longer."""
    many, tokens, table = 16, 100, {rows: 0.013 + 0.00001 * rows for rows in range(1, 200)}
    with serving(tiny_target, CountedEngine, table=table, sessions=many) as verifier:
        coordinator = Inviting(verifier, Drafter(verifier, text, right_from=0, takes_s=0.0003))
        coordinator.run(coordinator.invite(tokens))
        spent_s = wave(verifier, coordinator, tokens, many)
        (reputation,) = verifier._drafts._reputations.values()
        assert not reputation.in_red
        assert reputation._held == 0.0
    assert len(coordinator.tokens_issued) == 1 + many
    assert tokens * table[many] / spent_s > 2.5


@pytest.mark.parametrize("way", ["cancel", "revoke", "ask again", "attach elsewhere"])
def test_a_token_that_is_never_used_costs_its_drafter_nothing(verifier: Scheduler, text: list[int], way: str) -> None:
    coordinator = Inviting(verifier, Drafter(verifier, text, right_from=0, takes_s=0.0003))
    coordinator.run(coordinator.invite(60))
    (reputation,) = verifier._drafts._reputations.values()
    other, attach = Drafter(verifier, text, right_from=0, takes_s=0.0003), coordinator.drafter.attach
    coordinator.drafter.attach = other.attach if way == "attach elsewhere" else lambda session_id, token: None  # type: ignore[method-assign]
    for _ in range(20):
        session_id = coordinator.invite(4)
        assert session_id in coordinator.tokens_issued
        if way == "ask again":
            coordinator.command(session_id, issue_attach=verifier_pb2.IssueAttach())
        elif way == "revoke":
            coordinator.command(session_id, revoke_attach=verifier_pb2.RevokeAttach())
        verifier.list_sessions()
        assert reputation._held == (2.0 if way == "cancel" else 0.0)
        coordinator.command(session_id, cancel=verifier_pb2.Cancel())
        verifier.list_sessions()
        assert reputation._held == 0.0
    coordinator.drafter.attach = attach  # type: ignore[method-assign]
    assert not reputation.spares()


def test_a_session_that_ends_while_its_drafter_rests_leaves_no_deposit(
    tiny_target: Path, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pass after which its text speaks for a try and the look at it."""
    monkeypatch.setattr(pass_runner, "LOOK_EVERY", 1)
    with serving(tiny_target, OverlappingEngine) as verifier:
        coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
        coordinator.drafter_id = ""  # the drafter attaches, and rests
        (reputation,) = verifier._drafts._reputations.values()
        reputation.book(0.0, TABLE[1])
        session_id = coordinator.invite(TOKENS)
        live = verifier._roster.get(session_id)
        assert live is not None
        monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: len(tokens) >= 20)
        look = verifier._look_around

        def cancel_first(*, at_once: bool = True) -> bool:
            if len(live.session.tokens) == 20 and live.lives:
                assert live.attachment is not None
                verifier._roster.cancel(live)
            return look(at_once=at_once)

        monkeypatch.setattr(verifier, "_look_around", cancel_first)
        coordinator.command(session_id, credit=verifier_pb2.Credit(up_to_len=10**6))
        coordinator.failure(session_id)
        verifier.list_sessions()
        assert reputation._held == 0.0


@pytest.mark.parametrize("drafter_id", ["one", ""])
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_what_sessions_decode_without_their_drafter_pays_for_what_it_lost(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch, drafter_id: str, tokens: int
) -> None:
    """Of sessions that wait with its token, and of those whose drafter rests."""
    monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: False)
    coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
    coordinator.drafter_id = drafter_id
    (reputation,) = verifier._drafts._reputations.values()
    reputation.book(-1e6, TABLE[1])
    monkeypatch.setattr(Reputation, "spend", lambda self, seconds: None)
    before = reputation._balance
    assert before < -10
    for _ in range(4):
        session_id = coordinator.invite(tokens)
        assert (session_id in coordinator.tokens_issued) is not drafter_id
        coordinator.run(session_id)
        verifier.list_sessions()
    assert max(coordinator.drafter.budgets, default=0) == 0
    assert reputation._balance - before == pytest.approx(4 * tokens * ALLOWED_SHARE)


def test_a_token_that_is_not_used_while_its_session_goes_on_costs_its_drafter_nothing(
    verifier: Scheduler, text: list[int]
) -> None:
    coordinator = Inviting(verifier, Drafter(verifier, text, right_from=0, takes_s=0.0003))
    coordinator.run(coordinator.invite(60))
    (reputation,) = verifier._drafts._reputations.values()
    coordinator.drafter.attach = lambda session_id, token: None  # type: ignore[method-assign]
    session_id = coordinator.invite(TOKENS)
    assert reputation._held == 2.0
    coordinator.command(session_id, credit=verifier_pb2.Credit(up_to_len=len(PROMPT) + 60))
    coordinator.wait(lambda: len(coordinator.tokens(session_id)) == 60)
    verifier.list_sessions()
    assert reputation._held == 0.0


@pytest.mark.parametrize(("gave_up", "budget"), [(True, PROBE_BUDGET), (False, 15)])
def test_who_waited_for_the_red_alone_is_not_merely_tried(
    tiny_target: Path, text: list[int], monkeypatch: pytest.MonkeyPatch, gave_up: bool, budget: int
) -> None:
    monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: False)
    monkeypatch.setattr(issuer, "FIRST_REST", 0)
    with serving(tiny_target, CountedEngine) as verifier:
        coordinator = Inviting(verifier, Drafter(verifier, text, right_from=0, takes_s=0.0003))
        coordinator.run(coordinator.invite(1))
        (reputation,) = verifier._drafts._reputations.values()
        while not reputation.in_red:
            reputation.book(-0.001 * TABLE[1], TABLE[1])
        monkeypatch.setattr(Reputation, "spend", lambda self, seconds: None)
        monkeypatch.setattr(Reputation, "gave_up", property(lambda self: gave_up))
        coordinator.drafter.budgets.clear()
        session_id = coordinator.invite(40)
        assert session_id not in coordinator.tokens_issued
        coordinator.run(session_id)
        assert coordinator.drafter.budgets[0] == budget


def test_while_a_token_waits_the_former_one_does_not_count(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
    late, worthless = Drafter(verifier, text, right_from=0), coordinator.drafter
    coordinator.drafter.attach = lambda session_id, token: None  # type: ignore[method-assign]
    coordinator.drafter_id = "another"
    session_id = coordinator.invite(10)
    (token,) = coordinator.tokens_issued[session_id]
    coordinator.command(session_id, issue_attach=verifier_pb2.IssueAttach(drafter_id="one"))
    verifier.list_sessions()
    assert len(coordinator.tokens_issued[session_id]) == 1
    late.attach(session_id, token)
    coordinator.run(session_id)
    assert not late.texts
    assert list(verifier._drafts._ids.values()) == ["one"]
    assert session_id not in worthless.texts
    verifier._drafts.lose(next(iter(verifier._drafts._ids)))
    assert not verifier._drafts._ids


def test_who_comes_in_a_drafters_place_does_not_wait(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: False)
    coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
    session_id = coordinator.invite(40)
    assert session_id not in coordinator.tokens_issued
    coordinator.drafter.link.close()
    coordinator.drafter = Drafter(verifier, text, right_from=0, takes_s=0.0003)
    verifier.list_sessions()
    coordinator.run(session_id)
    assert coordinator.tokens(session_id) == text[:40]
    assert coordinator.drafter.attached_at[session_id] - len(PROMPT) <= LOOK_EVERY + 2
    assert coordinator.drafter.budgets[0] == 0, "its own link is spared as all are here"


@pytest.mark.parametrize("drafter_id", ["", "another"])
def test_nobody_waits_for_a_drafter_that_is_not_known(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch, drafter_id: str
) -> None:
    coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
    coordinator.drafter_id = drafter_id
    session_id = coordinator.invite(4)
    assert session_id in coordinator.tokens_issued
    assert session_id in coordinator.drafter.texts
    coordinator.run(session_id)


def test_a_longer_id_than_any_is_one_like_others(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Inviting(verifier, Drafter(verifier, text, right_from=1e9), drafter_id="x" * 100_000)
    coordinator.run(coordinator.invite(1))
    spare_all(monkeypatch)
    for drafter_id, issued in (("x" * 100_000, False), ("x" * 100_001, True)):
        coordinator.drafter_id = drafter_id
        session_id = coordinator.invite(2)
        coordinator.run(session_id)
        assert (session_id in coordinator.tokens_issued) is issued
    assert max(len(known) for known in verifier._drafts._ids.values()) == 64


def test_nobody_waits_where_drafting_is_unconditional(
    tiny_target: Path, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_target, CountedEngine, drafting="unconditional") as verifier:
        coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
        session_id = coordinator.invite(4)
        assert session_id in coordinator.tokens_issued
        coordinator.run(session_id)
        assert min(coordinator.drafter.budgets) > 0


def test_a_token_that_waits_can_be_revoked_and_asked_for_again(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = known_to_be_worthless(verifier, Drafter(verifier, text, right_from=1e9), monkeypatch)
    session_id = coordinator.invite(TOKENS)
    coordinator.command(session_id, revoke_attach=verifier_pb2.RevokeAttach())
    coordinator.command(session_id, credit=verifier_pb2.Credit(up_to_len=len(PROMPT) + TOKENS - 20))
    coordinator.wait(lambda: len(coordinator.tokens(session_id)) == TOKENS - 20)
    assert session_id not in coordinator.tokens_issued, "though its text repeats itself"
    coordinator.command(session_id, issue_attach=verifier_pb2.IssueAttach())
    coordinator.run(session_id)
    assert coordinator.tokens(session_id) == text
    assert len(coordinator.tokens_issued[session_id]) == 1
