"""A coordinator that does nothing but what the protocol needs, for tests of what stands behind it."""

import asyncio
import os
from collections.abc import Callable, Sequence

from specla.rpc.links import VerifierPort
from specla.rpc.waker import LoopWaker
from specla.v1 import common_pb2, drafter_pb2, verifier_pb2


class BareText:
    """One greedy or seeded text of `tokens` tokens behind `prompt`, end of text ignored."""

    def __init__(self, verifier: VerifierPort, prompt: Sequence[int], tokens: int) -> None:
        self.session_id = os.urandom(16)
        self._prompt = prompt
        self._max_tokens = tokens
        self.tokens: list[int] = []
        self.drafted = 0
        self.verified = 0
        self.issued: verifier_pb2.AttachIssued | None = None
        self.changes: list[verifier_pb2.DrafterChanged] = []
        self.finished = False
        self._waker = LoopWaker(asyncio.get_running_loop())
        self._bell = asyncio.Event()
        self._link = verifier.connect_coordinator(self.ring)

    def ring(self) -> None:
        self._waker.call(self._bell.set)

    def start(self, *, credit: int = 10_000, temperature: float = 0.0) -> None:
        start = verifier_pb2.Start(
            prompt_ids=self._prompt,
            sampling=common_pb2.Sampling(temperature=temperature, seed=11),
            stopping=common_pb2.Stopping(max_tokens=self._max_tokens, ignore_eos=True),
        )
        self.command(start=start)
        self.command(issue_attach=verifier_pb2.IssueAttach())
        self.allow(credit)

    def allow(self, credit: int) -> None:
        self.command(credit=verifier_pb2.Credit(up_to_len=len(self._prompt) + credit))

    def command(self, **command: object) -> None:
        self._link.send([verifier_pb2.SessionCommand(session_id=self.session_id, **command)])  # type: ignore[arg-type]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await self._bell.wait()
                self._bell.clear()
                for event in self._link.take():
                    self._read(event)
                assert self._link.lost is None

    def request(self) -> drafter_pb2.DraftSessionRequest:
        assert self.issued is not None
        return drafter_pb2.DraftSessionRequest(
            session_id=self.session_id,
            verifier_id=self.issued.verifier_id,
            verifier_address=self.issued.verifier_address,
            attach_token=self.issued.attach_token,
        )

    def close(self) -> None:
        self._link.close()

    def _read(self, event: verifier_pb2.SessionEvent) -> None:
        match event.WhichOneof("event"):
            case "committed":
                self.tokens += event.committed.tokens
                self.drafted += sum(event.committed.drafted)
                self.verified += sum(count.drafted for count in event.committed.passes)
            case "attach_issued":
                self.issued = event.attach_issued
            case "drafter_changed":
                self.changes.append(event.drafter_changed)
            case "finished":
                self.finished = True
            case "failed":
                raise AssertionError(event.failed.message)
