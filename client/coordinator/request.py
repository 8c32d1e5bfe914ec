"""Checking a GenerateRequest at the boundary: what passes here can run on any verifier of the model."""

import asyncio
import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from specla.client.tokenizer import Tokenizer
from specla.rpc.errors import InvalidRequestError, PromptTooLongError
from specla.v1 import common_pb2, generation_pb2, verifier_pb2

_SHORT_TEXT = 4096  # characters that are tokenised faster than a thread is woken
_SEED_BITS = 53  # a drawn seed survives JSON readers that keep numbers as doubles
_MAX_TOP_LOGPROBS = 64
_RANGES = {
    # field: (lowest, lowest is allowed, highest, what to say)
    "temperature": (0.0, True, math.inf, "0 (greedy) or more"),
    "top_k": (0, True, math.inf, "0 (off) or more"),
    "top_p": (0.0, False, 1.0, "above 0, at most 1 (off)"),
    "min_p": (0.0, True, 1.0, "from 0 (off) to 1"),
    "repetition_penalty": (0.0, False, math.inf, "above 0; 1 is off"),
    "presence_penalty": (-2.0, True, 2.0, "from -2 to 2"),
    "frequency_penalty": (-2.0, True, 2.0, "from -2 to 2"),
    "top_logprobs": (0, True, _MAX_TOP_LOGPROBS, f"from 0 to {_MAX_TOP_LOGPROBS}"),
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
    _check_sampling(request.sampling, vocabulary)
    stopping = _check_stopping(request.stopping, vocabulary, target.limits.max_new_tokens, max_stop_strings)
    prompt_ids = await _prompt_ids(request, tokenizer, target.limits.max_prompt_tokens)
    _check_ids("prompt.token_ids", prompt_ids, vocabulary)
    _check_ids("resumed_ids", request.resumed_ids, vocabulary)
    if len(request.resumed_ids) >= stopping.max_tokens:
        raise InvalidRequestError(
            "resumed_ids",
            f"resumed_ids holds {len(request.resumed_ids)} tokens and max_tokens is {stopping.max_tokens}",
            hint="max_tokens counts the resumed tokens too: nothing is left to generate",
        )
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
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        ids = list(request.token_ids.ids)
    elif kind == "text" and request.text:
        if tokenizer.fewest_tokens(request.text) > limit:
            raise _too_long(f"at least {tokenizer.fewest_tokens(request.text)}", limit)
        if len(request.text) <= _SHORT_TEXT:
            ids = tokenizer.encode(request.text)
        else:
            ids = await asyncio.to_thread(tokenizer.encode, request.text)
    else:
        ids = []
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


def _check_sampling(sampling: common_pb2.Sampling, vocabulary: int) -> None:
    for name, (low, inclusive, high, allowed) in _RANGES.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            continue
        value = getattr(sampling, name)
        # Comparisons with NaN are false, so NaN is refused; an infinite value would pass an open range.
        if not (low <= value <= high and math.isfinite(value) and (inclusive or value > low)):
            raise InvalidRequestError(f"sampling.{name}", f"{name} is {value:g}", hint=f"It must be {allowed}")
    _check_ids("sampling.logit_bias", list(sampling.logit_bias), vocabulary)
    for bias in sampling.logit_bias.values():
        if not math.isfinite(bias):
            raise InvalidRequestError(
                "sampling.logit_bias", f"a logit_bias is {bias:g}", hint="Use finite numbers; banned_ids bans a token"
            )
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
    if len(checked.stop) > max_stop_strings:
        raise InvalidRequestError(
            "stopping.stop", f"there are {len(checked.stop)} stop strings", hint=f"At most {max_stop_strings} may be"
        )
    if not all(checked.stop):
        raise InvalidRequestError("stopping.stop", "a stop string is empty", hint="Leave it out")
    _check_ids("stopping.stop_ids", checked.stop_ids, vocabulary)
    return checked


def _check_ids(field: str, ids: Sequence[int], vocabulary: int) -> None:
    if ids and max(ids) >= vocabulary:
        position = next(i for i, token in enumerate(ids) if token >= vocabulary)
        raise InvalidRequestError(
            field,
            f"id number {position} of {field} is outside the vocabulary",
            hint=f"Ids run from 0 to {vocabulary - 1}",
            metadata={"vocab_size": str(vocabulary)},
        )
