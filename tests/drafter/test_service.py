"""The drafter service and the in-process join against a real verifier: the same text, loss, cancel, refusals."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from bare_coordinator import BareText
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafters.make import make_drafter
from specla.drafter_service.local import LocalDrafter
from specla.drafter_service.server import DrafterServer, serve_drafter
from specla.rpc.errors import InvalidRequestError, ServiceUnavailableError
from specla.rpc.links import Attachment, DrafterPort, VerifierPort
from specla.rpc.remote_drafter import RemoteDrafter
from specla.rpc.remote_verifier import RemoteVerifier
from specla.v1 import drafter_pb2, verifier_pb2
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.scheduler import Scheduler
from specla.verifier_service.server import VerifierServer, serve_verifier

PROMPT = [5, 6, 7, 8, 9] * 6
TOKENS = 60
DRAFTER = DrafterConfig(name="random", port=0, drain_s=0.2, random_probability=0.9)


async def write(
    verifier: VerifierPort, drafter: DrafterPort | None, *, temperature: float = 0.0, pause_s: float = 0.0
) -> BareText:
    """A whole text, drafted for by `drafter` from its first token on; before that one, a pause for its draft."""
    text = BareText(verifier, PROMPT, TOKENS)
    text.start(credit=0, temperature=temperature)
    await text.until(lambda: text.issued is not None)
    attachment = None
    if drafter is not None:
        attachment = drafter.draft_session(text.request(), text.ring)
        await text.until(lambda: bool(text.changes))
    await asyncio.sleep(pause_s)
    text.allow(TOKENS)
    await text.until(lambda: text.finished)
    if attachment is not None:
        events: list[drafter_pb2.DraftSessionResponse] = []

        def has_both() -> bool:
            events.extend(attachment.take())
            return len(events) == 2

        await text.until(has_both)
        assert events[0].HasField("attached")
        assert events[1].detached.reason == verifier_pb2.CLOSED_REASON_FINISHED
        assert attachment.lost is None
        attachment.cancel()
    text.close()
    return text


@pytest.fixture(scope="module")
def verifier_config(tiny_target: Path) -> VerifierConfig:
    return VerifierConfig(target=tiny_target, threads=1, max_sessions=4, port=0, drain_s=0.0)


@pytest.fixture(scope="module")
def scheduler(verifier_config: VerifierConfig) -> Iterator[Scheduler]:
    with Scheduler(Engine(verifier_config), verifier_config).start() as started:
        yield started


@pytest.fixture
async def verifier_server(verifier_config: VerifierConfig) -> AsyncIterator[VerifierServer]:
    server = await serve_verifier(verifier_config)
    yield server
    await server.stop()


@pytest.fixture
async def verifier(verifier_server: VerifierServer) -> AsyncIterator[RemoteVerifier]:
    port = await RemoteVerifier.connect(verifier_server.address)
    yield port
    await port.close()


@pytest.fixture
async def drafter_server() -> AsyncIterator[DrafterServer]:
    server = await serve_drafter(DRAFTER)
    yield server
    await server.stop()


@pytest.fixture
async def drafter(drafter_server: DrafterServer) -> AsyncIterator[RemoteDrafter]:
    port = await RemoteDrafter.connect(drafter_server.address)
    yield port
    await port.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_drafter_in_process_gives_the_plain_text(
    scheduler: Scheduler, tmp_path: Path, temperature: float
) -> None:
    plain = await write(scheduler, None, temperature=temperature)
    assert (len(plain.tokens), plain.verified) == (TOKENS, 0)
    recording = tmp_path / "oracle.jsonl"
    recording.write_text(f'{{"token_ids": {PROMPT + plain.tokens}}}\n')
    oracle = replace(DRAFTER, name="oracle", oracle_file=recording, oracle_rate=1.0)
    configs = [*(replace(DRAFTER, name=name) for name in ("none", "lookup", "suffix", "random")), oracle]
    texts = {}
    for config in configs:
        drafter = LocalDrafter(make_drafter(config), config, scheduler)
        texts[config.name] = await write(scheduler, drafter, temperature=temperature)
        assert texts[config.name].tokens == plain.tokens
        drafter.close()
    assert texts["none"].verified == 0
    assert texts["random"].verified > 0
    assert texts["oracle"].drafted > TOKENS // 3
    assert texts["oracle"].drafted == texts["oracle"].verified


async def test_a_drafter_service_gives_the_plain_text(verifier: RemoteVerifier, drafter: RemoteDrafter) -> None:
    assert drafter.info().name == "random"
    plain = await write(verifier, None)
    drafted = await asyncio.gather(*(write(verifier, drafter, pause_s=0.2) for _ in range(3)))
    assert [text.tokens for text in drafted] == [plain.tokens] * 3
    assert sum(text.verified for text in drafted) > 0


async def test_cancelling_detaches(verifier: RemoteVerifier, drafter: RemoteDrafter) -> None:
    text = BareText(verifier, PROMPT, TOKENS)
    text.start(credit=2)
    await text.until(lambda: text.issued is not None)
    attachment = drafter.draft_session(text.request(), text.ring)
    await text.until(lambda: bool(text.changes))
    attachment.cancel()
    await text.until(lambda: len(text.changes) == 2)
    assert [change.attached for change in text.changes] == [True, False]
    assert text.changes[1].reason == verifier_pb2.CLOSED_REASON_DETACHED
    text.allow(TOKENS)
    await text.until(lambda: text.finished)
    assert attachment.lost is None
    text.close()


async def test_the_death_of_the_service_leaves_the_text_alone(
    verifier: RemoteVerifier, drafter_server: DrafterServer, drafter: RemoteDrafter
) -> None:
    plain = await write(verifier, None)
    text = BareText(verifier, PROMPT, TOKENS)
    text.start(credit=20)
    await text.until(lambda: text.issued is not None)
    attachment = drafter.draft_session(text.request(), text.ring)
    await text.until(lambda: len(text.tokens) == 20)
    await drafter_server.stop()
    await text.until(lambda: len(text.changes) == 2)
    text.allow(TOKENS)
    await text.until(lambda: text.finished and attachment.lost is not None)
    assert text.tokens == plain.tokens
    text.close()


async def test_the_loss_of_the_verifier_ends_its_sessions_and_a_new_one_is_joined(
    verifier_config: VerifierConfig, drafter: RemoteDrafter
) -> None:
    attachments: list[Attachment] = []
    told: list[drafter_pb2.DraftSessionResponse] = []
    lost = asyncio.Event()

    def wake() -> None:
        told.extend(attachments[-1].take() if attachments else ())
        if attachments and (attachments[-1].lost is not None or any(event.HasField("detached") for event in told)):
            lost.set()

    async def attach(port: VerifierPort) -> BareText:
        text = BareText(port, PROMPT, TOKENS)
        text.start(credit=2)
        await text.until(lambda: text.issued is not None)
        attachments.append(drafter.draft_session(text.request(), wake))
        await text.until(lambda: bool(text.changes))
        return text

    server = await serve_verifier(verifier_config)
    port = await RemoteVerifier.connect(server.address)
    text = await attach(port)
    await server.stop()
    async with asyncio.timeout(5):
        await lost.wait()
    if attachments[-1].lost is None:  # it was told that the session failed before the stream broke
        assert told[-1].detached.reason == verifier_pb2.CLOSED_REASON_FAILED
    else:
        assert isinstance(attachments[-1].lost, ServiceUnavailableError)
    await port.close()

    again = await serve_verifier(replace(verifier_config, port=server.port))
    port = await RemoteVerifier.connect(again.address)
    text = await attach(port)
    assert attachments[-1].lost is None
    text.close()
    await port.close()
    await again.stop()


async def refused(drafter: RemoteDrafter, request: drafter_pb2.DraftSessionRequest) -> Exception | None:
    bell = asyncio.Event()
    attachment = drafter.draft_session(request, bell.set)
    async with asyncio.timeout(5):
        await bell.wait()
    return attachment.lost


async def test_requests_that_cannot_be_served_say_why(
    verifier_server: VerifierServer, verifier: RemoteVerifier, drafter: RemoteDrafter
) -> None:
    good = drafter_pb2.DraftSessionRequest(
        session_id=b"s" * 16,
        verifier_id=verifier.target().verifier_id,
        verifier_address=verifier_server.address,
        attach_token=b"token",
    )

    def but(**fields: object) -> drafter_pb2.DraftSessionRequest:
        changed = drafter_pb2.DraftSessionRequest()
        changed.CopyFrom(good)
        changed.MergeFrom(drafter_pb2.DraftSessionRequest(**fields))  # type: ignore[arg-type]
        return changed

    fields: Sequence[tuple[str, object]] = (
        ("verifier_address", "example.org:443"),
        ("verifier_address", "dns:///localhost:1"),
        ("verifier_id", "another"),
        ("session_id", b"short"),
    )
    for field, value in fields:
        error = await refused(drafter, but(**{field: value}))
        assert isinstance(error, InvalidRequestError)
        assert (error.field, bool(error.hint)) == (field, True)
    unreachable = await refused(drafter, but(verifier_address="127.0.0.1:1"))
    assert isinstance(unreachable, ServiceUnavailableError)
    unknown = await refused(drafter, good)
    assert unknown is not None
    assert unknown.code in ("NOT_FOUND", "PERMISSION_DENIED")  # type: ignore[attr-defined]


async def test_the_service_says_who_it_is_and_how_it_does(drafter_server: DrafterServer) -> None:
    async with grpc.aio.insecure_channel(drafter_server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="specla.v1.DrafterService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(ServiceUnavailableError, match="cannot listen"):
        await serve_drafter(replace(DRAFTER, port=drafter_server.port))


async def test_a_drafter_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(ServiceUnavailableError, match="no drafter answers"):
        await RemoteDrafter.connect("127.0.0.1:1", deadline_s=0.2)
