"""Drafts between their arrival and their pass: stale, superseded, ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.kernels.topology import Topology
from specla.rpc.errors import InvalidRequestError
from specla.v1.verifier_pb2 import OUTCOME_STALE, OUTCOME_SUPERSEDED
from specla.verifier_service.draft_box import MAX_AHEAD, Answer, DraftBox
from specla.verifier_service.intake import Draft


def draft(seq: int, base_len: int, root_token: int, assumed: tuple[int, ...] = ()) -> Draft:
    return Draft(
        seq=seq,
        base_len=base_len,
        root_token=root_token,
        assumed=assumed,
        tokens=(1,),
        parents=(-1,),
        log_probs=(-0.1,),
        topology=Topology.from_wire((-1,)),
    )


def test_a_draft_for_the_present_length_is_the_current_one() -> None:
    box = DraftBox()
    assert box.put(draft(1, 3, 12), [10, 11, 12]) == []
    taken = box.take()
    assert taken is not None
    assert taken.seq == 1
    assert box.take() is None


def test_the_latest_wins() -> None:
    box = DraftBox()
    box.put(draft(1, 3, 12), [10, 11, 12])
    assert box.put(draft(2, 3, 12), [10, 11, 12]) == [Answer(1, OUTCOME_SUPERSEDED)]
    assert box.current is not None
    assert box.current.seq == 2


def test_a_passed_length_is_stale() -> None:
    assert DraftBox().put(draft(1, 2, 11), [10, 11, 12]) == [Answer(1, OUTCOME_STALE)]


def test_a_wrong_root_is_a_fault_of_the_drafter() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        DraftBox().put(draft(1, 3, 13), [10, 11, 12])
    assert caught.value.field == "topology.root_token"


def test_a_gap_behind_the_committed_tokens_is_a_fault() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        DraftBox().put(draft(1, 5, 14, (14,)), [10, 11, 12])
    assert caught.value.field == "topology.assumed"
    with pytest.raises(InvalidRequestError):
        DraftBox().put(draft(1, 4, 13), [10, 11, 12])


def test_an_assumption_that_comes_true_makes_the_draft_current() -> None:
    box = DraftBox()
    assert box.put(draft(1, 5, 14, (12, 13, 14)), [10, 11, 12]) == []
    assert box.current is None
    assert box.advance([10, 11, 12, 13]) == []
    assert box.current is None
    assert box.advance([10, 11, 12, 13, 14]) == []
    assert box.current is not None
    assert box.current.seq == 1


def test_an_assumption_that_fails_is_stale() -> None:
    box = DraftBox()
    box.put(draft(1, 5, 14, (13, 14)), [10, 11, 12])
    assert box.advance([10, 11, 12, 99]) == [Answer(1, OUTCOME_STALE)]
    assert box.put(draft(2, 4, 13, (12, 13)), [10, 11, 99]) == [Answer(2, OUTCOME_STALE)]


def test_a_few_drafts_ahead_are_kept_the_oldest_goes() -> None:
    box, tokens = DraftBox(), [10]
    for seq in range(1, MAX_AHEAD + 1):
        assert box.put(draft(seq, 1 + seq, 10 + seq, tuple(range(11, 11 + seq))), tokens) == []
    far = MAX_AHEAD + 1
    answers = box.put(draft(far, 1 + far, 10 + far, tuple(range(11, 11 + far))), tokens)
    assert answers == [Answer(1, OUTCOME_SUPERSEDED)]
    assert box.put(draft(far + 1, 1 + far, 10 + far, tuple(range(11, 11 + far))), tokens) == [
        Answer(far, OUTCOME_SUPERSEDED)
    ]


@given(st.data())
def test_every_draft_gets_one_answer_or_one_pass(data: st.DataObject) -> None:
    """Whatever order drafts and tokens come in: none is lost, none is answered twice, none meets a wrong text."""
    box, tokens = DraftBox(), [0]
    sent, answered, passed = 0, [], []
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            sent += 1
            assumed = tuple(data.draw(st.lists(st.integers(0, 1), max_size=3)))
            base_len = data.draw(st.integers(max(1, len(tokens) - 2), len(tokens) + len(assumed)))
            base_len = max(base_len, len(assumed))
            if base_len - len(assumed) > len(tokens):
                continue
            root = assumed[-1] if assumed else tokens[base_len - 1]
            answered += [answer.seq for answer in box.put(draft(sent, base_len, root, assumed), tokens)]
        else:
            current = box.take()
            if current is not None:
                assert current.base_len == len(tokens)
                assert current.root_token == tokens[-1]
                assert list(current.assumed) == tokens[len(tokens) - len(current.assumed) :]
                passed.append(current.seq)
            tokens += data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
            answered += [answer.seq for answer in box.advance(tokens)]
    waiting = [one.seq for one in (box.current, *box._ahead) if one is not None]
    assert sorted([*answered, *passed, *waiting]) == list(range(1, sent + 1))
