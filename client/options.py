"""The options of a generation, in one place for all three ways to ask for one."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from specla.rpc.errors import InvalidRequestError
from specla.v1 import generation_pb2

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_S = 1e8  # three years: a longer deadline is none

_INT32 = f"an integer, at most {2**31 - 1}"
_TOKEN_IDS = "token ids, integers from 0 to the last of the vocabulary"
_NUMBER = "a number"
_SAMPLING = {  # what their fields can hold; the server refuses what is out of range
    "temperature": _NUMBER,
    "top_k": _INT32,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "seed": f"an integer from 0 to {2**64 - 1}",
    "top_logprobs": _INT32,
}


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; one left out, or None, has the server's default.

    Attributes:
        drafter: one name, or several in order of preference; "none" decodes plainly. Default: the server's order.
        max_tokens: tokens of the completion at most. Default: the server's limit.
        temperature: 0 is greedy. Default 1.
        top_k: 0 is off. Default 0.
        top_p: in (0, 1]. Default 1.
        min_p: in [0, 1]. Default 0.
        repetition_penalty: over prompt and output, in [0.001, 1000]. Default 1.
        presence_penalty: over the output, in [-2, 2]. Default 0.
        frequency_penalty: over the output, in [-2, 2]. Default 0.
        logit_bias: token id to what is added to its logit, in [-10000, 10000].
        banned_ids: ids that are never produced.
        seed: from 0 to 2^64 - 1. Default: drawn, and told in the result.
        stop: strings; the text ends before the first of them.
        stop_ids: the text ends with the first of them.
        ignore_eos: go on behind an end-of-text token. Default False.
        top_logprobs: log-probability of each token, and of that many best. Default: none.
        resumed_ids: the completion so far, of a call that broke off; generation goes on behind it.
        numerics_id: of the call that broke off; another one is refused.
        allow_other_numerics: go on under another numerics_id all the same. Default False.
        timeout: seconds until DeadlineError; None waits for ever. Default 600.
    """

    drafter: str | Sequence[str] | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    banned_ids: Sequence[int] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_ids: Sequence[int] | None
    ignore_eos: bool | None
    top_logprobs: int | None
    resumed_ids: Sequence[int] | None
    numerics_id: str | None
    allow_other_numerics: bool | None
    timeout: float | None


def build_request(prompt: str | Sequence[int], options: Options) -> generation_pb2.GenerateRequest:
    """The message of a prompt (text, or token ids) and its options; ranges are the server's business.

    Raises:
        TypeError: an option that does not exist.
        InvalidRequestError: a value its field cannot hold at all (a negative id, a lone surrogate).
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = generation_pb2.GenerateRequest()
    with _holding("prompt", "text that UTF-8 can hold, or " + _TOKEN_IDS):
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
    for name, allowed in _SAMPLING.items():
        if name in given:
            with _holding(f"sampling.{name}", allowed, given[name]):
                setattr(request.sampling, name, given[name])
    _fill_lists(request, given)
    if "max_tokens" in given:
        with _holding("stopping.max_tokens", _INT32, given["max_tokens"]):
            request.stopping.max_tokens = given["max_tokens"]
    if "ignore_eos" in given:
        request.stopping.ignore_eos = given["ignore_eos"]
    if "numerics_id" in given:
        request.numerics_id = given["numerics_id"]
    if "allow_other_numerics" in given:
        request.allow_other_numerics = given["allow_other_numerics"]
    return request


def _fill_lists(request: generation_pb2.GenerateRequest, given: dict[str, Any]) -> None:
    lists: dict[str, tuple[str, Any, str]] = {
        "banned_ids": ("sampling.banned_ids", request.sampling.banned_ids, _TOKEN_IDS),
        "stop": ("stopping.stop", request.stopping.stop, "strings that UTF-8 can hold"),
        "stop_ids": ("stopping.stop_ids", request.stopping.stop_ids, _TOKEN_IDS),
        "resumed_ids": ("resumed_ids", request.resumed_ids, _TOKEN_IDS),
        "drafter": ("drafters", request.drafters, "names of drafters"),
    }
    for name, (field, target, allowed) in lists.items():
        if name in given:
            values = given[name]
            with _holding(field, allowed):
                target.extend([values] if isinstance(values, str) else values)
    with _holding("sampling.logit_bias", "a number for each of several " + _TOKEN_IDS):
        request.sampling.logit_bias.update(given.get("logit_bias", {}))


def timeout_of(options: Options) -> float | None:
    """Seconds until DeadlineError, or None for never.

    Raises:
        InvalidRequestError: it is not a time.
    """
    timeout = options.get("timeout", DEFAULT_TIMEOUT_S)
    if timeout is None or timeout > _LONGEST_S:
        return None
    if not timeout >= 0:  # written so that NaN is refused too
        raise InvalidRequestError("timeout", f"timeout is {timeout}", hint="Give seconds, 0 or more")
    return timeout


class _holding:  # noqa: N801 (reads as a statement)
    """Turns what protobuf says of a value it cannot hold into an error that names the field and what it may hold.

    `value` is told if it is given: never what may be part of a prompt.
    """

    def __init__(self, field: str, allowed: str, value: object = None) -> None:
        self._field = field
        self._allowed = allowed
        self._value = value

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError):
            name = self._field.rpartition(".")[2]
            fault = f"{name} holds what it cannot" if self._value is None else f"{name} is {reprlib.repr(self._value)}"
            raise InvalidRequestError(self._field, fault, hint=f"Give {self._allowed}") from error
