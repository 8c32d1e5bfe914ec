"""The engine: one draft at each committed length, faults that stay with their session."""

from collections.abc import Sequence

import pytest

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafters.oracle import OracleDrafter
from specla.drafter_service.drafters.random import RandomDrafter
from specla.drafter_service.engine import DraftEngine, Handled
from specla.drafter_service.tree import DraftTree
from specla.rpc.errors import (
    AttachRefusedError,
    CapacityError,
    InternalError,
    InvalidRequestError,
    SpeclaError,
    TopologyRefusedError,
)
from specla.rpc.status import to_status
from specla.v1 import common_pb2, drafter_pb2, verifier_pb2

TEXT = list(range(100, 160))
ONE, TWO = b"1" * 16, b"2" * 16
CONFIG = DrafterConfig(name="random", max_nodes=6)


def request(session_id: bytes = ONE) -> drafter_pb2.DraftSessionRequest:
    return drafter_pb2.DraftSessionRequest(session_id=session_id, verifier_id="v", attach_token=b"token")


def attached(length: int, budget: int, session_id: bytes = ONE) -> verifier_pb2.VerdictItem:
    message = verifier_pb2.Attached(tokens=TEXT[:length], committed_len=length, node_budget=budget)
    return verifier_pb2.VerdictItem(session_id=session_id, seq=1, attached=message)


def verdict(
    tokens: Sequence[int],
    committed_len: int,
    budget: int,
    outcome: verifier_pb2.Outcome = verifier_pb2.OUTCOME_VERIFIED,
    session_id: bytes = ONE,
) -> verifier_pb2.VerdictItem:
    message = verifier_pb2.Verdict(outcome=outcome, tokens=tokens, committed_len=committed_len, node_budget=budget)
    return verifier_pb2.VerdictItem(session_id=session_id, verdict=message)


def failed(error: SpeclaError, session_id: bytes = ONE) -> verifier_pb2.VerdictItem:
    return verifier_pb2.VerdictItem(session_id=session_id, error=to_status(error))


def closed(reason: verifier_pb2.ClosedReason, session_id: bytes = ONE) -> verifier_pb2.VerdictItem:
    return verifier_pb2.VerdictItem(session_id=session_id, closed=verifier_pb2.Closed(reason=reason))


def engine_at(length: int = 5, budget: int = 4) -> tuple[DraftEngine, Handled]:
    engine = DraftEngine(OracleDrafter([TEXT], rate=1.0), CONFIG)
    engine.begin(request())
    return engine, engine.handle([attached(length, budget)])


def topologies(handled: Handled) -> list[verifier_pb2.Topology]:
    assert all(item.HasField("topology") for item in handled.items)
    return [item.topology for item in handled.items]


def test_begin_attaches_and_the_first_draft_follows_the_attachment() -> None:
    engine = DraftEngine(OracleDrafter([TEXT], rate=1.0), CONFIG)
    item = engine.begin(request())
    assert (item.session_id, item.attach.attach_token, item.attach.have_len) == (ONE, b"token", 0)
    handled = engine.handle([attached(5, 4)])
    assert [(who, event.WhichOneof("event")) for who, event in handled.events] == [(ONE, "attached")]
    (topology,) = topologies(handled)
    assert (topology.base_len, topology.root_token) == (5, TEXT[4])
    assert list(topology.tokens) == TEXT[5:9]
    assert list(topology.parents) == [-1, 0, 1, 2]
    assert not topology.assumed
    assert handled.items[0].seq > item.seq


def test_verdicts_move_the_session_and_bring_the_next_draft() -> None:
    engine, _ = engine_at()
    (topology,) = topologies(engine.handle([verdict(TEXT[5:8], 8, 3)]))
    assert (topology.base_len, topology.root_token, list(topology.tokens)) == (8, TEXT[7], TEXT[8:11])


def test_several_verdicts_of_one_message_bring_one_draft() -> None:
    engine, _ = engine_at()
    own = verifier_pb2.OUTCOME_OWN_PASS
    (topology,) = topologies(engine.handle([verdict(TEXT[5:6], 6, 4, own), verdict(TEXT[6:7], 7, 2, own)]))
    assert (topology.base_len, list(topology.tokens)) == (7, TEXT[7:9])


def test_a_budget_of_zero_pauses_and_a_later_one_resumes() -> None:
    engine, handled = engine_at(budget=0)
    assert handled.items == []
    own = verifier_pb2.OUTCOME_OWN_PASS
    assert engine.handle([verdict(TEXT[5:7], 7, 0, own)]).items == []
    (topology,) = topologies(engine.handle([verdict([], 7, 2, own)]))
    assert (topology.base_len, list(topology.tokens)) == (7, TEXT[7:9])


def test_the_budget_is_capped_by_the_configuration() -> None:
    _, handled = engine_at(budget=128)
    assert len(topologies(handled)[0].tokens) == CONFIG.max_nodes


def test_a_draft_without_candidates_is_sent_so_that_nobody_waits() -> None:
    engine, _ = engine_at()
    (topology,) = topologies(engine.handle([verdict([7], 6, 4)]))  # the text leaves the recording
    assert (topology.base_len, topology.root_token, len(topology.tokens)) == (6, 7, 0)


def test_stale_is_answered_by_a_draft_from_the_committed_tokens_once() -> None:
    engine, _ = engine_at()
    stale, own = verifier_pb2.OUTCOME_STALE, verifier_pb2.OUTCOME_OWN_PASS
    (topology,) = topologies(engine.handle([verdict(TEXT[5:6], 6, 4, stale)]))
    assert topology.base_len == 6
    assert engine.handle([verdict([], 6, 4, stale)]).items == []
    (topology,) = topologies(engine.handle([verdict(TEXT[6:7], 7, 4, own), verdict([], 7, 4, stale)]))
    assert topology.base_len == 7
    assert engine.handle([verdict([], 7, 4, verifier_pb2.OUTCOME_SUPERSEDED)]).items == []


def test_tokens_told_twice_count_once() -> None:
    engine, _ = engine_at()
    (topology,) = topologies(engine.handle([verdict(TEXT[4:7], 7, 4)]))
    assert (topology.base_len, list(topology.tokens)) == (7, TEXT[7:11])


def test_seq_rises_over_sessions_and_attachments() -> None:
    engine, handled = engine_at()
    seqs = [handled.items[0].seq]
    seqs.append(engine.begin(request(TWO)).seq)
    seqs += [item.seq for item in engine.handle([attached(5, 4, TWO)]).items]
    seqs += [item.seq for item in engine.end(ONE)]
    seqs.append(engine.begin(request()).seq)
    assert len(seqs) == 5
    assert seqs == sorted(set(seqs))


def test_sessions_do_not_mix() -> None:
    engine, _ = engine_at()
    engine.begin(request(TWO))
    items = [attached(9, 2, TWO), verdict(TEXT[5:7], 7, 4)]
    by_session = {item.session_id: item.topology for item in engine.handle(items).items}
    assert list(by_session[ONE].tokens) == TEXT[7:11]
    assert list(by_session[TWO].tokens) == TEXT[9:11]


def test_closed_ends_the_session_with_its_reason() -> None:
    engine, _ = engine_at()
    handled = engine.handle([verdict(TEXT[5:6], 6, 4), closed(verifier_pb2.CLOSED_REASON_FINISHED)])
    assert handled.items == []
    ((who, event),) = handled.events
    assert (who, event.detached.reason) == (ONE, verifier_pb2.CLOSED_REASON_FINISHED)  # type: ignore[union-attr]
    assert len(engine) == 0
    assert engine.handle([verdict(TEXT[6:7], 7, 4)]) == Handled([], [])
    assert engine.end(ONE) == []


def test_end_detaches_and_late_verdicts_are_ignored() -> None:
    engine, _ = engine_at()
    (item,) = engine.end(ONE)
    assert (item.session_id, item.WhichOneof("item")) == (ONE, "detach")
    assert engine.handle([verdict(TEXT[5:6], 6, 4)]) == Handled([], [])
    assert engine.end(ONE) == []


def test_a_refused_attachment_fails_the_session() -> None:
    engine = DraftEngine(OracleDrafter([TEXT]), CONFIG)
    engine.begin(request())
    handled = engine.handle([failed(AttachRefusedError("a newer token was issued"))])
    ((who, error),) = handled.events
    assert who == ONE
    assert isinstance(error, AttachRefusedError)
    assert (handled.items, len(engine)) == ([], 0)


def test_a_refused_draft_costs_only_itself() -> None:
    engine, _ = engine_at()
    assert engine.handle([failed(TopologyRefusedError("topology", "no"))]) == Handled([], [])
    assert len(topologies(engine.handle([verdict(TEXT[5:6], 6, 4)]))) == 1


@pytest.mark.parametrize(
    "broken",
    [
        verdict(TEXT[5:6], 8, 4),  # tokens are missing
        attached(5, 4),  # twice
        verifier_pb2.VerdictItem(
            session_id=TWO, attached=verifier_pb2.Attached(tokens=TEXT[:3], committed_len=5, node_budget=4)
        ),
        verdict(TEXT[5:6], 6, 4, session_id=TWO),  # before it was attached
    ],
)
def test_a_verifier_that_errs_loses_that_session_only(broken: verifier_pb2.VerdictItem) -> None:
    engine, _ = engine_at()
    engine.begin(request(TWO))
    sound = ONE if broken.session_id == TWO else TWO
    more = verdict(TEXT[5:6], 6, 4) if sound == ONE else attached(5, 4, TWO)
    handled = engine.handle([broken, more])
    assert [item.WhichOneof("item") for item in handled.items if item.session_id == broken.session_id] == ["detach"]
    assert [item.WhichOneof("item") for item in handled.items if item.session_id == sound] == ["topology"]
    errors = [(who, type(event)) for who, event in handled.events if isinstance(event, SpeclaError)]
    assert errors == [(broken.session_id, InternalError)]
    assert len(engine) == 1


class _FailingState:
    def extend(self, tokens: Sequence[int]) -> None:
        raise ZeroDivisionError

    def draft(self, budget: int) -> DraftTree:
        return DraftTree()

    def finish(self) -> None:
        return None


class _FailsOnText:
    """A drafter with a fault: it cannot take in a verdict of sessions that begin as TEXT does."""

    name = "faulty"

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> object:
        return _FailingState() if tokens[0] == TEXT[0] else RandomDrafter().start(tokens, sampling)


def test_a_fault_of_the_drafter_ends_its_session_only() -> None:
    engine = DraftEngine(_FailsOnText(), CONFIG)  # type: ignore[arg-type]
    engine.begin(request())
    engine.begin(request(TWO))
    other = verifier_pb2.Attached(tokens=[5, 6], committed_len=2, node_budget=4)
    engine.handle([attached(5, 4), verifier_pb2.VerdictItem(session_id=TWO, attached=other)])
    handled = engine.handle([verdict([1], 6, 4), verdict([1], 3, 4, session_id=TWO)])
    kinds = {item.session_id: item.WhichOneof("item") for item in handled.items}
    assert kinds == {ONE: "detach", TWO: "topology"}
    ((who, error),) = handled.events
    assert who == ONE
    assert isinstance(error, InternalError)


def test_begin_refuses_what_is_no_session_and_more_than_it_can_hold() -> None:
    engine = DraftEngine(RandomDrafter(), DrafterConfig(name="random", max_sessions=1))
    with pytest.raises(InvalidRequestError, match="3 bytes"):
        engine.begin(drafter_pb2.DraftSessionRequest(session_id=b"abc", attach_token=b"t"))
    with pytest.raises(InvalidRequestError, match="attach_token"):
        engine.begin(drafter_pb2.DraftSessionRequest(session_id=ONE))
    engine.begin(request())
    with pytest.raises(CapacityError):
        engine.begin(request(TWO))
    engine.begin(request())  # the same one begins anew
    assert len(engine) == 1
