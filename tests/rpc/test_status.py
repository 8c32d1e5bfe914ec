"""Errors to google.rpc.Status and back, without loss of what callers act on."""

import pytest
from google.rpc import code_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from specla.rpc import errors
from specla.rpc.status import from_status, to_status

EVERY_ERROR = [
    errors.InvalidRequestError("sampling.top_p", "top_p is 0", hint="Give a number above 0"),
    errors.PromptTooLongError("prompt_ids", "too long", hint="At most 9", metadata={"max_prompt_tokens": "9"}),
    errors.TopologyRefusedError("topology.parents", "parents[3] is 3, a cycle"),
    errors.UnknownSessionError("no such session", hint="Open it"),
    errors.AttachRefusedError("the token does not count"),
    errors.NumericsMismatchError("other numerics", metadata={"wanted": "a", "here": "b"}),
    errors.UnsupportedModelError("found rwkv", hint="gated_deltanet"),
    errors.CapacityError("full", retry_after_s=1.5, hint="Wait"),
    errors.DeadlineError("too late"),
    errors.SessionCancelledError("cancelled"),
    errors.ServiceUnavailableError("draining", hint="Go elsewhere"),
    errors.InternalError("internal error", metadata={"error_id": "abc"}),
]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_round_trip(error: errors.SpeclaError) -> None:
    status = to_status(error)
    assert code_pb2.Code.Name(status.code) == error.code
    back = from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert type(back) is type(error)
    assert (back.message, back.hint, back.metadata) == (error.message, error.hint, error.metadata)
    if isinstance(error, errors.InvalidRequestError):
        assert isinstance(back, errors.InvalidRequestError)
        assert back.field == error.field
    if isinstance(error, errors.CapacityError):
        assert isinstance(back, errors.CapacityError)
        assert back.retry_after_s == error.retry_after_s


def test_a_status_of_others_keeps_its_code() -> None:
    back = from_status(status_pb2.Status(code=code_pb2.PERMISSION_DENIED, message="no"))
    assert type(back) is errors.SpeclaError
    assert back.code == "PERMISSION_DENIED"
    assert back.message == "no"
    assert errors.SpeclaError("x").code == "INTERNAL"


texts = st.text(max_size=3000)


@given(texts, texts, texts, st.dictionaries(texts, texts, max_size=20))
def test_no_status_outgrows_a_trailer(field: str, message: str, hint: str, metadata: dict[str, str]) -> None:
    status = to_status(errors.InvalidRequestError(field, message, hint=hint, metadata=metadata))
    assert len(status.SerializeToString()) < 4096
    assert message.startswith(from_status(status).message) or "?" in from_status(status).message
