import math

import pytest

from specla.client.options import build_request, timeout_of
from specla.rpc.errors import InvalidRequestError
from specla.v1 import common_pb2, generation_pb2


def test_every_option_lands_in_its_field() -> None:
    request = build_request(
        [1, 2],
        {
            "drafter": ["lookup", "none"],
            "max_tokens": 7,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.25,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": -1.0,
            "frequency_penalty": 2.0,
            "logit_bias": {5: -2.0},
            "banned_ids": [8],
            "seed": 2**64 - 1,
            "stop": ["x", "y"],
            "stop_ids": [9],
            "ignore_eos": True,
            "top_logprobs": 0,
            "resumed_ids": [4],
            "numerics_id": "cpu",
            "allow_other_numerics": True,
            "timeout": 3.0,
        },
    )
    assert request == generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[1, 2]),
        sampling=common_pb2.Sampling(
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            logit_bias={5: -2.0},
            banned_ids=[8],
            seed=2**64 - 1,
            top_logprobs=0,
        ),
        stopping=common_pb2.Stopping(max_tokens=7, stop=["x", "y"], stop_ids=[9], ignore_eos=True),
        resumed_ids=[4],
        drafters=["lookup", "none"],
        numerics_id="cpu",
        allow_other_numerics=True,
    )


def test_what_is_left_out_stays_unset() -> None:
    assert build_request("hello", {"temperature": None, "stop": None}) == generation_pb2.GenerateRequest(text="hello")


def test_zero_is_not_unset() -> None:
    request = build_request("hello", {"temperature": 0.0, "top_p": 0.0, "seed": 0, "max_tokens": 0})
    assert all(request.sampling.HasField(name) for name in ("temperature", "top_p", "seed"))  # type: ignore[arg-type]
    assert request.stopping.HasField("max_tokens")


def test_one_string_is_one_stop_and_one_drafter() -> None:
    request = build_request("hello", {"stop": "end", "drafter": "lookup"})
    assert (list(request.stopping.stop), list(request.drafters)) == (["end"], ["lookup"])


@pytest.mark.parametrize(
    ("prompt", "options", "field", "says"),
    [
        ([-1], {}, "prompt", "prompt holds what it cannot. Give text"),
        ("\ud800", {}, "prompt", "prompt holds what it cannot. Give text"),
        ("a", {"seed": -1}, "sampling.seed", f"seed is -1. Give an integer from 0 to {2**64 - 1}"),
        ("a", {"max_tokens": 2**40}, "stopping.max_tokens", "max_tokens is 1099511627776. Give an integer, at most"),
        ("a", {"temperature": "hot"}, "sampling.temperature", "temperature is 'hot'. Give a number"),
        ("a", {"stop": [3]}, "stopping.stop", "stop holds what it cannot. Give strings"),
        (
            "a",
            {"stop_ids": [-1]},
            "stopping.stop_ids",
            "stop_ids holds what it cannot. Give token ids, integers from 0",
        ),
        ("a", {"logit_bias": {-1: 0.0}}, "sampling.logit_bias", "logit_bias holds what it cannot. Give a number for"),
    ],
)
def test_what_no_field_can_hold_is_named(prompt: object, options: dict[str, object], field: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(prompt, options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value).startswith(says)


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_request("hello", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("timeout", [-1.0, math.nan, -math.inf])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        timeout_of({"timeout": timeout})
    assert caught.value.field == "timeout"


@pytest.mark.parametrize(("timeout", "seconds"), [(2.5, 2.5), (None, None), (math.inf, None), (1e300, None)])
def test_a_timeout_beyond_all_measure_is_none(timeout: float | None, seconds: float | None) -> None:
    assert timeout_of({"timeout": timeout}) == seconds
    assert timeout_of({}) == 600.0
