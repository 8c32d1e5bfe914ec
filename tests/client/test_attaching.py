"""How a session gets a drafter, loses it and gets another."""

import asyncio

import pytest
from coordinating import coordinator, request, tell, text_of, until
from scripted_verifier import ScriptedDrafter, ScriptedVerifier
from structlog.testing import capture_logs

from specla.client.coordinator.drafters import Attaching, DrafterMember
from specla.rpc.errors import InvalidRequestError
from specla.v1 import common_pb2, drafter_pb2, verifier_pb2


async def test_the_preferred_one_gets_a_token_and_detaches_at_the_end() -> None:
    verifier, lookup, suffix = ScriptedVerifier(), ScriptedDrafter("lookup"), ScriptedDrafter("suffix")
    both = coordinator([verifier], [lookup, suffix], credit=2)
    assert (await tell(both.generate(request(20)))).ids == text_of(20)
    assert not suffix.attachments
    (attachment,) = lookup.attachments
    assert attachment.request.session_id == verifier.commands[0].session_id
    assert attachment.request.attach_token == bytes([1]) * 16
    assert attachment.cancelled
    (asked,) = [command.issue_attach for command in verifier.commands if command.HasField("issue_attach")]
    assert asked.drafter_id == lookup.info().drafter_id != suffix.info().drafter_id
    assert verifier.commands[0].start.keep == common_pb2.FeatureSpec(layers=[6], window=6)


async def test_what_verifier_and_drafter_say_in_one_go_calls_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process the verifier's thread leads to the drafter, so both speak before the loop runs; a call is dear."""
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter("only", answers=False)
    verifier.stall_at = 4
    task = asyncio.create_task(tell(coordinator([verifier], [drafter]).generate(request(20))))
    await until(lambda: drafter.attachments)
    await asyncio.sleep(0.01)
    loop, calls = asyncio.get_running_loop(), list[object]()
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (calls.append(given), call(*given))[1])
    (session_id,) = verifier.sessions
    drafter.attachments[0].say(attached=drafter_pb2.DrafterAttached())
    verifier.emit(session_id, drafter_changed=verifier_pb2.DrafterChanged(attached=True, epoch=1))
    assert len(calls) == 1
    await asyncio.sleep(0.1)  # longer than attaching may take: that it has was heard
    assert not drafter.attachments[0].cancelled
    verifier.go_on()
    assert (await task).ids == text_of(20)


async def test_a_request_chooses() -> None:
    verifier, lookup, suffix = ScriptedVerifier(), ScriptedDrafter("lookup"), ScriptedDrafter("suffix")
    both = coordinator([verifier], [lookup, suffix], credit=2)
    await tell(both.generate(request(20, drafters=["suffix", "lookup"])))
    assert (len(suffix.attachments), len(lookup.attachments)) == (1, 0)
    await tell(both.generate(request(20, drafters=["none"])))
    assert (len(suffix.attachments), len(lookup.attachments)) == (1, 0)
    with pytest.raises(InvalidRequestError, match="Known here: lookup, none, suffix"):
        await tell(both.generate(request(20, drafters=["other"])))


async def test_a_silent_one_is_followed_by_the_next() -> None:
    verifier = ScriptedVerifier()
    silent, good = ScriptedDrafter("silent", answers=False), ScriptedDrafter("good")
    verifier.stall_at = 4
    task = asyncio.create_task(tell(coordinator([verifier], [silent, good]).generate(request(20))))
    await until(lambda: good.attachments)
    assert silent.attachments[0].cancelled
    assert good.attachments[0].request.attach_token == bytes([2]) * 16
    verifier.go_on()
    assert (await task).ids == text_of(20)


@pytest.mark.parametrize("how", ["stream", "event", "verifier"])
async def test_the_loss_of_one_brings_the_next_and_the_text_goes_on(how: str) -> None:
    verifier = ScriptedVerifier()
    first, second = ScriptedDrafter("first"), ScriptedDrafter("second")
    verifier.stall_at = 4
    task = asyncio.create_task(tell(coordinator([verifier], [first, second]).generate(request(20))))
    await until(lambda: first.attachments)
    await asyncio.sleep(0.01)
    reason = verifier_pb2.CLOSED_REASON_LOST
    if how == "stream":
        first.attachments[0].lose()
    elif how == "event":
        first.attachments[0].say(detached={"reason": reason})
    else:
        (session_id,) = verifier.sessions
        verifier.emit(session_id, drafter_changed=verifier_pb2.DrafterChanged(epoch=1, reason=reason))
    await until(lambda: second.attachments)
    assert first.attachments[0].cancelled
    verifier.go_on()
    assert (await task).ids == text_of(20)
    assert len(first.attachments) == 1


async def test_the_next_one_is_not_blamed_for_the_loss_of_the_former() -> None:
    """The verifier's word of the loss comes late: after the call's end, before the next drafter's token."""
    first, second = ScriptedDrafter("first"), ScriptedDrafter("second")
    members = [DrafterMember(first, 2.0), DrafterMember(second, 2.0)]
    sent: list[verifier_pb2.SessionCommand] = []
    attaching = Attaching(members, bytes(16), sent.append, lambda: None, timeout=2.0)
    attaching.begin()
    attaching.on_issued(verifier_pb2.AttachIssued(epoch=1, attach_token=b"t"))
    first.attachments[0].lose()
    attaching.step()
    late = verifier_pb2.DrafterChanged(epoch=1, reason=verifier_pb2.CLOSED_REASON_LOST)
    attaching.on_changed(late)
    attaching.on_issued(verifier_pb2.AttachIssued(epoch=2, attach_token=b"u"))
    assert [len(drafter.attachments) for drafter in (first, second)] == [1, 1]
    assert members[1].not_before == 0.0
    assert len(sent) == 2  # a token was asked for twice, not three times
    attaching.end()


async def test_a_lone_one_is_tried_again_later() -> None:
    verifier, only = ScriptedVerifier(), ScriptedDrafter("only")
    verifier.stall_at = 4
    task = asyncio.create_task(tell(coordinator([verifier], [only]).generate(request(20))))
    await until(lambda: only.attachments)
    await asyncio.sleep(0.01)
    only.attachments[0].lose()
    await until(lambda: len(only.attachments) == 2)
    verifier.go_on()
    assert (await task).ids == text_of(20)


async def test_one_of_another_tokenizer_is_never_chosen() -> None:
    verifier, other = ScriptedVerifier(), ScriptedDrafter("other", tokenizer_hash="0" * 64)
    await tell(coordinator([verifier], [other], credit=2).generate(request(20)))
    assert not other.attachments


def test_a_failing_one_is_put_aside_for_longer_each_time() -> None:
    member = DrafterMember(ScriptedDrafter("a"), 2.0)
    waits = []
    for _ in range(6):
        now = member.not_before
        member.failed(now)
        member.failed(now + 0.1)  # another session that lost the same drafter
        waits.append(member.not_before - now)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 32.0]
    member.attached()
    member.failed(100.0)
    assert member.not_before == 102.0


def test_a_drafter_that_is_back_is_said_once() -> None:
    member = DrafterMember(ScriptedDrafter("lookup"), retry=1.0)
    with capture_logs() as told:
        member.attached()
        member.failed(10.0)
        member.attached()
        member.attached()
    assert told == [{"event": "drafter back", "drafter": "lookup", "address": "lookup.test:1", "log_level": "info"}]


async def test_logs_say_at_which_address_a_drafter_is_met_and_lost() -> None:
    first, second = (ScriptedDrafter("lookup", address=f"{host}.test:50071") for host in ("first", "second"))
    with capture_logs() as told:
        verifier = ScriptedVerifier()
        verifier.stall_at = 4
        task = asyncio.create_task(tell(coordinator([verifier], [first, second]).generate(request(20))))
        await until(lambda: first.attachments)
        await asyncio.sleep(0.01)
        first.attachments[0].lose()
        await until(lambda: second.attachments)
        verifier.go_on()
        await task
    met_or_lost = [(line["event"], line["address"]) for line in told if line["event"].startswith("drafter")]
    assert met_or_lost == [
        ("drafter connected", "first.test:50071"),
        ("drafter connected", "second.test:50071"),
        ("drafter lost", "first.test:50071"),
    ]
