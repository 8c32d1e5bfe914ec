"""A coordinator and a drafter reduced to what tests need: links that remember, and ways to wait for what they want."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specla.rpc.errors import SpeclaError
from specla.rpc.links import VerifierPort
from specla.rpc.status import from_status
from specla.v1 import common_pb2, verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, SessionCommand, SessionEvent, VerdictItem
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import PassTimes
from specla.verifier_service.engine import Engine
from specla.verifier_service.passes import PassResult, RunningPass
from specla.verifier_service.scheduler import Scheduler

PATIENCE_S = 20.0

_ids = itertools.count(1)


def new_session_id() -> bytes:
    """16 bytes that no other session of this process has."""
    return next(_ids).to_bytes(16, "big")


class Reader:
    """Takes what a link says, whichever thread wakes it, and lets a test wait for what it wants."""

    def __init__(self, connect: Callable[[Callable[[], None]], Any]):
        self.items: list[Any] = []
        self._news = threading.Condition()
        self.link = connect(self._wake)

    def _wake(self) -> None:
        with self._news:
            if hasattr(self, "link"):
                self.items += self.link.take()
            self._news.notify_all()

    def wait(self, wanted: Callable[[], Any]) -> Any:
        """The first true value of `wanted()`, asked at each wake."""
        until = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                self.items += self.link.take()
                found = wanted()
                if found:
                    return found
                left = until - time.monotonic()
                assert left > 0, f"waited in vain; there was {self.items[-5:]}, lost {self.link.lost}"
                self._news.wait(min(left, 0.5))


class Coordinator(Reader):
    """One Sessions stream."""

    def __init__(self, port: VerifierPort):
        self._sorted: dict[tuple[bytes, str | None], list[SessionEvent]] = {}
        self._sorted_len = 0
        super().__init__(port.connect_coordinator)

    def command(self, session_id: bytes, **command: Any) -> None:
        self.link.send([SessionCommand(session_id=session_id, **command)])

    def start(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        session_id: bytes | None = None,
        credit: int | None = None,
        sampling: common_pb2.Sampling | None = None,
        stopping: dict[str, Any] | None = None,
        **start: Any,
    ) -> bytes:
        """Open a session and grant it credit for its whole text (or what `credit` says)."""
        session_id = session_id or new_session_id()
        message = verifier_pb2.Start(
            prompt_ids=prompt,
            sampling=sampling or common_pb2.Sampling(temperature=0),
            stopping=common_pb2.Stopping(**{"max_tokens": max_tokens, "ignore_eos": True, **(stopping or {})}),
            **start,
        )
        up_to = len(prompt) + max_tokens if credit is None else credit
        self.link.send(
            [
                SessionCommand(session_id=session_id, start=message),
                SessionCommand(session_id=session_id, credit=verifier_pb2.Credit(up_to_len=up_to)),
            ]
        )
        return session_id

    def events(self, session_id: bytes, kind: str | None = None) -> list[SessionEvent]:
        for event in self.items[self._sorted_len :]:
            for key in (event.WhichOneof("event"), None):
                self._sorted.setdefault((event.session_id, key), []).append(event)
            self._sorted_len += 1
        return list(self._sorted.get((session_id, kind), []))

    def tokens(self, session_id: bytes) -> list[int]:
        return [token for event in self.events(session_id, "committed") for token in event.committed.tokens]

    def wait_for(self, session_id: bytes, kind: str) -> SessionEvent:
        return self.wait(lambda: self.events(session_id, kind))[0]

    def finish(self, session_id: bytes) -> list[int]:
        """Wait for the end of a text; returns its tokens."""
        self.wait_for(session_id, "finished")
        return self.tokens(session_id)

    def failure(self, session_id: bytes) -> SpeclaError:
        return from_status(self.wait_for(session_id, "failed").failed)

    def attach_token(self, session_id: bytes) -> bytes:
        """A fresh attach token."""
        before = len(self.events(session_id, "attach_issued"))
        self.command(session_id, issue_attach=verifier_pb2.IssueAttach())
        events = self.wait(lambda: self.events(session_id, "attach_issued")[before:])
        return bytes(events[0].attach_issued.attach_token)


class Drafter(Reader):
    """One Verify stream."""

    def __init__(self, port: VerifierPort):
        self._seq = itertools.count(1)
        super().__init__(port.connect_drafter)

    def item(self, session_id: bytes, **item: Any) -> int:
        """Send one item; returns its number."""
        seq = item.pop("seq", None) or next(self._seq)
        self.link.send([DraftItem(session_id=session_id, seq=seq, **item)])
        return seq

    def attach(self, session_id: bytes, token: bytes, **attach: Any) -> verifier_pb2.Attached:
        seq = self.item(session_id, attach=verifier_pb2.Attach(attach_token=token, **attach))
        return self.answer(seq).attached

    def chain(self, session_id: bytes, committed: Sequence[int], tokens: Sequence[int], log_prob: float = -0.01) -> int:
        """Draft a chain behind the committed tokens."""
        topology = verifier_pb2.Topology(
            base_len=len(committed),
            root_token=committed[-1],
            tokens=tokens,
            parents=range(-1, len(tokens) - 1),
            log_probs=[log_prob] * len(tokens),
        )
        return self.item(session_id, topology=topology)

    def answer(self, seq: int) -> VerdictItem:
        return self.wait(lambda: [item for item in list(self.items) if item.seq == seq])[0]

    def closed(self, session_id: bytes) -> verifier_pb2.ClosedReason:
        def found() -> list[VerdictItem]:
            return [i for i in list(self.items) if i.session_id == session_id and i.WhichOneof("item") == "closed"]

        return self.wait(found)[0].closed.reason


class HandClock:
    """A clock that a test turns by hand; post something after turning it, so that the scheduler looks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class CountedEngine(Engine):
    """An engine whose passes take what a table of rows to seconds says, by a clock turned by hand."""

    def __init__(self, config: VerifierConfig, clock: HandClock, table: Mapping[int, float]):
        super().__init__(config)
        self.clock = clock
        self.times = PassTimes(table)

    def end_pass(self, running: RunningPass) -> list[PassResult]:
        results = super().end_pass(running)
        self.clock.now += self.times.predict(sum(len(item.topology) for item in running.items))
        return results


def plain_text(target: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """What plain decoding makes of a prompt."""
    config = VerifierConfig(target=target, threads=1, max_sessions=1)
    with Scheduler(Engine(config), config).start(PassTimes({1: 0.01})) as verifier:
        coordinator = Coordinator(verifier)
        return coordinator.finish(coordinator.start(prompt, max_tokens=tokens))
