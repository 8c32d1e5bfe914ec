import asyncio
from contextlib import aclosing

import pytest
from coordinating import PROMPT, SEED, TOKENIZER, Told, coordinator, kinds, request, tell, text_of, until
from scripted_verifier import ScriptedVerifier
from structlog.testing import capture_logs

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.rpc.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NumericsMismatchError,
    ServiceUnavailableError,
    UnsupportedModelError,
)
from specla.v1 import common_pb2


async def test_a_text_comes_whole_with_seed_model_and_usage() -> None:
    verifier = ScriptedVerifier()
    told = await tell(coordinator([verifier]).generate(request(40)))
    assert told.ids == text_of(40)
    assert told.text == b"".join(TOKENIZER.pieces[token] for token in told.ids).decode(errors="replace")
    assert (told.started.seed, told.started.model, told.started.prompt_tokens) == (SEED, "scripted", 3)
    assert told.finished.reason == common_pb2.FINISH_REASON_LENGTH
    usage = told.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.target_passes) == (3, 40, 27)
    assert (usage.drafted_tokens, usage.accepted_tokens) == (39, 13)
    assert kinds(verifier)[0] == "start"
    assert "cancel" not in kinds(verifier)


async def test_stop_strings_never_reach_the_verifier_and_end_its_session() -> None:
    verifier = ScriptedVerifier()
    whole = await tell(coordinator([verifier]).generate(request(40)))
    stop = whole.text[20:26]
    told = await tell(coordinator([verifier]).generate(request(stopping={"max_tokens": 40, "stop": [stop]})))
    assert told.text == whole.text[: whole.text.index(stop)]
    assert (told.finished.reason, told.finished.matched_stop) == (common_pb2.FINISH_REASON_STOP_STRING, stop)
    assert told.ids == whole.ids[: len(told.ids)]
    assert told.finished.usage.completion_tokens == len(told.ids)
    starts = [command.start for command in verifier.commands if command.HasField("start")]
    assert list(starts[-1].stopping.stop) == []
    assert [start.may_stop for start in starts] == [False, True]


async def test_the_verifier_runs_only_a_credit_ahead_of_a_slow_reader() -> None:
    verifier = ScriptedVerifier()
    async with aclosing(coordinator([verifier], credit=16).generate(request(400))) as answers:
        ids: list[int] = []
        async for response in answers:
            ids += response.delta.token_ids
            await asyncio.sleep(0)
            longest = max(session.length for session in verifier.sessions.values()) if verifier.sessions else 0
            assert longest <= len(PROMPT) + len(ids) + 16 + 1  # a pass may commit one token beyond the credit
    assert ids == text_of(400)


async def test_closing_the_answer_cancels_at_once() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 10
    answers = coordinator([verifier]).generate(request())
    async for response in answers:
        if response.HasField("delta"):
            break
    assert len(verifier.sessions) == 1
    await answers.aclose()
    assert kinds(verifier)[-1] == "cancel"
    assert not verifier.sessions


async def test_a_deadline_cancels_and_says_so() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 10
    with pytest.raises(DeadlineError):
        await tell(coordinator([verifier]).generate(request(), time_left=0.05))
    start = verifier.commands[0].start
    assert 0 < start.time_left.ToMilliseconds() <= 50
    assert kinds(verifier)[-1] == "cancel"


async def test_resumed_tokens_go_to_the_verifier_and_come_back_counted() -> None:
    verifier = ScriptedVerifier()
    told = await tell(coordinator([verifier]).generate(request(40, resumed_ids=text_of(15))))
    assert told.ids == text_of(40)[15:]
    assert list(verifier.commands[0].start.resumed_ids) == text_of(15)
    assert told.finished.usage.completion_tokens == 40


async def test_the_death_of_a_verifier_moves_the_text() -> None:
    first, second = ScriptedVerifier(), ScriptedVerifier()
    first.stall_at = 21
    lost: list[object] = []
    both = Coordinator(
        [first, second], [], TOKENIZER, CoordinatorConfig(), on_verifier_lost=lambda port: lost.append(port)
    )
    responses = []
    async for response in both.generate(request(40)):
        responses.append(response)
        if sum(len(r.delta.token_ids) for r in responses) >= 20 and not lost and first.link.lost is None:
            first.die()
    assert Told(responses).ids == text_of(40)
    assert list(second.commands[0].start.resumed_ids) == text_of(len(second.commands[0].start.resumed_ids))
    assert len(second.commands[0].start.resumed_ids) >= 20
    assert second.commands[0].start.numerics_id == "scripted"
    assert lost == [first]
    assert both.ready


async def test_logs_say_at_which_address_a_verifier_is_met_and_lost() -> None:
    first, second = ScriptedVerifier(address="first.test:50061"), ScriptedVerifier(address="second.test:50061")
    first.stall_at = 21
    with capture_logs() as told:
        task = asyncio.create_task(tell(coordinator([first, second]).generate(request(40))))
        await until(lambda: any(session.passes > 3 for session in first.sessions.values()))
        first.die()
        await task
    assert sorted((line["event"], line["address"]) for line in told) == [
        ("verifier connected", "first.test:50061"),
        ("verifier connected", "second.test:50061"),
        ("verifier gone", "first.test:50061"),
        ("verifier lost", "first.test:50061"),
    ]


async def test_other_numerics_are_refused_unless_allowed() -> None:
    def pair() -> tuple[ScriptedVerifier, ScriptedVerifier]:
        first, second = ScriptedVerifier(numerics_id="here"), ScriptedVerifier(numerics_id="there")
        first.stall_at = 21
        return first, second

    async def run(first: ScriptedVerifier, second: ScriptedVerifier, **fields: object) -> Told:
        task = asyncio.create_task(tell(coordinator([first, second]).generate(request(40, **fields))))
        await until(lambda: any(session.passes > 3 for session in first.sessions.values()))
        await asyncio.sleep(0.01)
        first.die()
        return await task

    with pytest.raises(NumericsMismatchError):
        await run(*pair())
    assert (await run(*pair(), allow_other_numerics=True)).ids == text_of(40)


async def test_a_failed_pass_is_recovered_from_the_token_log() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 12
    task = asyncio.create_task(tell(coordinator([verifier]).generate(request(40))))
    await until(lambda: any(session.passes > 3 for session in verifier.sessions.values()))
    verifier.stall_at = None
    verifier.fail(InternalError("a pass failed"))
    assert (await task).ids == text_of(40)


async def test_a_fault_that_stays_is_reported() -> None:
    verifier = ScriptedVerifier()
    verifier.refuse = [InternalError("broken")] * 10
    with pytest.raises(InternalError, match="broken"):
        await tell(coordinator([verifier]).generate(request()))
    assert kinds(verifier).count("start") == 4


async def test_a_full_verifier_sends_the_session_to_another() -> None:
    full, free = ScriptedVerifier(), ScriptedVerifier()
    full.refuse = [CapacityError("no slot", retry_after_s=0.5)]
    assert (await tell(coordinator([full, free]).generate(request(20)))).ids == text_of(20)
    full.refuse = [CapacityError("no slot", retry_after_s=0.5)]
    with pytest.raises(CapacityError):
        await tell(coordinator([full]).generate(request(20)))


async def test_no_verifier_is_unavailable() -> None:
    with pytest.raises(ServiceUnavailableError):
        await tell(coordinator([]).generate(request()))
    only = ScriptedVerifier()
    alone = coordinator([only])
    only.stall_at = 10
    task = asyncio.create_task(tell(alone.generate(request())))
    await until(lambda: only.sessions)
    only.die()
    with pytest.raises(ServiceUnavailableError, match="died") as caught:
        await task
    assert "resumed_ids" in caught.value.hint
    assert not alone.ready


async def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        coordinator([ScriptedVerifier(tokenizer_hash="f" * 64)])


async def test_a_broken_request_leaves_others_alone() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 4
    one = coordinator([verifier])
    task = asyncio.create_task(tell(one.generate(request(20))))
    await until(lambda: verifier.sessions)
    with pytest.raises(InvalidRequestError):
        await tell(one.generate(request(sampling={"top_p": 0.0})))
    verifier.go_on()
    assert (await task).ids == text_of(20)
