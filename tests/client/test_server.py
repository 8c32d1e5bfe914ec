"""Generate over a real socket, by both clients; the verifier behind the coordinator is scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from scripted_verifier import ScriptedDrafter, ScriptedVerifier, token_at
from tiny_target import make_tiny_tokenizer

from specla.client import AsyncClient, Client
from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.client.results import Delta, Finished, Started
from specla.client.server import generation_server
from specla.client.tokenizer import Tokenizer
from specla.rpc.errors import DeadlineError, InvalidRequestError, PromptTooLongError, ServiceUnavailableError
from specla.v1 import generation_pb2, generation_pb2_grpc

TOKENIZER = Tokenizer(make_tiny_tokenizer().to_str().encode())
PROMPT = [5, 6, 7]
SEED = 11
TEXT = tuple(token_at(len(PROMPT) + i, SEED) for i in range(40))


@asynccontextmanager
async def serving(verifier: ScriptedVerifier, **config: object) -> AsyncIterator[str]:
    settings = CoordinatorConfig(port=0, drain_s=0.2, **config)  # type: ignore[arg-type]
    server = generation_server(settings, Coordinator([verifier], [ScriptedDrafter("lookup")], TOKENIZER, settings))
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


async def test_events_and_result_agree() -> None:
    async with serving(ScriptedVerifier()) as address, AsyncClient(address) as client:
        events = [event async for event in client.stream(PROMPT, max_tokens=40, seed=SEED)]
        result = await client.generate(PROMPT, max_tokens=40, seed=SEED)
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        deltas = [event for event in events if isinstance(event, Delta)]
        assert len(deltas) == len(events) - 2
        assert result.token_ids == TEXT == tuple(token for delta in deltas for token in delta.token_ids)
        assert result.text == "".join(delta.text for delta in deltas)
        assert (result.seed, result.finish_reason, result.model) == (SEED, "length", "scripted")
        assert result.usage == events[-1].usage
        assert len(result.drafted) == 40
        assert sum(result.drafted) == result.usage.accepted_tokens
        info = await client.model()
        assert (info.vocab_size, info.max_prompt_tokens, info.drafters) == (320, 512, ("lookup", "none"))


async def test_the_blocking_client_gives_the_same() -> None:
    async with serving(ScriptedVerifier()) as address:

        def use() -> None:
            with Client(address) as client:
                assert client.generate(PROMPT, max_tokens=40, seed=SEED).token_ids == TEXT
                assert client.model().model == "scripted"
                with pytest.raises(InvalidRequestError) as caught:
                    client.generate(PROMPT, top_p=0.0)
                assert caught.value.field == "sampling.top_p"
                events = client.stream(PROMPT, max_tokens=2000, seed=SEED)
                assert isinstance(next(events), Started)
                events.close()  # type: ignore[attr-defined]
                assert client.generate(PROMPT, max_tokens=3, seed=SEED).token_ids == TEXT[:3]
            client.close()

        await asyncio.to_thread(use)


async def test_errors_carry_details_on_the_wire() -> None:
    async with serving(ScriptedVerifier()) as address, grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(generation_pb2.GenerateRequest(text="")):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        assert status is not None
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(bad)
        assert (info.reason, info.domain) == ("INVALID_REQUEST", "specla")
        assert bad.field_violations[0].field == "prompt"


async def test_a_prompt_longer_than_grpcs_own_limit_arrives() -> None:
    """The default limit is 4 MiB; the prompt is refused for its length in tokens, not in bytes."""
    async with serving(ScriptedVerifier()) as address, AsyncClient(address) as client:
        with pytest.raises(PromptTooLongError) as caught:
            await client.generate("a long prompt " * 400_000)
        assert caught.value.metadata == {"max_prompt_tokens": "512"}


async def test_a_client_that_goes_away_frees_its_session() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 10
    async with serving(verifier) as address, AsyncClient(address) as client:
        async with aclosing(client.stream(PROMPT, max_tokens=40, seed=SEED)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
            assert len(verifier.sessions) == 1
        async with asyncio.timeout(2):
            while verifier.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert verifier.commands[-1].WhichOneof("command") == "cancel"


async def test_a_deadline_reaches_the_verifier_and_the_caller() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 10
    async with serving(verifier) as address, AsyncClient(address) as client:
        with pytest.raises(DeadlineError):
            await client.generate(PROMPT, max_tokens=40, timeout=0.1)
        assert 0 < verifier.commands[0].start.time_left.ToMilliseconds() <= 100
        async with asyncio.timeout(2):
            while verifier.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_stop_in_the_middle_of_a_text_says_how_to_go_on() -> None:
    verifier = ScriptedVerifier()
    verifier.stall_at = 10

    async def read(address: str, begun: asyncio.Event) -> None:
        async with AsyncClient(address) as client:
            async for _ in client.stream(PROMPT, max_tokens=40, seed=SEED):
                begun.set()

    async with serving(verifier) as address:
        begun = asyncio.Event()
        reading = asyncio.create_task(read(address, begun))
        await begun.wait()
    with pytest.raises(ServiceUnavailableError) as caught:
        await reading
    assert caught.value.message == "the service stopped before the call had ended"
    assert "resumed_ids" in caught.value.hint
    assert not verifier.sessions


async def test_credit_rises_in_steps_with_what_was_read() -> None:
    verifier = ScriptedVerifier()
    async with serving(verifier, credit=16) as address, AsyncClient(address) as client:
        result = await client.generate(PROMPT, max_tokens=1500, seed=SEED)
        assert len(result.token_ids) == 1500
        credits = [c.credit.up_to_len for c in verifier.commands if c.HasField("credit")]
        assert all(8 <= after - before <= 17 for before, after in pairwise(credits))


async def test_health_follows_the_verifiers() -> None:
    verifier = ScriptedVerifier()
    async with serving(verifier) as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="specla.v1.GenerationService")
        assert (await stub.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
        verifier.die()
        await asyncio.sleep(0.01)
        assert (await stub.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with AsyncClient(address) as client:
            with pytest.raises(ServiceUnavailableError):
                await client.generate(PROMPT)


async def test_nobody_there_is_a_typed_error() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ServiceUnavailableError):
            await client.generate(PROMPT, timeout=2.0)
