"""One request's travel: placed on a verifier, given a drafter, read until its text ends, moved when a part dies."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import structlog
from google.protobuf.duration_pb2 import Duration

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.completion import Completion
from specla.client.coordinator.drafters import Attaching, DrafterMember, union_of_features
from specla.client.coordinator.request import CheckedRequest
from specla.client.coordinator.verifiers import VerifierMember, VerifierPool
from specla.rpc.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    NumericsMismatchError,
    ServiceUnavailableError,
    SpeclaError,
)
from specla.rpc.status import from_status
from specla.v1 import common_pb2, generation_pb2, verifier_pb2

log = structlog.get_logger(__name__)

_LONGEST_S = 1e9  # a deadline that the protocol's Duration still holds
_MAX_SETBACKS = 3  # losses in a row without a new token between them


class Generation:
    """Runs one checked request. `responses` is its only door; closing that iterator cancels everything.

    The tokens so far live here, so a verifier's death costs time, not text: the session is opened on
    another one, which replays them through decode arithmetic.
    """

    def __init__(
        self,
        request: CheckedRequest,
        pieces: Sequence[bytes],
        pool: VerifierPool,
        drafters: Sequence[DrafterMember],
        config: CoordinatorConfig,
        *,
        deadline: float | None,
    ) -> None:
        """`deadline`: on the event loop's clock, or None.

        Raises:
            InvalidRequestError: the resumed text had already ended.
        """
        self._request = request
        self._completion = Completion(len(request.prompt_ids), pieces, request.stopping.stop, request.resumed_ids)
        self._pool = pool
        self._drafters = drafters
        self._config = config
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._bell = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._numerics_id = request.numerics_id
        self._visit: _Visit | None = None
        self._failed_at: list[VerifierMember] = []
        self._setbacks = 0
        self._taken = self._completion.length  # prompt and output that the caller has

    async def responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Started, deltas, Finished.

        Raises:
            SpeclaError: whatever ended it before its text did.
        """
        started = False
        try:
            self._place(None)
            while True:
                await self._wait()
                visit = self._read()
                if visit.opened and not started:
                    started = True
                    yield generation_pb2.GenerateResponse(started=self._started(visit))
                delta = self._completion.take_delta()
                if delta is not None:
                    self._setbacks, self._failed_at = 0, []
                    yield generation_pb2.GenerateResponse(delta=delta)
                    self._taken = self._completion.length
                if self._completion.finished is not None:
                    self._leave()
                    yield generation_pb2.GenerateResponse(finished=self._completion.finished)
                    return
                if visit.failure is not None:
                    self._recover(visit.failure)
                else:
                    visit.attaching.step()
                    visit.grant(self._taken + self._config.credit)
        finally:
            self._disarm()
            self._leave()

    def _place(self, why: SpeclaError | None) -> None:
        """Open the session somewhere; `why` it is not where it was.

        Raises:
            NumericsMismatchError: only verifiers of another numerics_id are left.
            SpeclaError: `why`, if no verifier is left.
        """
        only = "" if self._request.allow_other_numerics else self._numerics_id
        member = self._pool.choose(numerics_id=only, avoid=self._failed_at)
        if member is None and not isinstance(why, CapacityError):
            member = self._pool.choose(numerics_id=only)  # a second chance where it failed
        if member is None:
            raise self._homeless(why, only)
        self._visit = _Visit(member, self._drafters, self._config, self._bell.set)
        self._visit.start(self._start(member), self._completion.length + self._config.credit)

    def _homeless(self, why: SpeclaError | None, only: str) -> SpeclaError:
        if only and not isinstance(why, CapacityError) and self._pool.choose() is not None:
            return NumericsMismatchError(
                "no verifier with the numerics_id of the text so far is available",
                hint="Wait for one, or set allow_other_numerics; the text may then differ from here on",
            )
        if isinstance(why, ServiceUnavailableError) and self._completion.length and self._pool.choose() is None:
            return ServiceUnavailableError(
                f"the verifier was lost ({why.message}), and no other is connected",
                hint="Try again, or go on from here with resumed_ids, the seed and the numerics_id",
            )
        return why or ServiceUnavailableError("no verifier is available", hint="Try again when one is connected")

    def _start(self, member: VerifierMember) -> verifier_pb2.Start:
        start = verifier_pb2.Start(
            prompt_ids=self._request.prompt_ids,
            resumed_ids=self._completion.tokens,
            sampling=self._request.sampling,
            stopping=self._request.stopping,
            keep=self._keep(member),
            numerics_id=self._numerics_id,
            allow_other_numerics=self._request.allow_other_numerics,
            may_stop=bool(self._request.stopping.stop),
        )
        del start.stopping.stop[:]  # stop strings are found here
        if self._deadline is not None:
            left = Duration()
            seconds = min(self._deadline - self._loop.time(), _LONGEST_S)
            left.FromMicroseconds(max(1, int(seconds * 1e6)))
            start.time_left.CopyFrom(left)
        return start

    def _keep(self, member: VerifierMember) -> common_pb2.FeatureSpec:
        """What drafters want kept, as far as this verifier would keep it for anyone."""
        keep, limits = union_of_features(self._drafters), member.target.limits
        keep.window = min(keep.window, limits.max_prompt_tokens + limits.max_new_tokens)
        return keep

    def _started(self, visit: "_Visit") -> generation_pb2.Started:
        target = visit.member.target
        self._numerics_id = target.numerics_id
        return generation_pb2.Started(
            model=target.model,
            seed=self._request.sampling.seed,
            prompt_tokens=len(self._request.prompt_ids),
            numerics_id=target.numerics_id,
            session_id=visit.session_id,
        )

    async def _wait(self) -> None:
        """Until the bell rings, which it also does at the next time that matters."""
        times = [self._deadline, self._visit.attaching.wait_until if self._visit else None]
        until = min((time for time in times if time is not None), default=None)
        if until != (None if self._alarm is None else self._alarm.when()):
            self._disarm()
            self._alarm = None if until is None else self._loop.call_at(until, self._on_alarm)
        await self._bell.wait()
        self._bell.clear()
        if self._deadline is not None and self._loop.time() >= self._deadline:
            raise DeadlineError(
                "the deadline passed before the text ended", hint="Allow more time, or ask for fewer tokens"
            )

    def _on_alarm(self) -> None:
        self._alarm = None  # it may ring a tick of the clock early: `_wait` then sets it again
        self._bell.set()

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _read(self) -> "_Visit":
        visit = self._visit
        assert visit is not None
        for event in visit.mailbox.take():
            kind = event.WhichOneof("event")
            if kind == "opened":
                visit.opened = True
            elif kind == "committed":
                self._completion.extend(event.committed)
            elif kind == "attach_issued":
                visit.attaching.on_issued(event.attach_issued)
            elif kind == "drafter_changed":
                visit.attaching.on_changed(event.drafter_changed)
            elif kind == "finished":
                self._completion.finish(event.finished)
                visit.over = True
            elif kind == "failed" and not visit.over:  # the first says why; later ones answer what was sent behind it
                visit.failure = from_status(event.failed)
                visit.over = True
        if visit.failure is None:
            visit.failure = visit.mailbox.lost
        return visit

    def _recover(self, why: SpeclaError) -> None:
        visit = self._visit
        assert visit is not None
        full = isinstance(why, CapacityError) and not visit.opened
        if not full:
            if not isinstance(why, InternalError | ServiceUnavailableError) and visit.mailbox.lost is None:
                raise why
            self._setbacks += 1
            if self._setbacks > _MAX_SETBACKS:
                raise why
            tokens = len(self._completion.tokens)
            address = visit.member.port.address
            log.warning("verifier lost", address=address, why=why.message, reason=why.reason, tokens=tokens)
        self._failed_at = [*self._failed_at, visit.member]
        self._leave()
        self._place(why)

    def _leave(self) -> None:
        if self._visit is not None:
            self._visit.end(self._completion.length if self._completion.finished is not None else None)
            self._visit = None


class _Visit:
    """One session on one verifier."""

    def __init__(
        self,
        member: VerifierMember,
        drafters: Sequence[DrafterMember],
        config: CoordinatorConfig,
        ring: Callable[[], None],
    ) -> None:
        self.member = member
        self.session_id = secrets.token_bytes(16)
        self.mailbox = member.open(self.session_id, ring)
        self.attaching = Attaching(
            drafters,
            self.session_id,
            lambda command: member.send([command]),
            partial(member.waker.call, ring),
            timeout=config.attach_timeout_s,
        )
        self.opened = False
        self.over = False  # the verifier has ended it
        self.failure: SpeclaError | None = None
        self._credit = config.credit
        self._granted = 0

    def start(self, start: verifier_pb2.Start, up_to_len: int) -> None:
        self.member.send([verifier_pb2.SessionCommand(session_id=self.session_id, start=start)])
        self.grant(up_to_len)
        self.attaching.begin()

    def grant(self, up_to_len: int) -> None:
        """Half a credit at a time: a message for every token would cost more than it saves."""
        if up_to_len - self._granted >= self._credit // 2:
            self._granted = up_to_len
            credit = verifier_pb2.Credit(up_to_len=up_to_len)
            self.member.send([verifier_pb2.SessionCommand(session_id=self.session_id, credit=credit)])

    def end(self, at_len: int | None) -> None:
        """Leave: the text ended at `at_len`, or the caller has gone (None)."""
        self.attaching.end()
        self.member.leave(self.session_id)
        if self.over or self.mailbox.lost is not None:
            return
        command = verifier_pb2.SessionCommand(session_id=self.session_id)
        if at_len is None:
            command.cancel.SetInParent()
        else:
            command.stop.at_len = at_len
        self.member.send([command])
