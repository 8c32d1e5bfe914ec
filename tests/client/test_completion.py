import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.client.coordinator.completion import Completion
from specla.rpc.errors import InternalError, InvalidRequestError
from specla.v1 import common_pb2, verifier_pb2

BYTES = [bytes([byte]) for byte in range(256)]
PROMPT = 5


def committed(offset: int, passes: list[tuple[str, int]], **more: object) -> verifier_pb2.Committed:
    """Passes as (their text, one byte a token; candidates verified); all but a pass's last token were drafted."""
    tokens = [list(text.encode()) for text, _ in passes]
    return verifier_pb2.Committed(
        offset=offset,
        tokens=[token for one in tokens for token in one],
        drafted=[i < len(one) - 1 for one in tokens for i in range(len(one))],
        passes=[
            verifier_pb2.PassCount(tokens=len(one), drafted=drafted)
            for one, (_, drafted) in zip(tokens, passes, strict=True)
        ],
        **more,  # type: ignore[arg-type]
    )


def ended(
    length: int, reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_LENGTH
) -> verifier_pb2.SessionFinished:
    return verifier_pb2.SessionFinished(reason=reason, committed_len=length)


def test_a_stop_string_inside_a_pass_cuts_text_and_counts() -> None:
    completion = Completion(PROMPT, BYTES, ["##"], [])
    completion.extend(committed(PROMPT, [("one", 4), ("a##bc", 6), ("later", 7)]))
    delta, finished = completion.take_delta(), completion.finished
    assert delta is not None
    assert finished is not None
    assert (delta.text, bytes(delta.token_ids)) == ("onea", b"onea##")
    assert list(delta.drafted) == [True, True, False, True, True, True]
    assert (finished.reason, finished.matched_stop) == (common_pb2.FINISH_REASON_STOP_STRING, "##")
    usage = finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT, 6)
    assert (usage.target_passes, usage.drafted_tokens, usage.accepted_tokens) == (2, 10, 5)
    assert completion.length == PROMPT + 6


def test_what_comes_behind_the_end_is_dropped() -> None:
    completion = Completion(PROMPT, BYTES, ["#"], [])
    completion.extend(committed(PROMPT, [("a#", 1)]))
    completion.take_delta()
    completion.extend(committed(PROMPT + 2, [("more", 3)]))
    completion.finish(ended(PROMPT + 6))
    assert completion.take_delta() is None
    assert completion.finished is not None
    assert completion.finished.usage.completion_tokens == 2


def test_held_back_text_comes_at_the_end() -> None:
    completion = Completion(PROMPT, BYTES, ["stop"], [])
    completion.extend(committed(PROMPT, [("a st", 0)]))
    first = completion.take_delta()
    assert first is not None
    assert first.text == "a "
    completion.finish(ended(PROMPT + 4))
    last = completion.take_delta()
    assert last is not None
    assert (last.text, last.offset, list(last.token_ids)) == ("st", 4, [])


def test_resumed_tokens_are_not_given_again_but_count() -> None:
    """The first half ends inside a character and inside a possible stop string."""
    whole = "ab😀c--d".encode()
    for cut in range(len(whole) + 1):
        head, tail = whole[:cut], whole[cut:]
        begun = Completion(PROMPT, BYTES, ["--!"], [])
        begun.extend(committed(PROMPT, [("x", 0)] * 0))
        for i, byte in enumerate(head):
            begun.extend(
                verifier_pb2.Committed(
                    offset=PROMPT + i, tokens=[byte], drafted=[False], passes=[verifier_pb2.PassCount(tokens=1)]
                )
            )
        shown = getattr(begun.take_delta(), "text", "")
        resumed = Completion(PROMPT, BYTES, ["--!"], list(head))
        assert resumed.length == PROMPT + cut
        for i, byte in enumerate(tail):
            resumed.extend(
                verifier_pb2.Committed(
                    offset=PROMPT + cut + i, tokens=[byte], drafted=[False], passes=[verifier_pb2.PassCount(tokens=1)]
                )
            )
        resumed.finish(ended(PROMPT + len(whole)))
        delta = resumed.take_delta()
        if delta is not None:
            assert delta.offset == cut
            assert bytes(delta.token_ids) == tail
            shown += delta.text
        assert shown == whole.decode()
        assert resumed.finished is not None
        assert (resumed.finished.usage.completion_tokens, resumed.finished.usage.target_passes) == (
            len(whole),
            len(tail),
        )


def test_a_resumed_text_that_had_ended_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="already holds a stop string"):
        Completion(PROMPT, BYTES, ["#"], list(b"a#b"))


def test_logprobs_stay_with_their_tokens() -> None:
    completion = Completion(PROMPT, BYTES, ["#"], [])
    logprobs = [common_pb2.TokenLogprobs(chosen=-float(i)) for i in range(4)]
    completion.extend(committed(PROMPT, [("a#bc", 3)], logprobs=logprobs))
    delta = completion.take_delta()
    assert delta is not None
    assert [entry.chosen for entry in delta.logprobs] == [0.0, -1.0]


@pytest.mark.parametrize(
    "bad",
    [
        verifier_pb2.Committed(offset=PROMPT + 1, tokens=[1], drafted=[False], passes=[{"tokens": 1}]),
        verifier_pb2.Committed(offset=PROMPT, tokens=[1, 2], drafted=[False] * 2, passes=[{"tokens": 1}]),
        verifier_pb2.Committed(offset=PROMPT, tokens=[1, 2], drafted=[False], passes=[{"tokens": 2}]),
        verifier_pb2.Committed(
            offset=PROMPT,
            tokens=[1, 2],
            drafted=[False] * 2,
            passes=[{"tokens": 2}],
            logprobs=[common_pb2.TokenLogprobs(chosen=-1.0)],
        ),
    ],
    ids=["gap", "passes", "flags", "logprobs"],
)
def test_a_verifier_that_counts_otherwise_is_caught(bad: verifier_pb2.Committed) -> None:
    with pytest.raises(InternalError, match="counted"):
        Completion(PROMPT, BYTES, [], []).extend(bad)


def test_an_end_at_another_length_is_caught() -> None:
    with pytest.raises(InternalError, match="ended at"):
        Completion(PROMPT, BYTES, [], []).finish(ended(PROMPT + 1))


@given(
    st.lists(st.tuples(st.text(alphabet="ab#é", min_size=1, max_size=5), st.integers(0, 8)), max_size=8),
    st.lists(st.text(alphabet="ab#é", min_size=1, max_size=3), max_size=3),
)
def test_deltas_add_up_however_passes_are_grouped(passes: list[tuple[str, int]], stops: list[str]) -> None:
    def outcome(groups: list[list[tuple[str, int]]]) -> tuple[str, bytes, bytes]:
        completion = Completion(PROMPT, BYTES, stops, [])
        text, ids = "", b""
        for group in groups:
            if completion.finished is None:
                completion.extend(committed(completion.length, group))
            delta = completion.take_delta()
            if delta is not None:
                assert delta.offset == len(ids)
                text, ids = text + delta.text, ids + bytes(delta.token_ids)
        if completion.finished is None:
            completion.finish(ended(completion.length))
            delta = completion.take_delta()
            text += delta.text if delta is not None else ""
        assert completion.finished is not None
        usage = completion.finished.usage
        assert usage.completion_tokens == len(ids)
        assert usage.accepted_tokens <= usage.drafted_tokens + usage.completion_tokens
        return text, ids, completion.finished.SerializeToString()

    assert outcome([passes]) == outcome([[one] for one in passes])
