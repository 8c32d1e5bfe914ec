import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import pytest
from scripted_verifier import ScriptedDrafter, ScriptedVerifier, token_at
from tiny_target import make_tiny_tokenizer

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.client.tokenizer import Tokenizer
from specla.rpc.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NumericsMismatchError,
    ServiceUnavailableError,
    UnsupportedModelError,
)
from specla.v1 import common_pb2, generation_pb2, verifier_pb2

TOKENIZER = Tokenizer(make_tiny_tokenizer().to_str().encode())
PROMPT = [5, 6, 7]
SEED = 11


def coordinator(
    verifiers: Sequence[ScriptedVerifier], drafters: Sequence[ScriptedDrafter] = (), **config: object
) -> Coordinator:
    config = {"credit": 64, "attach_timeout_s": 0.05, "drafter_retry_s": 0.05} | config
    return Coordinator(verifiers, drafters, TOKENIZER, CoordinatorConfig(**config))  # type: ignore[arg-type]


def request(max_tokens: int = 40, **fields: object) -> generation_pb2.GenerateRequest:
    fields = {"token_ids": {"ids": PROMPT}, "sampling": {"seed": SEED}} | fields
    fields.setdefault("stopping", {"max_tokens": max_tokens})
    return generation_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


def text_of(count: int, prompt: int = len(PROMPT)) -> list[int]:
    return [token_at(prompt + i, SEED) for i in range(count)]


class Told:
    """A whole answer, checked for shape."""

    def __init__(self, responses: list[generation_pb2.GenerateResponse]) -> None:
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) <= {"delta"}
        self.started = responses[0].started
        self.finished = responses[-1].finished
        self.ids: list[int] = []
        self.text = ""
        first = responses[1].delta.offset
        for response in responses[1:-1]:
            assert response.delta.offset == first + len(self.ids)
            assert len(response.delta.drafted) == len(response.delta.token_ids)
            self.ids += response.delta.token_ids
            self.text += response.delta.text


async def tell(answers: AsyncIterator[generation_pb2.GenerateResponse]) -> Told:
    return Told([response async for response in answers])


def kinds(verifier: ScriptedVerifier) -> list[str | None]:
    return [command.WhichOneof("command") for command in verifier.commands]


async def until(condition: Callable[[], object], seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (the scripted parts have no event to wait for)
            await asyncio.sleep(0.002)


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
    with pytest.raises(ServiceUnavailableError, match="died"):
        await task
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


class TestDrafters:
    async def test_the_preferred_one_gets_a_token_and_detaches_at_the_end(self) -> None:
        verifier, lookup, suffix = ScriptedVerifier(), ScriptedDrafter("lookup"), ScriptedDrafter("suffix")
        both = coordinator([verifier], [lookup, suffix], credit=2)
        assert (await tell(both.generate(request(20)))).ids == text_of(20)
        assert not suffix.attachments
        (attachment,) = lookup.attachments
        assert attachment.request.session_id == verifier.commands[0].session_id
        assert attachment.request.attach_token == bytes([1]) * 16
        assert attachment.cancelled
        assert verifier.commands[0].start.keep == common_pb2.FeatureSpec(layers=[6], window=6)

    async def test_a_request_chooses(self) -> None:
        verifier, lookup, suffix = ScriptedVerifier(), ScriptedDrafter("lookup"), ScriptedDrafter("suffix")
        both = coordinator([verifier], [lookup, suffix], credit=2)
        await tell(both.generate(request(20, drafters=["suffix", "lookup"])))
        assert (len(suffix.attachments), len(lookup.attachments)) == (1, 0)
        await tell(both.generate(request(20, drafters=["none"])))
        assert (len(suffix.attachments), len(lookup.attachments)) == (1, 0)
        with pytest.raises(InvalidRequestError, match="known are lookup, none, suffix"):
            await tell(both.generate(request(20, drafters=["other"])))

    async def test_a_silent_one_is_followed_by_the_next(self) -> None:
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
    async def test_the_loss_of_one_brings_the_next_and_the_text_goes_on(self, how: str) -> None:
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

    async def test_a_lone_one_is_tried_again_later(self) -> None:
        verifier, only = ScriptedVerifier(), ScriptedDrafter("only")
        verifier.stall_at = 4
        task = asyncio.create_task(tell(coordinator([verifier], [only]).generate(request(20))))
        await until(lambda: only.attachments)
        await asyncio.sleep(0.01)
        only.attachments[0].lose()
        await until(lambda: len(only.attachments) == 2)
        verifier.go_on()
        assert (await task).ids == text_of(20)

    async def test_one_of_another_tokenizer_is_never_chosen(self) -> None:
        verifier, other = ScriptedVerifier(), ScriptedDrafter("other", tokenizer_hash="0" * 64)
        await tell(coordinator([verifier], [other], credit=2).generate(request(20)))
        assert not other.attachments
