"""What arrives at the verifier is checked whole before anything is done with it."""

import math
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from specla.rpc.errors import (
    DeadlineError,
    InvalidRequestError,
    NumericsMismatchError,
    PromptTooLongError,
    SpeclaError,
    TopologyRefusedError,
)
from specla.rpc.status import to_status
from specla.v1 import common_pb2, verifier_pb2
from specla.verifier_service.features import FeatureWindow
from specla.verifier_service.intake import (
    Draft,
    Limits,
    OpenRequest,
    check_attach,
    check_draft,
    check_session_id,
    check_start,
)

LIMITS = Limits(
    vocab_size=320,
    num_layers=2,
    eos_ids=frozenset({0}),
    numerics_id="here",
    max_rows=9,
    max_prompt_tokens=20,
    max_new_tokens=50,
)
ID = bytes(16)


def start(**fields: Any) -> verifier_pb2.Start:
    return verifier_pb2.Start(**{"prompt_ids": [1, 2], "sampling": common_pb2.Sampling(temperature=0), **fields})


def refused(message: verifier_pb2.Start) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        check_start(ID, message, LIMITS)
    assert caught.value.hint, "an error says how to mend it"
    return caught.value


def test_defaults_are_the_documented_ones() -> None:
    request = check_start(ID, start(sampling=common_pb2.Sampling(seed=7)), LIMITS)
    assert request.sampling.temperature == 1.0
    assert request.sampling.top_p == 1.0
    assert request.sampling.top_k == 0
    assert request.sampling.repetition_penalty == 1.0
    assert request.sampling.seed == 7
    assert request.sampling.top_logprobs is None
    assert request.stopping.max_tokens == 50
    assert request.stopping.eos_ids == {0}
    assert request.keep is None
    assert request.time_left_s is None


def test_what_is_set_is_taken_over() -> None:
    request = check_start(
        ID,
        start(
            resumed_ids=[3],
            sampling=common_pb2.Sampling(
                temperature=0.5, top_k=3, logit_bias={4: -1.0}, banned_ids=[5], seed=2**64 - 1
            ),
            stopping=common_pb2.Stopping(max_tokens=9, stop_ids=[8], ignore_eos=True),
            keep=common_pb2.FeatureSpec(layers=[1, -1], window=4),
            time_left=Duration(seconds=1, nanos=500_000_000),
        ),
        LIMITS,
    )
    assert request.prompt_ids == [1, 2]
    assert request.resumed_ids == [3]
    assert request.sampling.temperature == 0.5
    assert request.sampling.logit_bias == {4: -1.0}
    assert request.sampling.banned_ids == {5}
    assert request.sampling.seed == 2**64 - 1
    assert request.stopping.max_tokens == 9
    assert request.stopping.ignore_eos
    assert request.keep == FeatureWindow((1, -1), 4)
    assert request.time_left_s == 1.5


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [1, 320]}, "prompt_ids[1]"),
        ({"resumed_ids": [2**32 - 1]}, "resumed_ids[0]"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k"),
        ({"sampling": {"min_p": 1.5}}, "sampling.min_p"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ({"sampling": {"logit_bias": {320: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {3: math.inf}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {3: 3.4e38}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(16385), 1.0)}}, "sampling.logit_bias"),
        ({"sampling": {"banned_ids": [1] * 65537}}, "sampling.banned_ids"),
        ({"sampling": {"repetition_penalty": 1e-38}}, "sampling.repetition_penalty"),
        ({"sampling": {"banned_ids": [400]}}, "sampling.banned_ids"),
        ({"sampling": {"top_logprobs": -1}}, "sampling.top_logprobs"),
        ({"sampling": {"top_logprobs": 65}}, "sampling.top_logprobs"),
        ({"sampling": {"temperature": 1}}, "sampling.seed"),
        ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": -3}}, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": 51}}, "stopping.max_tokens"),
        ({"stopping": {"stop_ids": [320]}}, "stopping.stop_ids"),
        ({"stopping": {"stop_ids": [1] * 65537}}, "stopping.stop_ids"),
        ({"resumed_ids": [1, 1], "stopping": {"max_tokens": 2}}, "resumed_ids"),
        ({"keep": {"layers": [2], "window": 1}}, "keep.layers"),
        ({"keep": {"layers": [1, 1], "window": 1}}, "keep.layers"),
        ({"keep": {"layers": [0] * 4, "window": 1}}, "keep.layers"),
        ({"keep": {"layers": [1], "window": 71}}, "keep.window"),
        ({"keep": {"layers": [1], "window": 2**32 - 1}}, "keep.window"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], field: str) -> None:
    sampling = fields.get("sampling")
    if isinstance(sampling, dict) and field != "sampling.seed":
        sampling.setdefault("seed", 1)
    assert refused(start(**fields)).field == field


def test_a_whole_text_may_be_kept() -> None:
    request = check_start(ID, start(keep={"layers": [1], "window": 70}), LIMITS)
    assert request.keep == FeatureWindow((1,), 70)


def test_a_long_prompt_has_an_error_of_its_own() -> None:
    error = refused(start(prompt_ids=[1] * 21))
    assert isinstance(error, PromptTooLongError)
    assert error.metadata == {"max_prompt_tokens": "20"}
    check_start(ID, start(prompt_ids=[1] * 20, resumed_ids=[1] * 5), LIMITS)  # a text that began can be resumed


def test_other_numerics_need_permission() -> None:
    with pytest.raises(NumericsMismatchError) as caught:
        check_start(ID, start(numerics_id="there"), LIMITS)
    assert caught.value.metadata == {"wanted": "there", "here": "here"}
    check_start(ID, start(numerics_id="there", allow_other_numerics=True), LIMITS)
    check_start(ID, start(numerics_id="here"), LIMITS)


def test_no_time_left() -> None:
    with pytest.raises(DeadlineError):
        check_start(ID, start(time_left=Duration()), LIMITS)


def test_session_ids_have_16_bytes() -> None:
    assert check_session_id(ID) == ID
    with pytest.raises(InvalidRequestError, match="16"):
        check_session_id(b"short")


def topology(**fields: Any) -> verifier_pb2.Topology:
    base = {"base_len": 5, "root_token": 7, "tokens": [1, 2, 3], "parents": [-1, 0, 0], "log_probs": [-0.1, -1, -2]}
    return verifier_pb2.Topology(**{**base, **fields})


def test_a_draft_is_taken_over() -> None:
    draft = check_draft(4, topology(assumed=[6, 7]), LIMITS)
    assert (draft.seq, draft.base_len, draft.root_token, draft.assumed) == (4, 5, 7, (6, 7))
    assert draft.tokens == (1, 2, 3)
    assert draft.parents == (-1, 0, 0)
    assert draft.topology.depth.tolist() == [0, 1, 2, 2]
    assert check_draft(5, topology(tokens=[], parents=[], log_probs=[]), LIMITS).tokens == ()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"parents": [-1, 1, 0]}, TopologyRefusedError),  # its own parent
        ({"parents": [1, 0, 0]}, TopologyRefusedError),  # a cycle
        ({"parents": [-1, 2, 0]}, TopologyRefusedError),  # forward
        ({"parents": [-2, 0, 0]}, TopologyRefusedError),
        ({"parents": [-1, 0]}, TopologyRefusedError),
        ({"tokens": [1, 2, 2]}, TopologyRefusedError),  # equal siblings
        ({"tokens": range(9), "parents": range(-1, 8), "log_probs": [0] * 9}, TopologyRefusedError),
        ({"tokens": [1, 2, 320]}, InvalidRequestError),
        ({"root_token": 320}, InvalidRequestError),
        ({"assumed": [320, 7]}, InvalidRequestError),
        ({"assumed": [6]}, InvalidRequestError),  # does not end in the root
        ({"log_probs": [-0.1, math.nan, -1]}, InvalidRequestError),
        ({"log_probs": [-0.1, 0.1, -1]}, InvalidRequestError),
        ({"log_probs": [-0.1, -0.1]}, InvalidRequestError),
        ({"base_len": 0}, InvalidRequestError),
    ],
)
def test_a_broken_draft_is_refused(fields: dict[str, Any], kind: type[InvalidRequestError]) -> None:
    with pytest.raises(kind) as caught:
        check_draft(1, topology(**fields), LIMITS)
    assert caught.value.field.startswith("topology.")


def test_attach_is_held_to_what_the_session_has() -> None:
    keep = FeatureWindow((0, 1), 8)
    attach = verifier_pb2.Attach(have_len=3, want=common_pb2.FeatureSpec(layers=[1], window=2), top_k=4)
    request = check_attach(attach, keep, committed_len=3)
    assert request.want == FeatureWindow((1,), 2)
    for broken, field in (
        (verifier_pb2.Attach(have_len=4), "attach.have_len"),
        (verifier_pb2.Attach(top_k=65), "attach.top_k"),
        (verifier_pb2.Attach(want=common_pb2.FeatureSpec(layers=[-1], window=2)), "attach.want.layers"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            check_attach(broken, keep, committed_len=3)
        assert caught.value.field == field


ids = st.lists(st.integers(0, 330), max_size=25)
numbers = st.floats(width=32)
some_sampling = st.builds(
    common_pb2.Sampling,
    temperature=st.none() | numbers,
    top_k=st.none() | st.integers(-3, 400),
    top_p=st.none() | numbers,
    min_p=st.none() | numbers,
    repetition_penalty=st.none() | numbers,
    presence_penalty=st.none() | numbers,
    frequency_penalty=st.none() | numbers,
    seed=st.none() | st.integers(0, 2**64 - 1),
    top_logprobs=st.none() | st.integers(-3, 400),
    banned_ids=ids,
)
some_start = st.builds(
    verifier_pb2.Start,
    prompt_ids=ids,
    resumed_ids=ids,
    sampling=some_sampling,
    stopping=st.builds(common_pb2.Stopping, max_tokens=st.none() | st.integers(-9, 90), stop_ids=ids),
    keep=st.builds(common_pb2.FeatureSpec, layers=st.lists(st.integers(-3, 4), max_size=3), window=st.integers(0, 90)),
    time_left=st.none() | st.builds(Duration, seconds=st.integers(-2, 2)),
)
some_topology = st.builds(
    verifier_pb2.Topology,
    base_len=st.integers(0, 12),
    root_token=st.integers(0, 330),
    assumed=st.lists(st.integers(0, 330), max_size=4),
    tokens=st.lists(st.integers(0, 330), max_size=12),
    parents=st.lists(st.integers(-3, 12), max_size=12),
    log_probs=st.lists(numbers, max_size=12),
)


@given(some_start)
def test_any_start_is_either_usable_or_refused_with_a_status(message: verifier_pb2.Start) -> None:
    try:
        request = check_start(ID, message, LIMITS)
    except SpeclaError as error:
        status = to_status(error)
        assert status.message
        assert len(status.SerializeToString()) < 4096
        return
    assert isinstance(request, OpenRequest)
    assert 0 < len(request.prompt_ids) <= LIMITS.max_prompt_tokens
    assert all(token < LIMITS.vocab_size for token in (*request.prompt_ids, *request.resumed_ids))
    request.sampling.validate(LIMITS.vocab_size)
    assert len(request.resumed_ids) < request.stopping.max_tokens <= LIMITS.max_new_tokens


@given(some_topology)
def test_any_topology_is_either_a_tree_or_refused_with_a_status(message: verifier_pb2.Topology) -> None:
    try:
        draft = check_draft(1, message, LIMITS)
    except SpeclaError as error:
        status = to_status(error)
        assert len(status.SerializeToString()) < 4096
        return
    assert isinstance(draft, Draft)
    assert len(draft.topology) == len(draft.tokens) + 1 <= LIMITS.max_rows
    assert all(-1 <= parent < i for i, parent in enumerate(draft.parents))
    assert all(log_prob <= 0 for log_prob in draft.log_probs)
