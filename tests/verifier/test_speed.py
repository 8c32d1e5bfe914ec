"""What drafters cost and gain, in a time that is counted, not measured: every pass takes what the table says.

The clock is turned by the engine (a pass), by the drafter (its work) and by nothing else, so that the scheduler's
decisions are the same on any machine, and the promises about speed can be held to the microsecond.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from verifier_harness import Coordinator, CountedEngine, HandClock, plain_text

from specla.v1 import verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, VerdictItem
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.repetition import LEAST, Repetition
from specla.verifier_service.scheduler import Scheduler
from specla.verifier_service.speed_guard import ALLOWED_S, LOST_IN_A_ROW, PROBE_EVERY, TRIED_ANYWAY, Reputation

PROMPT = [72, 101, 108, 108, 111]
TOKENS = 200
QUICK = {1: 0.00021, 2: 0.00024, 5: 0.00025, 9: 0.00026, 17: 0.00028, 33: 0.00032, 65: 0.0004}
"""Of a device where a pass takes as long as a draft, and rows hardly anything."""

TABLE = {1: 0.0130, 2: 0.0138, 3: 0.0146, 5: 0.0165, 9: 0.0245, 17: 0.0430, 33: 0.0800}


class Drafter:
    """Drafts chains inside `wake`, each token right with a chance, and claims another one."""

    top_k = 0

    def __init__(self, verifier: Scheduler, text: Sequence[int], *, right: float, claim: float, takes_s: float):
        self.text, self.right, self.claim, self.takes_s = text, right, claim, takes_s
        self.known: list[int] = []
        self.chance = random.Random(5)
        self.probes = 0
        self.budgets: list[int] = []
        self.verifier = verifier
        self.seq = 1
        self.link = verifier.connect_drafter(self.draft)

    def attach(self, session: bytes, token: bytes) -> None:
        attach = verifier_pb2.Attach(attach_token=token, top_k=self.top_k)
        self.link.send([DraftItem(session_id=session, seq=1, attach=attach)])

    def draft(self) -> None:
        for item in self.link.take():
            if item.WhichOneof("item") in ("attached", "verdict"):
                self.hear(item)

    def hear(self, item: VerdictItem) -> None:
        news = getattr(item, item.WhichOneof("item"))
        self.known += news.tokens
        if self.budgets and not self.budgets[-1] and news.node_budget:
            self.probes += 1
        self.budgets.append(news.node_budget)
        if news.node_budget:
            self.verifier._clock.now += self.takes_s  # type: ignore[attr-defined]
            self.send(item.session_id, news.node_budget)

    def send(self, session: bytes, budget: int) -> None:
        start = len(self.known) - len(PROMPT)
        tokens = [
            token if self.chance.random() < self.right else (token + 1) % 320
            for token in self.text[start : start + min(budget, 8)]
        ]
        topology = verifier_pb2.Topology(
            base_len=len(self.known),
            root_token=self.known[-1],
            tokens=tokens,
            parents=range(-1, len(tokens) - 1),
            log_probs=[self.claim] * len(tokens),
        )
        self.seq += 1
        self.post(DraftItem(session_id=session, seq=self.seq, topology=topology))

    def post(self, item: DraftItem) -> None:
        self.link.send([item])


HOST_S = 0.0002


class BusyHost(Scheduler):
    """Has something to do for every pass beside it."""

    def _look_around(self, *, at_once: bool = True) -> None:
        self._clock.now += HOST_S  # type: ignore[attr-defined]
        super()._look_around(at_once=at_once)


def counted(target: Path, table: dict[int, float], kind: type[Scheduler] = Scheduler) -> Scheduler:
    clock = HandClock()
    config = VerifierConfig(target=target, threads=1, max_sessions=4)
    return kind(CountedEngine(config, clock, table), config, clock).start(PassTimes(table))


class FaultyDrafter(Drafter):
    """Every draft of its has a root that is not the session's, and is refused."""

    def post(self, item: DraftItem) -> None:
        item.topology.root_token = (item.topology.root_token + 1) % 320
        super().post(item)


class StudiousDrafter(Drafter):
    """Is told of a second session, too, takes a second over all that it hears of it, and has no candidates for it."""

    studied: bytes | None = None

    def hear(self, item: VerdictItem) -> None:
        if item.session_id != self.studied:
            super().hear(item)
            return
        self.verifier._clock.now += 1.0  # type: ignore[attr-defined]
        news = getattr(item, item.WhichOneof("item"))
        if news.node_budget:
            self.seq += 1
            topology = verifier_pb2.Topology(base_len=news.committed_len, root_token=news.tokens[-1])
            self.post(DraftItem(session_id=item.session_id, seq=self.seq, topology=topology))


@pytest.fixture
def verifier(tiny_target: Path) -> Iterator[Scheduler]:
    with counted(tiny_target, TABLE) as verifier:
        yield verifier


@pytest.fixture
def quick(tiny_target: Path) -> Iterator[Scheduler]:
    with counted(tiny_target, QUICK) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def text(tiny_target: Path) -> list[int]:
    return plain_text(tiny_target, PROMPT, TOKENS)


RunWith = Callable[..., tuple[float, Drafter]]


def runs_of(verifier: Scheduler, text: list[int]) -> RunWith:
    def run(
        *, right: float, claim: float, takes_s: float = 0.0003, kind: type[Drafter] = Drafter
    ) -> tuple[float, Drafter]:
        """Seconds that the text took, and its drafter."""
        coordinator = Coordinator(verifier)
        session = coordinator.start(PROMPT, max_tokens=TOKENS, credit=0)
        coordinator.wait_for(session, "prefilled")
        drafter = kind(verifier, text, right=right, claim=claim, takes_s=takes_s)
        drafter.attach(session, coordinator.attach_token(session))
        began = verifier._clock()
        coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=10**6))
        assert coordinator.finish(session) == text
        return verifier._clock() - began, drafter

    return run


@pytest.fixture
def run_with(verifier: Scheduler, text: list[int]) -> RunWith:
    return runs_of(verifier, text)


@pytest.fixture
def run_quickly(quick: Scheduler, text: list[int]) -> RunWith:
    return runs_of(quick, text)


PLAIN_S = TOKENS * TABLE[1]


@pytest.mark.parametrize("claim", [-0.001, -0.7, -5.0])
@pytest.mark.parametrize("takes_s", [0.0003, 0.004])
def test_a_worthless_drafter_costs_next_to_nothing(run_with: RunWith, claim: float, takes_s: float) -> None:
    """Never right, whatever it claims and however slow it is: at least 0.97 of plain speed, probes apart."""
    spent_s, drafter = run_with(right=0.0, claim=claim, takes_s=takes_s)
    most_probes = TOKENS // PROBE_EVERY
    assert drafter.probes <= most_probes
    probes_s = drafter.probes * 4 * (takes_s + TABLE[5] - TABLE[1])
    assert PLAIN_S / (spent_s - probes_s - ALLOWED_S) >= 0.97
    assert PLAIN_S / spent_s >= 0.94


def test_a_drafter_whose_drafts_are_refused_costs_next_to_nothing(run_with: RunWith) -> None:
    spent_s, drafter = run_with(right=1.0, claim=-0.1, takes_s=0.004, kind=FaultyDrafter)
    assert 0 in drafter.budgets, "it pauses"
    assert PLAIN_S / spent_s >= 0.94


def one_goes_first(verifier: Scheduler, drafter: Drafter, tokens: int) -> tuple[Coordinator, bytes, bytes]:
    """Two sessions, one of which has a drafter and so many tokens."""
    coordinator = Coordinator(verifier)
    first, second = (coordinator.start(PROMPT, max_tokens=TOKENS, credit=0) for _ in range(2))
    drafter.attach(first, coordinator.attach_token(first))
    coordinator.command(first, credit=verifier_pb2.Credit(up_to_len=len(PROMPT) + tokens))
    coordinator.wait(lambda: len(coordinator.tokens(first)) == tokens)
    return coordinator, first, second


def attach_to_study(drafter: StudiousDrafter, coordinator: Coordinator, session: bytes) -> None:
    drafter.studied = session
    drafter.attach(session, coordinator.attach_token(session))


def test_what_the_study_of_a_prompt_takes_is_not_held_against_other_sessions(
    verifier: Scheduler, text: list[int]
) -> None:
    drafter = StudiousDrafter(verifier, text, right=1.0, claim=-0.01, takes_s=0.0003)
    coordinator, first, second = one_goes_first(verifier, drafter, TOKENS // 2)
    attach_to_study(drafter, coordinator, second)
    verifier.list_sessions()
    coordinator.command(first, credit=verifier_pb2.Credit(up_to_len=10**6))
    assert coordinator.finish(first) == text
    assert min(drafter.budgets) > 0, "it never pauses"


class Crowd(Drafter):
    """Drafts for several sessions of the same text, one after the other."""

    def __init__(self, verifier: Scheduler, text: Sequence[int], *, right: float, claim: float, takes_s: float):
        self.texts: dict[bytes, list[int]] = {}
        super().__init__(verifier, text, right=right, claim=claim, takes_s=takes_s)

    def hear(self, item: VerdictItem) -> None:
        self.known = self.texts.setdefault(item.session_id, [])
        super().hear(item)


def run_crowd(verifier: Scheduler, text: list[int], drafter: Drafter | None, sessions: int = 4) -> float:
    """Seconds until all of some sessions that run together have ended."""
    coordinator = Coordinator(verifier)
    ids = [coordinator.start(PROMPT, max_tokens=len(text), credit=0) for _ in range(sessions)]
    for session in ids:
        coordinator.wait_for(session, "prefilled")
        if drafter is not None:
            drafter.attach(session, coordinator.attach_token(session))
    verifier.list_sessions()
    began, credit = verifier._clock(), verifier_pb2.Credit(up_to_len=10**6)
    coordinator.link.send([verifier_pb2.SessionCommand(session_id=session, credit=credit) for session in ids])
    assert [coordinator.finish(session) for session in ids] == [text] * sessions
    return verifier._clock() - began


@pytest.mark.parametrize(("right", "takes_s"), [(0.0, 0.013), (0.6, 0.004), (0.9, 0.008), (0.9, 0.013)])
def test_all_sessions_of_a_pass_wait_for_the_drafting_of_each(
    verifier: Scheduler, text: list[int], right: float, takes_s: float
) -> None:
    """What gains where one session runs may cost the others more than it gains."""
    plain_s = run_crowd(verifier, text, None)
    spent_s = run_crowd(verifier, text, Crowd(verifier, text, right=right, claim=-0.4, takes_s=takes_s))
    assert plain_s / spent_s >= 0.94


def booked(verifier: Scheduler) -> dict[bytes, float]:
    """What drafting has taken that is yet to be accounted for."""
    return {live.session_id: live.attachment.overhead_s for live in verifier._roster if live.attachment is not None}


def test_what_a_drafter_takes_is_not_booked_on_sessions_for_which_it_rests(
    verifier: Scheduler, text: list[int]
) -> None:
    drafter = StudiousDrafter(verifier, text, right=0.0, claim=-0.01, takes_s=0.0003)
    coordinator, first, second = one_goes_first(verifier, drafter, 20)
    assert drafter.budgets[-1] == 0
    before = booked(verifier)
    attach_to_study(drafter, coordinator, second)
    coordinator.command(second, credit=verifier_pb2.Credit(up_to_len=len(PROMPT) + 1))
    coordinator.wait(lambda: len(coordinator.tokens(second)) == 1)
    verifier.list_sessions()
    found = booked(verifier)
    assert found[first] == before[first]
    assert found[second] >= 1.0, "it heard of a pass"


def test_what_it_takes_to_be_told_a_prompt_is_no_other_sessions_where_it_begins_with_a_pause(
    verifier: Scheduler, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = StudiousDrafter(verifier, text, right=1.0, claim=-0.01, takes_s=0.0003)
    coordinator, _, second = one_goes_first(verifier, drafter, 20)
    verifier.list_sessions()
    before = booked(verifier)
    monkeypatch.setattr(Reputation, "spares", lambda self: True)
    attach_to_study(drafter, coordinator, second)
    coordinator.wait(lambda: coordinator.events(second, "drafter_changed"))
    verifier.list_sessions()
    assert booked(verifier) == {**before, second: 0.0}


def test_sessions_of_a_link_that_was_worthless_so_far_begin_with_a_pause(verifier: Scheduler, text: list[int]) -> None:
    """All but one of eight; and as soon as one has gained something, all are asked from the beginning again."""
    coordinator, asked, spent_s = Coordinator(verifier), list[bool](), list[float]()
    drafter = Drafter(verifier, text, right=0.0, claim=-0.1, takes_s=0.012)
    first = LOST_IN_A_ROW
    sure = first + 2 * TRIED_ANYWAY
    for session in range(sure + 2 * TRIED_ANYWAY):
        if session == sure:
            drafter.right = 1.0
        drafter.known, drafter.budgets = [], []
        name = coordinator.start(PROMPT, max_tokens=30, credit=0)
        coordinator.wait_for(name, "prefilled")
        drafter.attach(name, coordinator.attach_token(name))
        began = verifier._clock()
        coordinator.command(name, credit=verifier_pb2.Credit(up_to_len=10**6))
        assert coordinator.finish(name) == text[:30]
        verifier.list_sessions()  # by now the drafter has heard of the end, too
        spent_s.append(verifier._clock() - began)
        asked.append(drafter.budgets[0] > 0)
    assert asked[:first] == [True] * first
    for begin in (first, first + TRIED_ANYWAY):
        assert asked[begin : begin + TRIED_ANYWAY].count(True) == 1
    again = sure + asked[sure:].index(True)
    assert again < sure + TRIED_ANYWAY
    assert asked[again:] == [True] * (len(asked) - again)
    plain_s = 30 * TABLE[1]
    resting = [plain_s / seconds for seconds, tried in zip(spent_s[:sure], asked[:sure], strict=True) if not tried]
    assert resting == pytest.approx([1.0] * (sure - first - 2), abs=1e-6)
    assert plain_s / spent_s[-1] > 2.0


class Loops(Drafter):
    """Wrong until the text repeats itself, then right: what drafts from earlier text alone."""

    begin = 0

    def send(self, session: bytes, budget: int) -> None:
        self.right = 1.0 if len(self.known) - len(PROMPT) > self.begin else 0.0
        super().send(session, budget)


@pytest.mark.parametrize("top_k", [0, 1])
def test_a_drafter_that_rests_is_tried_when_the_text_begins_to_repeat_itself(
    run_with: RunWith, text: list[int], monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    """Also one for which something is kept of each pass."""
    watch, told = Repetition(), list[int]()
    for length in range(1, TOKENS + 1):
        if watch.begins([*PROMPT, *text[:length]], 0):
            told.append(length)
    assert told
    assert told[0] < 100, "the text repeats itself before its drafter would be tried anyway"
    monkeypatch.setattr(Loops, "begin", told[0] - LEAST)
    monkeypatch.setattr(Loops, "top_k", top_k)
    sooner_s, drafter = run_with(right=0.0, claim=-0.1, kind=Loops)
    assert drafter.probes == 1
    monkeypatch.setattr(Repetition, "begins", lambda self, tokens, failures: False)
    later_s, _ = run_with(right=0.0, claim=-0.1, kind=Loops)
    assert PLAIN_S / sooner_s > 1.5
    assert later_s / sooner_s > 1.2


def run_one_by_one(verifier: Scheduler, drafter: Drafter, prompt: list[int], wanted: list[int], sessions: int) -> float:
    """Seconds that so many sessions took together."""
    coordinator, spent_s = Coordinator(verifier), 0.0
    for _ in range(sessions):
        drafter.known = []
        name = coordinator.start(prompt, max_tokens=len(wanted), credit=0)
        coordinator.wait_for(name, "prefilled")
        drafter.attach(name, coordinator.attach_token(name))
        verifier.list_sessions()
        began = verifier._clock()
        coordinator.command(name, credit=verifier_pb2.Credit(up_to_len=10**6))
        assert coordinator.finish(name) == wanted
        verifier.list_sessions()  # by now the drafter has heard of the end, too
        spent_s += verifier._clock() - began
    return spent_s


def test_a_worthless_drafter_is_not_tried_again_in_each_of_many_texts_that_repeat_themselves(
    verifier: Scheduler, text: list[int]
) -> None:
    """Short ones, for each of which its prompt speaks: what was tried in vain counts for all sessions of the link."""
    loop = next(place for place in range(len(text)) if len(set(text[place : place + 30])) == 1)
    drafter = Drafter(verifier, [-1] * 1000, right=0.0, claim=-0.1, takes_s=0.012)
    prompt, wanted = [*PROMPT, *text[: loop + 12]], text[loop + 12 :][:16]
    assert 40 * 16 * TABLE[1] / run_one_by_one(verifier, drafter, prompt, wanted, 40) >= 0.94


@pytest.mark.parametrize("takes_s", [0.0013, 0.004])
def test_a_worthless_drafter_costs_little_where_texts_end_before_it_pauses(
    verifier: Scheduler, text: list[int], takes_s: float
) -> None:
    drafter = Drafter(verifier, text, right=0.0, claim=-0.1, takes_s=takes_s)
    assert 80 * 6 * TABLE[1] / run_one_by_one(verifier, drafter, PROMPT, text[:6], 80) >= 0.94


def test_what_the_host_does_for_each_pass_is_saved_with_it(
    tiny_target: Path, quick: Scheduler, text: list[int], run_quickly: RunWith
) -> None:
    """Drafts that take more than the passes they save, but less than these passes and what lies between them."""
    takes_s = 0.0006
    alone_s, _ = run_quickly(right=0.8, claim=-0.4, takes_s=takes_s)
    assert QUICK[1] * TOKENS / alone_s == pytest.approx(0.97, abs=0.02)
    assert quick._passes.times.between(1) == 0.0
    with counted(tiny_target, QUICK, BusyHost) as busy:
        spent_s, _ = runs_of(busy, text)(right=0.8, claim=-0.4, takes_s=takes_s)
        assert busy._passes.times.between(1) == pytest.approx(HOST_S)
        assert busy._passes.times.iteration(1) == pytest.approx(HOST_S + QUICK[1])
    assert (QUICK[1] + HOST_S) * TOKENS / spent_s > 1.1


@pytest.mark.parametrize("claim", [-0.001, -2.0])
def test_a_good_drafter_gains_whatever_it_claims(run_with: RunWith, claim: float) -> None:
    spent_s, _ = run_with(right=0.9, claim=claim)
    assert PLAIN_S / spent_s > 2.0


def test_a_middling_drafter_gains_a_little(run_with: RunWith) -> None:
    spent_s, drafter = run_with(right=0.5, claim=-0.7)
    assert PLAIN_S / spent_s > 1.3
    assert drafter.probes == 0


def test_a_perfect_drafter_is_asked_for_more(run_with: RunWith) -> None:
    spent_s, drafter = run_with(right=1.0, claim=-0.01)
    assert PLAIN_S / spent_s > 3.0
    assert min(drafter.budgets) >= 8


@pytest.mark.parametrize("claim", [-0.001, -0.7, -5.0])
@pytest.mark.parametrize("takes_s", [0.00005, 0.0002, 0.0006])
def test_a_worthless_drafter_costs_little_where_a_pass_takes_no_longer_than_a_draft(
    run_quickly: RunWith, claim: float, takes_s: float
) -> None:
    spent_s, _ = run_quickly(right=0.0, claim=claim, takes_s=takes_s)
    assert TOKENS * QUICK[1] / spent_s >= 0.95


@pytest.mark.parametrize("takes_s", [0.00005, 0.0002])
def test_a_good_drafter_gains_there(run_quickly: RunWith, takes_s: float) -> None:
    spent_s, _ = run_quickly(right=0.9, claim=-0.1, takes_s=takes_s)
    assert TOKENS * QUICK[1] / spent_s > (3.0 if takes_s < 0.0001 else 1.8)


class FarDrafter(Drafter):
    """A drafter whose drafts take a while to come; None: they never do."""

    def __init__(self, verifier: Scheduler, text: Sequence[int], *, right: float, claim: float, away_s: float | None):
        self.away_s = away_s
        self.due: deque[tuple[float, DraftItem]] = deque()
        super().__init__(verifier, text, right=right, claim=claim, takes_s=0.0)

    def post(self, item: DraftItem) -> None:
        if self.away_s is not None:
            self.due.append((self.verifier._clock() + self.away_s, item))

    def deliver(self) -> None:
        while self.due and self.due[0][0] <= self.verifier._clock():
            self.link.send([self.due.popleft()[1]])


TICK_S = 1e-4


@pytest.fixture
def run_far(verifier: Scheduler, text: list[int]) -> Callable[..., float]:
    def run(*, right: float, claim: float, away_s: float | None) -> float:
        """Seconds that the text took."""
        coordinator = Coordinator(verifier)
        session = coordinator.start(PROMPT, max_tokens=TOKENS, credit=0)
        coordinator.wait_for(session, "prefilled")
        drafter = FarDrafter(verifier, text, right=right, claim=claim, away_s=away_s)
        drafter.attach(session, coordinator.attach_token(session))

        def let_time_pass() -> None:
            """At each turn of the scheduler's thread, so that time goes on while it sleeps in a wait."""
            if len(verifier._roster):
                verifier._clock.now += TICK_S  # type: ignore[attr-defined]
                drafter.deliver()
                verifier._mailbox.post(let_time_pass)

        def begin() -> float:
            began = verifier._clock()
            let_time_pass()
            return began

        coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=10**6))
        began = verifier.ask(begin).result()
        assert coordinator.finish(session) == text
        ended_len = len(coordinator.events(session, "committed"))
        return verifier._clock() - began - TICK_S * ended_len  # each pass is a turn, too

    return run


def test_a_silent_drafter_costs_little_more_than_its_allowance(run_far: Callable[..., float]) -> None:
    """It attaches and never drafts: the session waits in vain a few times, then hardly ever."""
    assert run_far(right=1.0, claim=-0.1, away_s=None) <= PLAIN_S * 1.02 + ALLOWED_S + 0.01


def test_a_drafter_that_always_comes_too_late_costs_little(run_far: Callable[..., float]) -> None:
    assert PLAIN_S / (run_far(right=1.0, claim=-0.1, away_s=0.2) - ALLOWED_S) >= 0.96


def test_a_worthless_drafter_far_away_costs_little(run_far: Callable[..., float]) -> None:
    assert PLAIN_S / (run_far(right=0.0, claim=-0.1, away_s=0.003) - ALLOWED_S) >= 0.94


def test_a_good_drafter_far_away_is_waited_for(run_far: Callable[..., float]) -> None:
    assert PLAIN_S / run_far(right=0.8, claim=-0.2, away_s=0.003) > 1.6
