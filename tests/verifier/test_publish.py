"""Link ends: unread items of a session grow together, and nothing that their readers do hurts the scheduler."""

import struct

from specla.v1 import common_pb2, verifier_pb2
from specla.v1.verifier_pb2 import SessionEvent, VerdictItem
from specla.verifier_service.publish import (
    MAX_FEATURE_BYTES,
    MAX_UNREAD,
    CoordinatorEnd,
    DrafterEnd,
    merge_committed,
    merge_verdict,
)

A, B = b"a" * 16, b"b" * 16


def coordinator_end(wake=lambda: None, hang_up=lambda end: None) -> CoordinatorEnd:
    return CoordinatorEnd(lambda end, items: None, hang_up, wake, merge_committed)


def drafter_end() -> DrafterEnd:
    return DrafterEnd(lambda end, items: None, lambda end: None, lambda: None, merge_verdict)


def committed(session_id: bytes, offset: int, *tokens: int) -> SessionEvent:
    count = verifier_pb2.PassCount(tokens=len(tokens), drafted=3)
    event = verifier_pb2.Committed(offset=offset, tokens=tokens, drafted=[False] * len(tokens), passes=[count])
    return SessionEvent(session_id=session_id, committed=event)


def verdict(seq: int, outcome: verifier_pb2.Outcome, base_len: int, *tokens: int, nodes=()) -> VerdictItem:
    message = verifier_pb2.Verdict(
        outcome=outcome, base_len=base_len, tokens=tokens, committed_len=base_len + len(tokens), accepted_nodes=nodes
    )
    return VerdictItem(session_id=A, seq=seq, verdict=message)


def test_unread_tokens_of_a_session_grow_together() -> None:
    end = coordinator_end()
    for event in (committed(A, 5, 1), committed(B, 9, 7), committed(A, 6, 2, 3)):
        end.put(event)
    first, second = end.take()
    assert list(first.committed.tokens) == [1, 2, 3]
    assert first.committed.offset == 5
    assert [count.tokens for count in first.committed.passes] == [1, 2]
    assert second.session_id == B
    end.put(committed(A, 8, 4))
    assert list(end.take()[0].committed.tokens) == [4]  # what was read is not touched again
    assert list(first.committed.tokens) == [1, 2, 3]


def test_order_within_a_session_is_kept() -> None:
    end = coordinator_end()
    end.put(committed(A, 5, 1))
    end.put(SessionEvent(session_id=A, drafter_changed=verifier_pb2.DrafterChanged(attached=True)))
    end.put(committed(A, 6, 2))
    assert [event.WhichOneof("event") for event in end.take()] == ["committed", "drafter_changed", "committed"]


def test_own_passes_join_an_unread_verdict() -> None:
    end = drafter_end()
    end.put(verdict(3, verifier_pb2.OUTCOME_VERIFIED, 10, 1, 2, nodes=[0]))
    end.put(verdict(0, verifier_pb2.OUTCOME_OWN_PASS, 12, 5))
    (item,) = end.take()
    assert item.seq == 3
    assert item.verdict.outcome == verifier_pb2.OUTCOME_VERIFIED
    assert list(item.verdict.tokens) == [1, 2, 5]
    assert (item.verdict.base_len, item.verdict.committed_len) == (10, 13)


def test_a_verified_draft_takes_an_unread_own_pass_over() -> None:
    end = drafter_end()
    end.put(verdict(0, verifier_pb2.OUTCOME_OWN_PASS, 10, 1))
    end.put(verdict(4, verifier_pb2.OUTCOME_VERIFIED, 11, 2, 3, nodes=[0]))
    (item,) = end.take()
    assert item.seq == 4
    assert item.verdict.outcome == verifier_pb2.OUTCOME_VERIFIED
    assert list(item.verdict.tokens) == [1, 2, 3]
    assert list(item.verdict.accepted_nodes) == [0]
    assert item.verdict.base_len == 11


def test_each_draft_has_its_answer() -> None:
    end = drafter_end()
    end.put(verdict(4, verifier_pb2.OUTCOME_VERIFIED, 10, 1))
    end.put(verdict(5, verifier_pb2.OUTCOME_STALE, 11))
    end.put(verdict(6, verifier_pb2.OUTCOME_VERIFIED, 11, 2))
    assert [item.seq for item in end.take()] == [4, 5, 6]


def features(item: VerdictItem, start: int, *rows: float) -> VerdictItem:
    item.verdict.features.from_position = start
    item.verdict.features.values.dtype = common_pb2.DTYPE_FLOAT32
    item.verdict.features.values.shape.extend([len(rows), 1, 1])
    item.verdict.features.values.data = struct.pack(f"<{len(rows)}f", *rows)
    return item


def test_features_of_joined_verdicts_follow_each_other() -> None:
    end = drafter_end()
    end.put(features(verdict(4, verifier_pb2.OUTCOME_VERIFIED, 10, 1), 8, 0.5))
    end.put(features(verdict(0, verifier_pb2.OUTCOME_OWN_PASS, 11, 2), 9, 1.5, 2.5))
    merged = end.take()[0].verdict.features
    assert merged.from_position == 8
    assert list(merged.values.shape) == [3, 1, 1]
    assert struct.unpack("<3f", merged.values.data) == (0.5, 1.5, 2.5)


def test_too_many_features_leave_the_newest() -> None:
    end = drafter_end()
    many = [0.0] * (MAX_FEATURE_BYTES // 4)
    end.put(features(verdict(4, verifier_pb2.OUTCOME_VERIFIED, 10, 1), 8, *many))
    end.put(features(verdict(0, verifier_pb2.OUTCOME_OWN_PASS, 11, 2), 8 + len(many), 1.5))
    merged = end.take()[0].verdict.features
    assert merged.from_position == 8 + len(many)
    assert list(merged.values.shape) == [1, 1, 1]


def test_one_wake_for_all_that_is_new() -> None:
    wakes = []
    end = coordinator_end(wake=lambda: wakes.append(1))
    assert not end.flush()
    end.put(committed(A, 5, 1))
    end.put(committed(B, 5, 1))
    assert end.flush()
    assert not end.flush()
    assert wakes == [1]


def test_a_reader_whose_wake_fails_is_cut_off() -> None:
    gone = []

    def wake() -> None:
        raise ValueError("prompt text that must not travel")

    end = coordinator_end(wake, gone.append)
    end.put(committed(A, 5, 1))
    end.flush()
    assert gone == [end]
    assert end.lost is not None
    assert "prompt text" not in str(end.lost)


def test_a_reader_that_never_reads_is_cut_off() -> None:
    gone = []
    end = coordinator_end(hang_up=gone.append)
    for i in range(MAX_UNREAD + 2):
        end.put(SessionEvent(session_id=A, failed={"code": 3, "message": str(i)}))
    assert gone == [end]
    assert len(end.take()) == MAX_UNREAD + 1
    assert end.lost is not None


def test_closing_twice_hangs_up_once() -> None:
    gone = []
    end = coordinator_end(hang_up=gone.append)
    end.close()
    end.close()
    assert gone == [end]
    assert end.lost is None
    end.put(committed(A, 5, 1))
    assert end.take() == []
