"""Checking a GenerateRequest at the boundary: what passes here can run on any verifier of the model."""

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple

from specla.client.tokenizer import Tokenizer
from specla.rpc.errors import InvalidRequestError, PromptTooLongError
from specla.rpc.settings import check_distinct
from specla.v1 import common_pb2, generation_pb2, verifier_pb2

_SHORT_TEXT = 4096  # characters that are tokenised faster than a thread is woken
_SEED_BITS = 53  # a drawn seed survives JSON readers that keep numbers as doubles
_MAX_TOP_LOGPROBS = 64
_SMALLEST_TEMPERATURE = 9.999999747378752e-05  # 1e-4 as a float32
_MAX_BIAS = 1e4

# What is looked at on the event loop is bounded, so that no request holds up the others for long.
_MAX_STOP_CHARACTERS = 1024  # of one stop string
_MAX_ALL_STOP_CHARACTERS = 65536
_MAX_BIASES = 16384
_MAX_IDS = 65536  # stop_ids, banned_ids
_MAX_DRAFTERS = 64
_MAX_NAME = 1024  # characters of a drafter's name, of a numerics_id

_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    # The verifier's own ranges. Comparisons with NaN are false, so NaN is refused everywhere.
    "temperature": (lambda t: t == 0 or _SMALLEST_TEMPERATURE <= t < math.inf, "0 (greedy), or at least 0.0001"),
    "top_k": (lambda k: k >= 0, "0 (off) or more"),
    "top_p": (lambda p: 0 < p <= 1, "above 0, at most 1 (off)"),
    "min_p": (lambda p: 0 <= p <= 1, "from 0 (off) to 1"),
    "repetition_penalty": (lambda r: 1e-3 <= r <= 1e3, "from 0.001 to 1000; 1 is off"),
    "presence_penalty": (lambda p: -2 <= p <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda p: -2 <= p <= 2, "from -2 to 2"),
    "top_logprobs": (lambda n: 0 <= n <= _MAX_TOP_LOGPROBS, f"from 0 to {_MAX_TOP_LOGPROBS}"),
}


class CheckedRequest(NamedTuple):
    """A request that may run.

    Attributes:
        prompt_ids: at least one id, all inside the vocabulary.
        resumed_ids: the completion so far; shorter than max_tokens.
        sampling: the request's own, with a seed.
        stopping: the request's own, with max_tokens.
        drafters: names in order of preference; empty means the server's order.
        numerics_id: what resumed_ids came from; empty if it does not matter.
    """

    prompt_ids: list[int]
    resumed_ids: list[int]
    sampling: common_pb2.Sampling
    stopping: common_pb2.Stopping
    drafters: tuple[str, ...]
    numerics_id: str
    allow_other_numerics: bool


async def check_request(
    request: generation_pb2.GenerateRequest,
    tokenizer: Tokenizer,
    target: verifier_pb2.GetTargetResponse,
    *,
    max_stop_strings: int,
) -> CheckedRequest:
    """Tokenise, check every field, draw a seed if there is none.

    Raises:
        PromptTooLongError: more tokens than the target's max_prompt_tokens.
        InvalidRequestError: any other fault; names the field, what is allowed and how to mend it.
    """
    vocabulary = target.dims.vocab_size
    _check_names(request)
    _check_sampling(request.sampling, vocabulary)
    stopping = _check_stopping(request.stopping, vocabulary, target.limits.max_new_tokens, max_stop_strings)
    prompt_ids = await _prompt_ids(request, tokenizer, target.limits.max_prompt_tokens)
    _check_ids("prompt.token_ids", prompt_ids, vocabulary)
    if len(request.resumed_ids) >= stopping.max_tokens:
        raise InvalidRequestError(
            "resumed_ids",
            f"resumed_ids holds {len(request.resumed_ids)} tokens and max_tokens is {stopping.max_tokens}",
            hint="max_tokens counts the resumed tokens too: nothing is left to generate",
        )
    _check_ids("resumed_ids", request.resumed_ids, vocabulary)
    sampling = common_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(_SEED_BITS)
    return CheckedRequest(
        prompt_ids=prompt_ids,
        resumed_ids=list(request.resumed_ids),
        sampling=sampling,
        stopping=stopping,
        drafters=tuple(request.drafters),
        numerics_id=request.numerics_id,
        allow_other_numerics=request.allow_other_numerics,
    )


async def _prompt_ids(request: generation_pb2.GenerateRequest, tokenizer: Tokenizer, limit: int) -> list[int]:
    ids: list[int] = []
    if request.WhichOneof("prompt") == "token_ids":
        if len(request.token_ids.ids) > limit:
            raise _too_long(str(len(request.token_ids.ids)), limit)
        ids = list(request.token_ids.ids)
    elif text := request.text:
        if tokenizer.fewest_tokens(text) > limit:
            raise _too_long(f"at least {tokenizer.fewest_tokens(text)}", limit)
        ids = tokenizer.encode(text) if len(text) <= _SHORT_TEXT else await asyncio.to_thread(tokenizer.encode, text)
    if not ids:
        raise InvalidRequestError("prompt", "the prompt is empty", hint="Give text or token_ids, one token at least")
    if len(ids) > limit:
        raise _too_long(str(len(ids)), limit)
    return ids


def _too_long(tokens: str, limit: int) -> PromptTooLongError:
    return PromptTooLongError(
        "prompt",
        f"the prompt has {tokens} tokens, the limit is {limit}",
        hint="Shorten the prompt, or start the verifier with a higher max_prompt_tokens",
        metadata={"max_prompt_tokens": str(limit)},
    )


def _check_names(request: generation_pb2.GenerateRequest) -> None:
    _check_count("drafters", request.drafters, _MAX_DRAFTERS)
    if any(len(name) > _MAX_NAME for name in request.drafters):
        raise InvalidRequestError(
            "drafters", "a drafter's name is too long", hint=f"A name has at most {_MAX_NAME} characters"
        )
    check_distinct("drafters", request.drafters)
    if len(request.numerics_id) > _MAX_NAME:
        raise InvalidRequestError(
            "numerics_id",
            f"numerics_id has {len(request.numerics_id)} characters",
            hint=f"Give the numerics_id of a Started message; it has at most {_MAX_NAME} characters",
        )


def _check_sampling(sampling: common_pb2.Sampling, vocabulary: int) -> None:
    for name, (is_allowed, allowed) in _ALLOWED.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            continue
        value = getattr(sampling, name)
        if not is_allowed(value):
            raise InvalidRequestError(f"sampling.{name}", f"{name} is {value:g}", hint=f"It must be {allowed}")
    _check_count("sampling.logit_bias", sampling.logit_bias, _MAX_BIASES)
    _check_ids("sampling.logit_bias", list(sampling.logit_bias), vocabulary)
    for bias in sampling.logit_bias.values():
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidRequestError(
                "sampling.logit_bias",
                f"a logit_bias is {bias:g}",
                hint=f"Use numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}; banned_ids bans a token",
            )
    _check_count("sampling.banned_ids", sampling.banned_ids, _MAX_IDS)
    _check_ids("sampling.banned_ids", sampling.banned_ids, vocabulary)
    if len(set(sampling.banned_ids)) >= vocabulary:
        raise InvalidRequestError("sampling.banned_ids", "every token is banned", hint="Leave one to choose")


def _check_stopping(
    stopping: common_pb2.Stopping, vocabulary: int, max_new_tokens: int, max_stop_strings: int
) -> common_pb2.Stopping:
    checked = common_pb2.Stopping()
    checked.CopyFrom(stopping)
    if not checked.HasField("max_tokens"):
        checked.max_tokens = max_new_tokens
    if not 1 <= checked.max_tokens <= max_new_tokens:
        raise InvalidRequestError(
            "stopping.max_tokens", f"max_tokens is {checked.max_tokens}", hint=f"It must be from 1 to {max_new_tokens}"
        )
    _check_stop_strings(checked.stop, max_stop_strings)
    _check_count("stopping.stop_ids", checked.stop_ids, _MAX_IDS)
    _check_ids("stopping.stop_ids", checked.stop_ids, vocabulary)
    return checked


def _check_stop_strings(stop: Sequence[str], most: int) -> None:
    """Errors tell lengths, never the strings: these may be long, and part of what the caller keeps to itself."""
    if len(stop) > most:
        raise InvalidRequestError("stopping.stop", f"there are {len(stop)} stop strings", hint=f"At most {most} may be")
    lengths = [len(string) for string in stop]
    if not all(lengths):
        raise InvalidRequestError("stopping.stop", "a stop string is empty", hint="Leave it out")
    if max(lengths, default=0) > _MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            "stopping.stop",
            f"a stop string has {max(lengths)} characters",
            hint=f"Each may have at most {_MAX_STOP_CHARACTERS}",
        )
    if sum(lengths) > _MAX_ALL_STOP_CHARACTERS:
        raise InvalidRequestError(
            "stopping.stop",
            f"the stop strings have {sum(lengths)} characters",
            hint=f"Together they may have at most {_MAX_ALL_STOP_CHARACTERS}",
        )


def _check_count(field: str, given: Sized, most: int) -> None:
    if len(given) > most:
        raise InvalidRequestError(field, f"{field} has {len(given)} entries", hint=f"Give at most {most}")


def _check_ids(field: str, ids: Sequence[int], vocabulary: int) -> None:
    if ids and max(ids) >= vocabulary:
        position = next(i for i, token in enumerate(ids) if token >= vocabulary)
        raise InvalidRequestError(
            field,
            f"id number {position} of {field} is outside the vocabulary",
            hint=f"Ids run from 0 to {vocabulary - 1}",
            metadata={"vocab_size": str(vocabulary)},
        )
