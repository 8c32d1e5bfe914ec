"""What leaves the scheduler: link ends with one growing item a session, and the messages they carry.

The scheduler's thread appends to the newest unread item of a session, and wakes each touched link once a turn. So a
reader that lags finds one long `Committed` or one long `Verdict` a session, never a queue that grows.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from specla.kernels.sampling import RowLogprobs
from specla.rpc.errors import CapacityError, InvalidRequestError, ServiceUnavailableError, SpeclaError
from specla.rpc.faults import internal_error
from specla.rpc.links import Wake
from specla.v1 import common_pb2, verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, SessionCommand, SessionEvent, VerdictItem
from specla.verifier_service.passes import PassResult

MAX_FEATURE_BYTES = 64 << 10  # of one verdict; ReadFeatures has the rest
MAX_UNREAD = 4096  # items beyond it end the link: they answer what the other side sends without reading
MAX_ITEMS = 4096  # of one message; all of it is done in one turn, while every session waits

In = TypeVar("In", SessionCommand, DraftItem)
Out = TypeVar("Out", SessionEvent, VerdictItem)


class LinkEnd(Generic[In, Out]):
    """The verifier's end of a link (see `specla.rpc.links.Link`), and the scheduler's way to its reader.

    Args:
        deliver: takes what was sent to the scheduler's thread.
        hang_up: tells the scheduler that the other side is gone.
        wake: announces items to the other side.
        merge: adds an item to an earlier unread one of its session; False where it must stand apart.

    Attributes:
        session_ids: sessions that hang on the link; the scheduler's thread alone touches them.
        finishing: the other side will send no more, but still reads.
    """

    def __init__(
        self,
        deliver: Callable[["LinkEnd[In, Out]", Sequence[In]], None],
        hang_up: Callable[["LinkEnd[In, Out]"], None],
        wake: Wake,
        merge: Callable[[Out, Out], bool],
    ):
        self.session_ids: set[bytes] = set()
        self.finishing = False
        self._deliver: Callable[[LinkEnd[In, Out], Sequence[In]], None] = deliver
        self._hang_up: Callable[[LinkEnd[In, Out]], None] = hang_up
        self._wake = wake
        self._merge: Callable[[Out, Out], bool] = merge
        self._lock = threading.Lock()
        self._unread: list[Out] = []
        self._newest: dict[bytes, Out] = {}
        self._is_new = False
        self._ended = False
        self._lost: SpeclaError | None = None

    def send(self, items: Sequence[In]) -> None:
        """Hand over items; dropped once the link has ended."""
        if not self._ended:
            self._deliver(self, items)

    def take(self) -> list[Out]:
        """What there is to read, oldest first."""
        with self._lock:
            unread, self._unread = self._unread, []
            self._newest.clear()
        return unread

    def close(self) -> None:
        """Leave: sessions are cancelled, drafters detached."""
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._hang_up(self)

    @property
    def lost(self) -> SpeclaError | None:
        """Why the verifier ended the link, or None."""
        return self._lost

    @property
    def ended(self) -> bool:
        """Whether nothing will come beyond what `take` returns now."""
        return self._ended

    def put(self, item: Out) -> None:
        """Scheduler: let an item be read, on its own or as part of the unread one before it."""
        with self._lock:
            if self._ended:
                return
            self._is_new = True
            newest = self._newest.get(item.session_id)
            if newest is not None and self._merge(newest, item):
                return
            self._newest[item.session_id] = item
            self._unread.append(item)
            overfull = len(self._unread) > MAX_UNREAD
        if overfull:
            self.end(CapacityError("too many unread items on this link", retry_after_s=1.0, hint="Read what arrives"))

    def end(self, error: SpeclaError | None) -> None:
        """Scheduler: nothing more will come; what is unread stays readable."""
        with self._lock:
            if self._ended:
                return
            self._lost, self._is_new, self._ended = error, True, True  # in this order: others look without the lock
        if error is not None:
            self._hang_up(self)

    def flush(self) -> bool:
        """Scheduler: wake the reader if there is something new; whether there was. No lock is held meanwhile."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
        if not is_new:
            return False
        try:
            self._wake()
        except Exception as error:  # the reader's fault must not end the scheduler
            with self._lock:
                self._ended, self._lost = True, internal_error("wake of a link", error)
            self._hang_up(self)
        return True


CoordinatorEnd = LinkEnd[SessionCommand, SessionEvent]
DrafterEnd = LinkEnd[DraftItem, VerdictItem]


def too_many_items(items: Sequence[object]) -> InvalidRequestError | None:
    """What a link ends with that sent a message of more than MAX_ITEMS."""
    if len(items) <= MAX_ITEMS:
        return None
    return InvalidRequestError("items", f"a message of {len(items)} items", hint=f"Send at most {MAX_ITEMS} at a time")


def committed_event(session_id: bytes, passes: Sequence[tuple[PassResult, int]]) -> SessionEvent:
    """What a coordinator is told of some passes of its session, and how many candidates each of them verified."""
    results = [result for result, _ in passes]
    committed = verifier_pb2.Committed(
        offset=results[0].base_len,
        tokens=[token for result in results for token in result.tokens],
        drafted=[drafted for result in results for drafted in result.drafted],
        passes=[verifier_pb2.PassCount(tokens=len(result.tokens), drafted=verified) for result, verified in passes],
        logprobs=[_logprobs_message(entry) for result in results for entry in result.logprobs or ()],
    )
    return SessionEvent(session_id=session_id, committed=committed)


def _logprobs_message(entry: RowLogprobs) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TokenLogprob(id=token, logprob=logprob) for token, logprob in entry.top]
    return common_pb2.TokenLogprobs(chosen=entry.chosen, top=top)


def merge_committed(unread: SessionEvent, fresh: SessionEvent) -> bool:
    """Tokens go behind unread tokens of the same session; any other event stands apart."""
    if unread.WhichOneof("event") != "committed" or fresh.WhichOneof("event") != "committed":
        return False
    unread.committed.tokens.extend(fresh.committed.tokens)
    unread.committed.drafted.extend(fresh.committed.drafted)
    unread.committed.passes.extend(fresh.committed.passes)
    unread.committed.logprobs.extend(fresh.committed.logprobs)
    return True


def merge_verdict(unread: VerdictItem, fresh: VerdictItem) -> bool:
    """A session's own pass goes into an unread verdict; a verified draft takes the outcome over."""
    if unread.WhichOneof("item") != "verdict" or fresh.WhichOneof("item") != "verdict":
        return False
    old, new = unread.verdict, fresh.verdict
    passes = (verifier_pb2.OUTCOME_VERIFIED, verifier_pb2.OUTCOME_OWN_PASS)
    if old.outcome not in passes or new.outcome not in passes:
        return False
    if new.outcome == verifier_pb2.OUTCOME_VERIFIED:
        if old.outcome == verifier_pb2.OUTCOME_VERIFIED:
            return False  # each draft gets its answer
        unread.seq, old.outcome, old.base_len = fresh.seq, new.outcome, new.base_len
        old.accepted_nodes.extend(new.accepted_nodes)
    old.tokens.extend(new.tokens)
    old.top.extend(new.top)
    old.committed_len, old.node_budget, old.pass_us = new.committed_len, new.node_budget, new.pass_us
    _merge_features(old.features, new.features)
    return True


def _merge_features(old: verifier_pb2.Features, new: verifier_pb2.Features) -> None:
    """Append new positions, or keep the new ones alone where both do not fit or do not meet."""
    if not new.values.data:
        return
    positions = old.values.shape[0] if old.values.data else 0
    meets = positions and old.from_position + positions == new.from_position
    if not meets or len(old.values.data) + len(new.values.data) > MAX_FEATURE_BYTES:
        old.CopyFrom(new)
        return
    old.values.data += new.values.data
    old.values.shape[0] = positions + new.values.shape[0]


def unavailable(why: str) -> ServiceUnavailableError:
    """What sessions and links are told when this verifier goes away."""
    return ServiceUnavailableError(why, hint="Another verifier can go on with the tokens so far")
