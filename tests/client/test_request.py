import math
import time

import pytest
from tiny_target import make_tiny_tokenizer

from specla.client.coordinator.request import CheckedRequest, check_request
from specla.client.tokenizer import Tokenizer
from specla.rpc.errors import InvalidRequestError, PromptTooLongError
from specla.v1 import common_pb2, generation_pb2, verifier_pb2
from specla.verifier_service.intake import check_sampling

TOKENIZER = Tokenizer(make_tiny_tokenizer().to_str().encode())
TARGET = verifier_pb2.GetTargetResponse(
    dims=verifier_pb2.TargetDims(vocab_size=320),
    limits=verifier_pb2.Limits(max_prompt_tokens=100, max_new_tokens=50),
)


async def check(**fields: object) -> CheckedRequest:
    request = generation_pb2.GenerateRequest(**({"text": "hello"} | fields))  # type: ignore[arg-type]
    return await check_request(request, TOKENIZER, TARGET, max_stop_strings=2)


async def test_defaults_are_filled_in() -> None:
    checked = await check()
    assert checked.prompt_ids == TOKENIZER.encode("hello")
    assert checked.stopping.max_tokens == 50
    assert checked.sampling.HasField("seed")
    assert (await check()).sampling.seed != checked.sampling.seed
    assert not checked.sampling.HasField("temperature")


async def test_what_the_caller_sets_stays() -> None:
    sampling = {"temperature": 0.0, "top_p": 0.5, "seed": 2**64 - 1}
    checked = await check(sampling=sampling, stopping={"max_tokens": 3, "stop": ["a"]}, resumed_ids=[1, 2])
    assert checked.sampling == common_pb2.Sampling(**sampling)
    assert checked.stopping == common_pb2.Stopping(max_tokens=3, stop=["a"])
    assert checked.resumed_ids == [1, 2]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"token_ids": {"ids": []}}, "prompt"),
        ({"token_ids": {"ids": [1, 320]}}, "prompt.token_ids"),
        ({"resumed_ids": [4000000000]}, "resumed_ids"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
        ({"sampling": {"temperature": -0.5}}, "sampling.temperature"),
        ({"sampling": {"temperature": 1e-5}}, "sampling.temperature"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p"),
        ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": 1e-38}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": 1001.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": math.nan}}, "sampling.frequency_penalty"),
        ({"sampling": {"top_logprobs": -1}}, "sampling.top_logprobs"),
        ({"sampling": {"logit_bias": {320: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {1: math.nan}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {1: 3.4e38}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {1: -10001.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(16385), 1.0)}}, "sampling.logit_bias"),
        ({"sampling": {"banned_ids": [999]}}, "sampling.banned_ids"),
        ({"sampling": {"banned_ids": list(range(320))}}, "sampling.banned_ids"),
        ({"sampling": {"banned_ids": [1] * 65537}}, "sampling.banned_ids"),
        ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": -7}}, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": 51}}, "stopping.max_tokens"),
        ({"stopping": {"stop": [""]}}, "stopping.stop"),
        ({"stopping": {"stop": ["a", "b", "c"]}}, "stopping.stop"),
        ({"stopping": {"stop": ["a", "b" * 1025]}}, "stopping.stop"),
        ({"stopping": {"stop_ids": [320]}}, "stopping.stop_ids"),
        ({"stopping": {"stop_ids": [1] * 65537}}, "stopping.stop_ids"),
        ({"drafters": [str(i) for i in range(65)]}, "drafters"),
        ({"drafters": ["x" * 1025]}, "drafters"),
        ({"drafters": ["lookup", "suffix", "lookup"]}, "drafters"),
        ({"numerics_id": "x" * 1025}, "numerics_id"),
        ({"resumed_ids": [400] * 51}, "resumed_ids"),
        ({"stopping": {"max_tokens": 2}, "resumed_ids": [1, 2]}, "resumed_ids"),
    ],
)
async def test_bad_fields_are_named_with_a_hint(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await check(**fields)
    assert caught.value.field == field
    assert caught.value.hint


@pytest.mark.parametrize(
    "fields", [{"token_ids": {"ids": [1] * 101}}, {"text": "xq" * 101}, {"text": "a" * 10_000_000}]
)
async def test_a_long_prompt_has_its_own_error(fields: dict[str, object]) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        await check(**fields)
    assert caught.value.metadata == {"max_prompt_tokens": "100"}


@pytest.mark.parametrize(
    ("stop", "found", "allowed"),
    [(["secret" * 8_000_000], "48000000", "1024"), (["secret" + "x" * 1000] * 66, "66396", "65536")],
)
async def test_long_stop_strings_are_refused_at_once_and_not_repeated(
    stop: list[str], found: str, allowed: str
) -> None:
    request = generation_pb2.GenerateRequest(text="hello", stopping={"stop": stop})
    began = time.process_time()
    with pytest.raises(InvalidRequestError) as caught:
        await check_request(request, TOKENIZER, TARGET, max_stop_strings=100)
    assert time.process_time() - began < 1.0  # preparing the long one to be searched for takes some 20 s
    assert found in caught.value.message
    assert allowed in caught.value.hint
    assert "secret" not in str(caught.value)


async def test_the_longest_stop_string_is_allowed() -> None:
    assert (await check(stopping={"stop": ["é" * 1024]})).stopping.stop == ["é" * 1024]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (0.0, 1e-5, 9.9e-5, 1e-4, 1.0, 3e38, math.inf)),
        ("repetition_penalty", (0.0, 9.9e-4, 1e-3, 1000.0, 1000.5, 3e38)),
        ("presence_penalty", (-2.1, -2.0, 2.0, 2.1)),
        ("frequency_penalty", (-2.1, -2.0, 2.0, 2.1)),
        ("top_p", (0.0, 1e-45, 1.0, 1.1)),
        ("min_p", (-0.1, 0.0, 1.0, 1.1)),
        ("top_k", (-1, 0, 2**31 - 1)),
        ("logit_bias", ({1: 10_000.0}, {1: -10_000.0}, {1: 10_000.5}, {1: -10_000.5}, {1: 3.4e38})),
    ],
)
async def test_the_verifier_allows_exactly_what_is_allowed_here(field: str, values: tuple[object, ...]) -> None:
    refused = []
    for value in values:
        sampling = common_pb2.Sampling(**{"seed": 1, field: value})  # type: ignore[arg-type]
        try:
            await check(sampling=sampling)
        except InvalidRequestError as error:
            with pytest.raises(InvalidRequestError, match=field) as caught:
                check_sampling(sampling, 320)
            refused += [caught.value.field, error.field]
        else:
            check_sampling(sampling, 320)
    assert set(refused) == {f"sampling.{field}"}


async def test_a_fault_never_repeats_the_prompt() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await check(token_ids={"ids": [17, 31337]})
    assert "31337" not in str(caught.value)
