"""The verifier's one thread: mail in, a piece of prefill, a pass, news out, and again.

It owns the engine. Everything that arrives is posted to its mailbox and done between passes, commands also while a
pass runs by itself; everything that leaves is put into link ends, whose readers are woken once a turn. So no socket is
ever waited for, and only here slots are freed. As a `VerifierPort` it is joined directly in one process; server.py puts
it behind gRPC.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TypeVar

import structlog
import torch

from specla.rpc.errors import SpeclaError
from specla.rpc.faults import fault_of, internal_error
from specla.rpc.links import IN_PROCESS, Wake
from specla.rpc.waker import let_others_run, speed_up_hops
from specla.v1 import verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, SessionCommand, SessionEvent
from specla.verifier_service.commands import CommandDesk
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.drafting import DraftDesk
from specla.verifier_service.ends import LinkEnds
from specla.verifier_service.engine import Engine
from specla.verifier_service.identity import describe, limits_of
from specla.verifier_service.issuer import Issuer
from specla.verifier_service.mailbox import Mailbox
from specla.verifier_service.pass_runner import PassRunner
from specla.verifier_service.preparing import pass_times_of
from specla.verifier_service.publish import (
    CoordinatorEnd,
    DrafterEnd,
    In,
    LinkEnd,
    Out,
    merge_committed,
    merge_verdict,
    unavailable,
)
from specla.verifier_service.roster import LiveSession, Roster

log = structlog.get_logger("specla.verifier")

_THREAD_NAME = "specla-scheduler"
_BEAT_S = 1.0  # an idle thread shows its life so often
_STALLED_S = 60.0  # no turn takes so long: prefill goes in pieces

Result = TypeVar("Result")


class Scheduler:
    """Runs an engine for any number of coordinators and drafters. Made by `load`, or around an engine of the caller's.

    Args:
        engine: owned from now on by the scheduler's thread.
        config: the verifier's settings.
        clock: seconds; the same for deadlines, waits and pass times.
    """

    def __init__(self, engine: Engine, config: VerifierConfig, clock: Callable[[], float] = time.monotonic):
        self.config = config
        self.verifier_id = secrets.token_hex(8)
        self.advertised_address = config.advertised_address
        self.address = IN_PROCESS
        self._engine = engine
        self._clock = clock
        self._mailbox = Mailbox(clock)
        limits = limits_of(engine)
        self._target = describe(engine, limits, self.verifier_id)
        self._roster = Roster(engine, clock, config.idle_timeout_s)
        always = config.drafting == "unconditional"
        self._drafts = DraftDesk(engine, self._roster, limits, config.max_draft_wait_s, unconditional=always)
        issuer = Issuer(self._drafts, self.verifier_id, lambda: self.advertised_address)
        self._commands = CommandDesk(engine, self._roster, self._drafts, issuer, limits, clock)
        self._passes = PassRunner(engine, self._roster, self._drafts, issuer, config, clock)
        self._ends = LinkEnds(self._roster, self._drafts, clock)
        self._unready: list[LiveSession] = []
        self._beat = clock()
        self._stop_by: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)

    @classmethod
    def load(cls, config: VerifierConfig) -> "Scheduler":
        """Load the target, measure its passes and serve, all on one new thread. Blocks until it serves.

        OpenMP counts all threads' teams: were the engine made on another thread, a token took 1.4 times as long.

        Raises:
            UnsupportedModelError, InvalidRequestError, InternalError: from the engine.
        """
        made: Future[Scheduler] = Future()
        unwanted = threading.Event()

        def work() -> None:
            try:
                scheduler = cls(Engine(config), config)
                scheduler._prepare(None)
            except BaseException as error:
                made.set_exception(error)
                return
            scheduler._thread = threading.current_thread()
            made.set_result(scheduler)
            if unwanted.is_set():
                scheduler.stop()
            scheduler._run()

        threading.Thread(target=work, name=_THREAD_NAME, daemon=True).start()
        try:
            return made.result()
        except BaseException:  # an interrupt, perhaps: nobody will know the scheduler, so it ends once it is loaded
            unwanted.set()
            if made.done() and not made.exception():
                made.result().stop()
            raise

    def start(self, pass_times: PassTimes | None = None) -> "Scheduler":
        """Measure passes (or take the given forecasts) and begin to serve, where the engine was made by the caller."""
        self._prepare(pass_times)
        self._thread.start()
        return self

    def _prepare(self, pass_times: PassTimes | None) -> None:
        """Make passes ready and measure them, if no forecasts are given; let threads hand over sooner."""
        speed_up_hops()
        self._passes.times = pass_times or pass_times_of(self._engine, self._clock)
        self._beat = self._clock()

    def stop(self, drain_s: float = 0.0) -> None:
        """Take no new sessions, let the living ones end for `drain_s`, fail the rest, release the engine. Blocks."""
        if self._thread.ident is None:
            self._over.set()
            self._engine.close()
            return
        self._mailbox.post(partial(self._begin_drain, self._clock() + drain_s))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def target(self) -> verifier_pb2.GetTargetResponse:
        """Who it is and what it runs."""
        target = verifier_pb2.GetTargetResponse()
        target.CopyFrom(self._target)
        target.advertised_address = self.advertised_address
        return target

    def connect_coordinator(self, wake: Wake) -> CoordinatorEnd:
        """Open a link for sessions; `wake` is called on the scheduler's thread and must return at once."""
        end = CoordinatorEnd(self._deliver_commands, self._hang_up_coordinator, wake, merge_committed)
        self._mailbox.post(lambda: self._ends.coordinators.append(end))
        self._refuse_if_over(end)
        return end

    def connect_drafter(self, wake: Wake) -> DrafterEnd:
        """Open a link for drafts; `wake` may take, draft and send there and then (in one process)."""
        end = DrafterEnd(self._deliver_drafts, self._hang_up_drafter, wake, merge_verdict)
        self._mailbox.post(lambda: self._ends.drafters.append(end))
        self._refuse_if_over(end)
        return end

    def finish_link(self, end: LinkEnd[In, Out]) -> None:
        """The other side will send no more: end the link once its last session has ended."""
        self._mailbox.post(partial(setattr, end, "finishing", True))

    def _refuse_if_over(self, end: LinkEnd[In, Out]) -> None:
        if self._over.is_set():
            end.end(unavailable("the verifier has stopped"))
            end.flush()

    def health(self) -> bool:
        """Whether the thread lives and turns."""
        return self._thread.is_alive() and self._clock() - self._beat < _STALLED_S

    def list_sessions(self) -> list[verifier_pb2.SessionInfo]:
        """The sessions that live now, as of the present pass's end. Blocks until then."""
        return self.ask_sessions().result()

    def ask_sessions(self) -> "Future[list[verifier_pb2.SessionInfo]]":
        """`list_sessions` for those who may not block."""
        return self.ask(self._roster.infos)

    def read_features(self, request: verifier_pb2.ReadFeaturesRequest) -> Iterator[verifier_pb2.Features]:
        """Features that a verdict had no room for, in slabs; positions no longer kept are left out. Blocks.

        Raises:
            UnknownSessionError, AttachRefusedError, InvalidRequestError: as they say.
        """
        return iter(self.ask_features(request).result())

    def ask_features(self, request: verifier_pb2.ReadFeaturesRequest) -> "Future[list[verifier_pb2.Features]]":
        """`read_features` for those who may not block."""
        return self.ask(partial(self._drafts.feature_slabs, request))

    @property
    def backlog(self) -> int:
        """Messages that wait for the thread."""
        return len(self._mailbox)

    def ask(self, question: Callable[[], Result]) -> "Future[Result]":
        """Have something answered on the scheduler's thread, between passes."""
        answer: Future[Result] = Future()
        if self._over.is_set():
            answer.set_exception(unavailable("the verifier has stopped"))
            return answer

        def work() -> None:
            with contextlib.suppress(InvalidStateError):  # answered already, or given up
                try:
                    answer.set_result(question())
                except SpeclaError as error:
                    answer.set_exception(error)
                except Exception as error:
                    answer.set_exception(internal_error("question", error))

        self._mailbox.post(work)
        if self._over.is_set():  # it ended meanwhile, and may have missed the question
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(unavailable("the verifier has stopped"))
        return answer

    # The rest runs on the scheduler's thread.

    def _run(self) -> None:
        why = unavailable("the verifier is shutting down")
        try:
            with torch.inference_mode():
                while not self._is_done():
                    self._turn()
        except BaseException as error:
            why = unavailable("the verifier has failed")
            internal_error("scheduler", error)
        finally:
            self._close(why)

    def _turn(self) -> None:
        self._beat = self._clock()
        for work in self._mailbox.take():
            work()
        self._ends.flush_drafters()
        wake_at = self._passes.run(self._meanwhile, follows=not (worked := self._prefill()))
        self._ends.flush_drafters()
        if wake_at is None:
            return
        self._look_around()  # no pass has run
        if not worked and not self._roster.newcomers and not self._is_done():
            self._mailbox.wait(self._sleep_until(wake_at))

    def _meanwhile(self) -> None:
        """What need not wait for the pass that runs now, and what it need not wait for."""
        told = self._look_around(at_once=False)
        for work in (commands := self._mailbox.take_early()):
            work()
        if commands:
            told |= self._ends.flush_coordinators()
        if told and self._engine.overlaps:
            let_others_run()

    def _look_around(self, *, at_once: bool = True) -> bool:
        self._passes.tell_news(at_once=at_once)
        self._roster.expire(at_once=at_once)
        return self._ends.flush_coordinators()

    def _prefill(self) -> bool:
        """One bounded piece for whoever has waited longest for one, and who may go along; whether there was one."""
        overlaps = self._engine.overlaps
        waiting = self._not_ready()
        if waiting and not overlaps:
            self._look_around()  # a piece takes longer than a pass
            waiting = self._not_ready()
        if not waiting:
            return False
        begun, started, not_of_piece = waiting[:1], self._clock(), None
        try:
            running = self._engine.begin_prefill([live.session for live in waiting])
            begun = [live for live in waiting if live.session in running.sessions]
            if overlaps:
                not_of_piece = fault_of(self._look_around)
            self._engine.end_prefill(running)
            self._unready = [*(live for live in waiting if live not in begun), *begun]
            self._note_piece(begun, started)
        except Exception as error:
            for live in begun:
                if live.lives:
                    self._roster.fail(live, internal_error("prefill", error))
        if not_of_piece is not None:
            raise not_of_piece
        return True

    def _note_piece(self, begun: Sequence[LiveSession], started: float) -> None:
        now = self._clock()
        for live in begun:
            live.prefill_s += now - started
            if live.session.ready:
                live.moved_at, us = now, round(live.prefill_s * 1e6)
                prefilled = verifier_pb2.Prefilled(prompt_tokens=live.session.prompt_len, prefill_us=us)
                live.put(SessionEvent(session_id=live.session_id, prefilled=prefilled))

    def _not_ready(self) -> list[LiveSession]:
        """Sessions that are not ready: who had a piece last is last, but for those that have come since."""
        newcomers, self._roster.newcomers = self._roster.newcomers, []
        self._unready = [live for live in (*self._unready, *newcomers) if live.lives and not live.session.ready]
        return self._unready

    def _sleep_until(self, wake_at: float) -> float:
        others = (self._roster.next_expiry(), self._stop_by)
        return min(wake_at, self._clock() + _BEAT_S, *(time for time in others if time is not None))

    def _is_done(self) -> bool:
        return self._stop_by is not None and (len(self._roster) == 0 or self._clock() >= self._stop_by)

    def _begin_drain(self, until: float) -> None:
        self._commands.draining = True
        self._stop_by = until if self._stop_by is None else min(until, self._stop_by)

    def _close(self, why: SpeclaError) -> None:
        """Fail what lives, end all links, answer what still waits for an answer."""
        for live in self._roster:
            self._roster.fail(live, why)
        self._over.set()
        for work in self._mailbox.take():
            work()
        self._ends.end_all(why)
        self._engine.close()

    # Called from any thread.

    def _deliver_commands(self, end: CoordinatorEnd, commands: Sequence[SessionCommand]) -> None:
        self._mailbox.post(partial(self._commands.handle_all, end, commands), early=True)

    def _deliver_drafts(self, end: DrafterEnd, items: Sequence[DraftItem]) -> None:
        self._mailbox.post(partial(self._ends.take_drafts, end, items))

    def _hang_up_coordinator(self, end: CoordinatorEnd) -> None:
        self._mailbox.post(partial(self._ends.lose_coordinator, end))

    def _hang_up_drafter(self, end: DrafterEnd) -> None:
        self._mailbox.post(partial(self._ends.lose_drafter, end))
