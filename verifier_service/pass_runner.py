"""One pass: choose who takes part, decide how much of each draft is worth it, run, tell everybody.

Speculation as the verifier sees it: a draft is taken from its box, trimmed to what pays, verified, and what was
accepted is committed. A session without a draft decodes one token, after a wait that may pay off (draft_wait.py).

Drafters are told at once, for the next pass may wait for them. Coordinators are told while the next pass runs, where
passes run by themselves, so that it need not wait for that; and so is accounted for drafters that rest.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specla.rpc.errors import SpeclaError
from specla.rpc.faults import fault_of, internal_error
from specla.verifier_service.attachment import Attachment
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import LEAST_CHANCE, PassTimes, Prospect, choose, keep_all, worth_drafting
from specla.verifier_service.drafting import DraftDesk
from specla.verifier_service.engine import Engine
from specla.verifier_service.intake import Draft
from specla.verifier_service.issuer import Issuer
from specla.verifier_service.news import News
from specla.verifier_service.part import Part
from specla.verifier_service.passes import PassResult
from specla.verifier_service.repetition import LOOK_EVERY
from specla.verifier_service.roster import LiveSession, Roster

_NO_DRAFT = Prospect((), (), 0)


class Ended(NamedTuple):
    """A pass that has ended, of which something is still to be learnt.

    Attributes:
        rows: of all sessions.
        sessions: that took part.
        seconds: it took.
        counted_s: what of it counts; None if that is still to be learnt.
        resting: sessions whose drafters rest, and go on resting.
        inviting: sessions that wait with their drafter's attach token.
    """

    rows: int
    sessions: int
    seconds: float
    counted_s: float | None
    resting: Sequence[tuple[LiveSession, Attachment]]
    inviting: Sequence[LiveSession]


class _Before(NamedTuple):
    """The pass before, as far as what lies between it and the next one tells something: sessions, its end, and what
    drafting had taken until then."""

    sessions: int
    ended: float
    spent_s: float


class PassRunner:
    """Chooses and runs passes on the scheduler's thread.

    Args:
        engine: runs them.
        roster: the sessions.
        drafts: tells drafters what came out.
        issuer: is asked about drafters that are not attached yet.
        config: limits of a pass.
        clock: seconds.

    Attributes:
        times: forecasts of pass durations.
    """

    def __init__(
        self,
        engine: Engine,
        roster: Roster,
        drafts: DraftDesk,
        issuer: Issuer,
        config: VerifierConfig,
        clock: Callable[[], float],
    ):
        self.times = PassTimes({1: 0.01})
        self._engine = engine
        self._roster = roster
        self._drafts = drafts
        self._issuer = issuer
        self._max_batch_rows = config.max_batch_rows
        self._unconditional = config.drafting == "unconditional"
        self._clock = clock
        self._news = News(roster, clock)
        self._unlearnt: list[Ended] = []
        self._before: _Before | None = None

    def run(self, meanwhile: Callable[[], None], *, follows: bool = True) -> float | None:
        """Run a pass, if one is due.

        Args:
            meanwhile: called while the pass runs, or before it is chosen where passes do not run by themselves. It may
                open and end sessions and tell news.
            follows: whether the device has done nothing since the pass before.

        Returns:
            None after a pass; otherwise when one may be due without further mail, infinity for never.

        Raises:
            Exception: of `meanwhile`, once the pass has ended and its sessions have moved on.
        """
        before, self._before = self._before if follows else None, None
        if not self._engine.overlaps:
            meanwhile()
        ready = [live for live in self._roster if live.may_run]
        chosen, due = self._choose(ready, self._clock())
        if not chosen:
            return due
        planning = self._clock()
        parts = self._plan(chosen)
        planned = self._clock()
        if before is not None and before.sessions == len(parts):
            self.times.observe_between(before.sessions, planning - before.ended - self._drafts.spent_s + before.spent_s)
        self._run(parts, planned - planning, meanwhile if self._engine.overlaps else None)
        return None

    def tell_news(self, *, at_once: bool = True) -> None:
        """Tell coordinators what passes brought, if that is due. And learn from the last pass's duration, where no
        drafter waits for what the next pass makes of that."""
        unlearnt, self._unlearnt = self._unlearnt, []
        for ended in unlearnt:
            self._learn(ended)
        self._news.tell(at_once=at_once)

    def _choose(self, ready: Sequence[LiveSession], now: float) -> tuple[list[LiveSession], float]:
        """Who takes part now, and, if nobody does, when the first wait ends."""
        going, owed = [], []
        for live in ready:
            attachment = live.attachment
            if attachment is None or attachment.drafts.current is not None or not attachment.owes:
                going.append(live)
            else:
                owed.append((live, attachment))
        if not owed:
            return going, now if going else math.inf
        plain_s, waiting = self.times.iteration(len(ready), len(ready)), []
        for live, attachment in owed:
            drafted_s = self.times.iteration(len(ready) + round(attachment.budget.mean_kept), len(ready))
            until = attachment.wait.until(now, plain_s, drafted_s)
            if until > now:
                waiting.append((until, live))
            else:
                going.append(live)
        if not going:
            return [], min((until for until, _ in waiting), default=math.inf)
        # A session may sit this pass out only if it ends before the session's patience does.
        back_at = now + self.times.iteration(len(going), len(going))
        return going + [live for until, live in waiting if until < back_at], now

    def _plan(self, chosen: Sequence[LiveSession]) -> list[Part]:
        drafts = [live.attachment.drafts.take() if live.attachment is not None else None for live in chosen]
        if all(draft is None for draft in drafts):
            return [Part(live, None, ()) for live in chosen]
        prospects = [_prospect(live, draft) for live, draft in zip(chosen, drafts, strict=True)]
        if self._unconditional:
            kept = keep_all(prospects, self._max_batch_rows)
        else:
            kept = choose(prospects, self.times, self._max_batch_rows)
        return [Part(live, draft, nodes) for live, draft, nodes in zip(chosen, drafts, kept, strict=True)]

    def _run(self, parts: Sequence[Part], planned_s: float, meanwhile: Callable[[], None] | None) -> None:
        not_of_pass = None
        try:
            self._engine.settle()
            started = self._clock()
            running = self._engine.begin_pass([part.item() for part in parts])
            if meanwhile is not None:
                not_of_pass = fault_of(meanwhile)
            results = self._engine.end_pass(running)
        except Exception as fault:
            error = fault if isinstance(fault, SpeclaError) else internal_error("pass", fault)
            for part in parts:
                if part.live.lives:
                    self._roster.fail(part.live, error)
            if not_of_pass is not None:
                raise not_of_pass from fault
            return
        ended = self._clock()
        self._before = _Before(len(parts), ended, self._drafts.spent_s)
        sessions, nodes = len(parts), sum([len(part.kept) for part in parts])
        rows, seconds, counted_s = sessions + nodes, ended - started, None
        resting, busy, inviting = list[tuple[LiveSession, Attachment]](), list[Attachment](), list[LiveSession]()
        least_credit = math.inf
        for part, result in zip(parts, results, strict=True):
            live = part.live
            if not live.lives:
                continue  # it ended while the pass ran
            if result.error is not None:
                self._roster.fail(live, result.error)
                continue
            live.moved_at = ended
            least_credit = min(least_credit, live.credit - len(live.session.tokens))
            live.untold.append((result, len(part.kept)))
            self._news.add(live)
            attachment = live.attachment
            if attachment is None:
                if live.invitation is not None and len(live.session.tokens) >= live.invitation.look_at:
                    inviting.append(live)
            elif _rests_on(part, attachment, result):
                resting.append((live, attachment))
            else:
                counted_s = self.times.observe(rows, sessions, seconds) if counted_s is None else counted_s
                self._account(part, attachment, result, started, counted_s, sessions, nodes)
                self._report(part, result)
                busy.append(attachment)
            if result.finish is not None:
                if attachment is not None:
                    attachment.earn(len(live.session.tokens), sessions)
                else:
                    self._issuer.settle(live, sessions)
                self._roster.finish(live, result.finish)
        self._news.pass_ended(sessions, least_credit)
        if counted_s is None or resting or inviting:
            self._unlearnt.append(Ended(rows, sessions, seconds, counted_s, resting, inviting))
        if busy:  # nothing of this would be done without drafters
            spent_s = self._clock() - ended
            self._drafts.spent_s += spent_s
            for attachment in busy:
                attachment.overhead_s += (planned_s + spent_s) / len(busy)
        if not_of_pass is not None:
            raise not_of_pass

    def _learn(self, ended: Ended) -> None:
        """From a pass's duration, if that was put off, and for drafters that rest."""
        counted_s = ended.counted_s
        if counted_s is None:
            counted_s = self.times.observe(ended.rows, ended.sessions, ended.seconds)
        decode_s = counted_s + self.times.between(ended.sessions)
        for live, attachment in ended.resting:
            attachment.rested_s += decode_s
            if live.attachment is attachment and len(live.session.tokens) >= attachment.look_at:
                attachment.earn(len(live.session.tokens), ended.sessions)
                _end_rest_if_text_repeats(live, attachment)
        for live in ended.inviting:
            if live.lives:
                self._issuer.look(live, ended.sessions)

    def _account(
        self,
        part: Part,
        attachment: Attachment,
        result: PassResult,
        started: float,
        counted_s: float,
        sessions: int,
        nodes: int,
    ) -> None:
        """Learn from the pass what this session's drafter is worth."""
        plain_s, decode_s = self.times.iteration(sessions, sessions), counted_s + self.times.between(sessions)
        committed_len = part.live.session.committed_len
        attachment.account_for_rest()
        attachment.earn(committed_len - len(result.tokens), sessions)
        drafting_s = attachment.overhead_s * sessions  # as long as that all sessions of the pass waited
        if part.draft is not None:
            worth = _worth_drafting(part.draft, part.kept, attachment, drafting_s / plain_s)
            attachment.calibrator.observe(part.draft, result.tokens)
            attachment.budget.observe(len(part.draft.tokens), len(part.kept), worth)
        waited_s = attachment.wait.settle(
            started,
            came=part.draft is not None,
            verified=len(part.kept),
            tokens=len(result.tokens),
            pass_s=decode_s,
        )
        # For its longer duration likewise; each drafter answers for its candidates' share.
        longer_s = max(0.0, decode_s - plain_s) * sessions * len(part.kept) / nodes if nodes else 0.0
        attachment.guard.record(
            committed_len,
            gained_s=len(result.accepted_nodes) * plain_s,
            cost_s=longer_s + waited_s + drafting_s,
            decode_s=decode_s,
            plain_s=plain_s,
            sessions=sessions,
        )
        attachment.looked_len = committed_len  # the pass has earned its part
        attachment.overhead_s = 0.0
        if attachment.is_quiet:
            _end_rest_if_text_repeats(part.live, attachment)
        in_vain = attachment.wait.exhausted or attachment.wait.granted_s == 0
        if part.draft is None and attachment.owes and in_vain and not attachment.guard.paused:
            attachment.guard.pause(committed_len)  # whom one does not wait for should not be asked

    def _report(self, part: Part, result: PassResult) -> None:
        self._drafts.report(
            part.live,
            seq=part.draft.seq if part.draft is not None else None,
            base_len=result.base_len,
            accepted_nodes=[part.kept[node] for node in result.accepted_nodes],
            top=result.top,
            seconds=result.seconds,
            is_last=result.finish is not None,
        )


def _worth_drafting(draft: Draft, kept: Sequence[int], attachment: Attachment, drafting: float) -> int:
    """How many of the candidates that were verified can save more time than one has taken to be drafted, which took as
    long as so many passes in all."""
    price = drafting / max(1, len(draft.tokens))
    if price < LEAST_CHANCE:
        return len(kept)
    return worth_drafting(draft.parents, attachment.calibrator.probabilities(draft.log_probs), kept, price)


def _rests_on(part: Part, attachment: Attachment, result: PassResult) -> bool:
    """Whether a drafter rests and is told nothing of a pass, so that what there is to account for can wait. It is asked
    anew as soon as that is due: while the next pass runs would be too late for a draft of it."""
    if not attachment.is_quiet or part.draft is not None or result.finish is not None or result.top:
        return False
    return attachment.drafts.is_empty and not attachment.guard.is_due(len(part.live.session.tokens))


def _end_rest_if_text_repeats(live: LiveSession, attachment: Attachment) -> None:
    attachment.look_at = len(live.session.tokens) + LOOK_EVERY
    if not attachment.reputation.in_red and attachment.repetition.begins(
        live.session.tokens, attachment.guard.failures
    ):
        attachment.guard.end_rest(live.session.committed_len)


def _prospect(live: LiveSession, draft: Draft | None) -> Prospect:
    """What a draft offers; candidates that neither credit nor max_tokens leave room for are worth nothing."""
    if draft is None or live.attachment is None:
        return _NO_DRAFT
    session = live.session
    room = min(live.credit - session.committed_len, session.stopping.max_tokens - session.completion_len)
    return Prospect(draft.parents, live.attachment.calibrator.probabilities(draft.log_probs), room - 1)
