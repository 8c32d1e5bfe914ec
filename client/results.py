"""What the SDK gives back: plain frozen records, the same from a server as from this process."""

from dataclasses import dataclass
from typing import Literal

from specla.v1 import common_pb2, generation_pb2

FinishName = Literal["length", "eos", "stop_id", "stop_string"]

_FINISH_NAMES: dict[int, FinishName] = {
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_EOS: "eos",
    common_pb2.FINISH_REASON_STOP_ID: "stop_id",
    common_pb2.FINISH_REASON_STOP_STRING: "stop_string",
}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts up to the end of the text.

    Attributes:
        prompt_tokens: of the prompt.
        completion_tokens: of the completion, resumed ones and the one that ended it included.
        target_passes: passes of the target that gave at least one token of the text.
        drafted_tokens: candidates those passes verified.
        accepted_tokens: tokens of the text that had been drafted.
    """

    prompt_tokens: int
    completion_tokens: int
    target_passes: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution at one token.

    Attributes:
        chosen: the token's.
        top: (id, log-probability) of the most likely ones, best first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The first event of a stream: what runs, and with which seed."""

    model: str
    numerics_id: str
    seed: int
    prompt_tokens: int
    session_id: bytes


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens and new text.

    Attributes:
        offset: position of the first token in the completion.
        token_ids: may be empty, when only text that was held back comes.
        drafted: for each token, whether a drafter had proposed it.
        text: may lag behind the tokens; a character comes whole.
        logprobs: for each token, if asked for; else empty.
    """

    offset: int
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of a stream.

    Attributes:
        finish_reason: why the text ended.
        matched_stop: the stop string, if one ended it.
        matched_stop_id: the stop id, if one ended it.
    """

    finish_reason: FinishName
    matched_stop: str | None
    matched_stop_id: int | None
    usage: Usage


Event = Started | Delta | Finished


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """A whole answer: the stream's events put together."""

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishName
    matched_stop: str | None
    matched_stop_id: int | None
    usage: Usage
    seed: int
    model: str
    numerics_id: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a server, or this process, can generate with."""

    model: str
    numerics_id: str
    vocab_size: int
    max_prompt_tokens: int
    drafters: tuple[str, ...]


def event_of(response: generation_pb2.GenerateResponse) -> Event | None:
    """The event a message carries; None for a kind that a newer server may send."""
    kind = response.WhichOneof("event")
    if kind == "started":
        started = response.started
        return Started(
            model=started.model,
            numerics_id=started.numerics_id,
            seed=started.seed,
            prompt_tokens=started.prompt_tokens,
            session_id=started.session_id,
        )
    if kind == "delta":
        delta = response.delta
        return Delta(
            offset=delta.offset,
            token_ids=tuple(delta.token_ids),
            drafted=tuple(delta.drafted),
            text=delta.text,
            logprobs=tuple(_logprobs(entry) for entry in delta.logprobs),
        )
    if kind == "finished":
        return _finished(response.finished)
    return None


def model_info(model: generation_pb2.GetModelResponse) -> ModelInfo:
    """The record of a GetModelResponse."""
    return ModelInfo(
        model=model.model,
        numerics_id=model.numerics_id,
        vocab_size=model.vocab_size,
        max_prompt_tokens=model.max_prompt_tokens,
        drafters=tuple(model.drafters),
    )


class Collector:
    """Puts a stream's events together.

    Attributes:
        started: the first event, once it has come.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self._finished: Finished | None = None
        self._deltas: list[Delta] = []

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self._finished = event
        else:
            self._deltas.append(event)

    @property
    def text(self) -> str:
        """What has come of it."""
        return "".join(delta.text for delta in self._deltas)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What has come of them; the text may lag behind."""
        return tuple(token for delta in self._deltas for token in delta.token_ids)

    def result(self) -> GenerateResult:
        """The whole answer, once Started and Finished have come."""
        assert self.started is not None
        assert self._finished is not None  # a stream that ends without it raised
        return GenerateResult(
            text=self.text,
            token_ids=self.token_ids,
            drafted=tuple(flag for delta in self._deltas for flag in delta.drafted),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
            finish_reason=self._finished.finish_reason,
            matched_stop=self._finished.matched_stop,
            matched_stop_id=self._finished.matched_stop_id,
            usage=self._finished.usage,
            seed=self.started.seed,
            model=self.started.model,
            numerics_id=self.started.numerics_id,
        )


def _finished(finished: generation_pb2.Finished) -> Finished:
    reason = _FINISH_NAMES[finished.reason]
    return Finished(
        finish_reason=reason,
        matched_stop=finished.matched_stop if reason == "stop_string" else None,
        matched_stop_id=finished.matched_stop_id if reason == "stop_id" else None,
        usage=Usage(
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            target_passes=finished.usage.target_passes,
            drafted_tokens=finished.usage.drafted_tokens,
            accepted_tokens=finished.usage.accepted_tokens,
        ),
    )


def _logprobs(entry: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(chosen=entry.chosen, top=tuple((top.id, top.logprob) for top in entry.top))
