"""A verifier whose text is a formula, for faults that a real one cannot be made to have at a given token.

It speaks the coordinator's half of the protocol at once, in the caller's thread, and dies, refuses or
stalls on command. Its drafts are pretended: every second pass "accepts" one candidate.
"""

from collections.abc import Sequence

from specla.rpc.errors import ServiceUnavailableError, SpeclaError
from specla.rpc.links import Wake
from specla.rpc.status import to_status
from specla.v1 import common_pb2, drafter_pb2, verifier_pb2


def token_at(position: int, seed: int, vocab: int = 320) -> int:
    """The text: any id but 0, which ends one."""
    return 1 + (position * 7919 + seed * 104729) % (vocab - 1)


class ScriptedVerifier:
    """A VerifierPort.

    Attributes:
        stall_at: sessions commit no more than so many output tokens until `go_on`.
        refuse: errors that the next Starts are answered with, first to last.
        commands: everything that came, in order.
    """

    def __init__(
        self,
        *,
        numerics_id: str = "scripted",
        tokenizer_hash: str = "",
        eos_at: int | None = None,
        address: str = "verifier.test:1",
    ) -> None:
        self.address = address
        self.stall_at: int | None = None
        self.refuse: list[SpeclaError] = []
        self.commands: list[verifier_pb2.SessionCommand] = []
        self.sessions: dict[bytes, _Session] = {}
        self.link: _Link | None = None
        self._eos_at = eos_at
        self._target = verifier_pb2.GetTargetResponse(
            verifier_id="scripted",
            model="scripted",
            numerics_id=numerics_id,
            tokenizer_hash=tokenizer_hash,
            dims=verifier_pb2.TargetDims(vocab_size=320, hidden_size=8, num_layers=1),
            limits=verifier_pb2.Limits(max_rows=9, max_prompt_tokens=512, max_new_tokens=2048, max_sessions=8),
        )

    def target(self) -> verifier_pb2.GetTargetResponse:
        return self._target

    def connect_coordinator(self, wake: Wake) -> "_Link":
        self.link = _Link(self, wake)
        return self.link

    def connect_drafter(self, wake: Wake) -> "_Link":
        raise NotImplementedError("the scripted verifier takes no drafts")

    def die(self) -> None:
        """Lose the link, and every session with it."""
        assert self.link is not None
        self.sessions.clear()
        self.link.lost = ServiceUnavailableError("the verifier died")
        self.link.wake()

    def fail(self, error: SpeclaError) -> None:
        """Fail all sessions, and live on."""
        for session_id in list(self.sessions):
            self.emit(session_id, failed=to_status(error))
            del self.sessions[session_id]

    def go_on(self) -> None:
        """End the stall."""
        self.stall_at = None
        for session_id in list(self.sessions):
            self._advance(session_id)

    def emit(self, session_id: bytes, **event: object) -> None:
        assert self.link is not None
        self.link.events.append(verifier_pb2.SessionEvent(session_id=session_id, **event))  # type: ignore[arg-type]
        self.link.wake()

    def on_command(self, command: verifier_pb2.SessionCommand) -> None:
        self.commands.append(command)
        session_id, kind = command.session_id, command.WhichOneof("command")
        if kind == "start":
            if self.refuse:
                self.emit(session_id, failed=to_status(self.refuse.pop(0)))
                return
            self.sessions[session_id] = _Session(command.start)
            self.emit(session_id, opened=verifier_pb2.Opened())
        elif session_id in self.sessions and kind == "credit":
            self.sessions[session_id].credit = command.credit.up_to_len
            self._advance(session_id)
        elif session_id in self.sessions and kind == "issue_attach":
            session = self.sessions[session_id]
            session.epoch += 1
            issued = verifier_pb2.AttachIssued(
                attach_token=bytes([session.epoch]) * 16, epoch=session.epoch, verifier_id="scripted"
            )
            self.emit(session_id, attach_issued=issued)
        elif kind in ("cancel", "stop"):
            self.sessions.pop(session_id, None)

    def _advance(self, session_id: bytes) -> None:
        session = self.sessions[session_id]
        while session_id in self.sessions:
            done = session.length - session.prompt_len
            if session.length >= session.credit or (self.stall_at is not None and done >= self.stall_at):
                return
            wanted = 2 if session.passes % 2 else 1
            session.passes += 1
            count = min(wanted, session.max_tokens - done)
            tokens = [token_at(session.length + i, session.seed) for i in range(count)]
            if self._eos_at is not None and done + count > self._eos_at:
                tokens = [*tokens[: self._eos_at - done], 0]
            committed = verifier_pb2.Committed(
                offset=session.length,
                tokens=tokens,
                drafted=[True] * (len(tokens) - 1) + [False],
                passes=[verifier_pb2.PassCount(tokens=len(tokens), drafted=3 * (wanted - 1))],
            )
            session.length += len(tokens)
            self.emit(session_id, committed=committed)
            if tokens[-1] == 0 or session.length - session.prompt_len >= session.max_tokens:
                reason = common_pb2.FINISH_REASON_EOS if tokens[-1] == 0 else common_pb2.FINISH_REASON_LENGTH
                finished = verifier_pb2.SessionFinished(reason=reason, committed_len=session.length)
                self.emit(session_id, finished=finished)
                del self.sessions[session_id]


class _Session:
    def __init__(self, start: verifier_pb2.Start) -> None:
        self.prompt_len = len(start.prompt_ids)
        self.length = self.prompt_len + len(start.resumed_ids)
        self.seed = start.sampling.seed
        self.max_tokens = start.stopping.max_tokens
        self.credit = 0
        self.passes = 0
        self.epoch = 0


class _Link:
    def __init__(self, verifier: ScriptedVerifier, wake: Wake) -> None:
        self.events: list[verifier_pb2.SessionEvent] = []
        self.lost: SpeclaError | None = None
        self.closed = False
        self.wake = wake
        self._verifier = verifier

    def send(self, items: Sequence[verifier_pb2.SessionCommand]) -> None:
        for item in items:
            if self.lost is None:
                self._verifier.on_command(item)

    def take(self) -> list[verifier_pb2.SessionEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.closed = True
        self._verifier.sessions.clear()


class ScriptedDrafter:
    """A DrafterPort that attaches, refuses or stays silent."""

    def __init__(self, name: str, *, answers: bool = True, tokenizer_hash: str = "", address: str = "") -> None:
        self.address = address or f"{name}.test:1"
        self.answers = answers
        self.attachments: list[_Attachment] = []
        self._info = drafter_pb2.GetDrafterResponse(
            drafter_id=name,
            name=name,
            tokenizer_hash=tokenizer_hash,
            want=common_pb2.FeatureSpec(layers=[len(name)], window=len(name)),
        )

    def info(self) -> drafter_pb2.GetDrafterResponse:
        return self._info

    def draft_session(self, request: drafter_pb2.DraftSessionRequest, wake: Wake) -> "_Attachment":
        attachment = _Attachment(request, wake)
        self.attachments.append(attachment)
        if self.answers:
            attachment.say(attached={})
        return attachment


class _Attachment:
    def __init__(self, request: drafter_pb2.DraftSessionRequest, wake: Wake) -> None:
        self.request = request
        self.cancelled = False
        self.lost: SpeclaError | None = None
        self._wake = wake
        self._events: list[drafter_pb2.DraftSessionResponse] = []

    def say(self, **event: object) -> None:
        self._events.append(drafter_pb2.DraftSessionResponse(**event))  # type: ignore[arg-type]
        self._wake()

    def lose(self) -> None:
        self.lost = ServiceUnavailableError("the drafter died")
        self._wake()

    def take(self) -> list[drafter_pb2.DraftSessionResponse]:
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        self.cancelled = True
