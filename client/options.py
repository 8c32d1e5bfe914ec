"""The options of a generation, in one place for all three ways to ask for one."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from specla.rpc.errors import InvalidRequestError
from specla.v1 import generation_pb2

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_S = 1e8  # three years: a longer deadline is none

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_logprobs",
)


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
    with _naming("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
    for name in _SAMPLING:
        if name in given:
            with _naming(f"sampling.{name}"):
                setattr(request.sampling, name, given[name])
    _fill_lists(request, given)
    with _naming("stopping.max_tokens"):
        if "max_tokens" in given:
            request.stopping.max_tokens = given["max_tokens"]
    if "ignore_eos" in given:
        request.stopping.ignore_eos = given["ignore_eos"]
    if "numerics_id" in given:
        request.numerics_id = given["numerics_id"]
    if "allow_other_numerics" in given:
        request.allow_other_numerics = given["allow_other_numerics"]
    return request


def _fill_lists(request: generation_pb2.GenerateRequest, given: dict[str, Any]) -> None:
    lists: dict[str, tuple[str, Any]] = {
        "banned_ids": ("sampling.banned_ids", request.sampling.banned_ids),
        "stop": ("stopping.stop", request.stopping.stop),
        "stop_ids": ("stopping.stop_ids", request.stopping.stop_ids),
        "resumed_ids": ("resumed_ids", request.resumed_ids),
        "drafter": ("drafters", request.drafters),
    }
    for name, (field, target) in lists.items():
        if name in given:
            values = given[name]
            with _naming(field):
                target.extend([values] if isinstance(values, str) else values)
    with _naming("sampling.logit_bias"):
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
        raise InvalidRequestError("timeout", f"timeout is {timeout}", hint="Give seconds, 0 or more; None is never")
    return timeout


class _naming:  # noqa: N801 (reads as a statement)
    """Turns what protobuf says of a value it cannot hold into an error that names the field."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError):
            raise InvalidRequestError(
                self._field, f"{self._field} cannot hold that value", hint="See specla/v1 for its type and range"
            ) from error
