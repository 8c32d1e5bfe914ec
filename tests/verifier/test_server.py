"""The verifier behind gRPC: the same sessions and drafts over sockets, and what only sockets bring."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from verifier_harness import Coordinator, Drafter, new_session_id

from specla.rpc.channel import from_rpc_error, open_channel
from specla.rpc.errors import (
    AttachRefusedError,
    CapacityError,
    InvalidRequestError,
    PromptTooLongError,
    ServiceUnavailableError,
    TopologyRefusedError,
    UnsupportedModelError,
)
from specla.rpc.remote_verifier import RemoteVerifier
from specla.rpc.serving import GrpcServer
from specla.rpc.settings import ServingConfig
from specla.rpc.status import from_status
from specla.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specla.v1.verifier_pb2 import SessionCommand
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.publish import MAX_ITEMS
from specla.verifier_service.server import SERVICE, VerifierServer, reachable_address, serve_verifier

PROMPT = [72, 101, 108, 108, 111]
Result = TypeVar("Result")


@pytest.fixture
async def server(tiny_target: Path, device: str) -> AsyncIterator[VerifierServer]:
    config = VerifierConfig(target=tiny_target, device=device, threads=1, max_sessions=4, drain_s=0.5)  # type: ignore[arg-type]
    server = await serve_verifier(config)
    yield server
    await server.stop()


@pytest.fixture
async def verifier(server: VerifierServer) -> AsyncIterator[RemoteVerifier]:
    verifier = await RemoteVerifier.connect(server.address)
    yield verifier
    await verifier.close()


@pytest.fixture
async def stub(server: VerifierServer) -> AsyncIterator[verifier_pb2_grpc.VerifierServiceStub]:
    async with open_channel(server.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


async def apart(work: Callable[[], Result]) -> Result:
    """The harness blocks: keep it off the loop."""
    return await asyncio.to_thread(work)


async def test_a_text_and_a_draft_over_sockets(server: VerifierServer, verifier: RemoteVerifier) -> None:
    def work() -> None:
        coordinator, drafter = Coordinator(verifier), Drafter(verifier)
        text = coordinator.finish(coordinator.start(PROMPT))
        session = coordinator.start(PROMPT, credit=0)
        news = drafter.attach(session, coordinator.attach_token(session))
        assert list(news.tokens) == PROMPT
        issued = coordinator.events(session, "attach_issued")[0].attach_issued
        assert issued.verifier_address == server.address
        assert issued.verifier_id == verifier.target().verifier_id
        seq = drafter.chain(session, PROMPT, text[:3])
        coordinator.command(session, credit=verifier_pb2.Credit(up_to_len=1000))
        verdict = drafter.answer(seq).verdict
        assert verdict.outcome == verifier_pb2.OUTCOME_VERIFIED
        accepted = list(verdict.accepted_nodes)  # how many were worth verifying is for this machine to say
        assert accepted == [0, 1, 2][: len(accepted)]
        assert list(verdict.tokens)[: len(accepted) + 1] == text[: len(accepted) + 1]
        assert coordinator.finish(session) == text
        assert drafter.closed(session) == verifier_pb2.CLOSED_REASON_FINISHED

    await apart(work)
    assert await verifier.list_sessions() == []


async def test_the_same_text_in_process_and_over_sockets(server: VerifierServer, verifier: RemoteVerifier) -> None:
    def work() -> None:
        near, far = Coordinator(server.scheduler), Coordinator(verifier)
        sampling = common_pb2.Sampling(seed=11)
        assert near.finish(near.start(PROMPT, sampling=sampling)) == far.finish(far.start(PROMPT, sampling=sampling))

    await apart(work)


async def test_broken_items_have_a_status_each_and_the_stream_lives(verifier: RemoteVerifier) -> None:
    def work() -> None:
        coordinator, drafter = Coordinator(verifier), Drafter(verifier)
        unharmed = coordinator.start([1, 2, 3], max_tokens=30, credit=10)
        session = coordinator.start(PROMPT, credit=0)
        drafter.attach(session, coordinator.attach_token(session))
        error = coordinator.failure(coordinator.start([999]))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "prompt_ids[0]"
        cyclic = verifier_pb2.Topology(base_len=5, root_token=111, tokens=[1], parents=[0], log_probs=[-1])
        assert isinstance(
            from_status(drafter.answer(drafter.item(session, topology=cyclic)).error), TopologyRefusedError
        )
        unattached = drafter.item(unharmed, topology=cyclic)
        assert isinstance(from_status(drafter.answer(unattached).error), AttachRefusedError)
        stranger = drafter.item(new_session_id(), topology=cyclic)
        assert from_status(drafter.answer(stranger).error).code == "NOT_FOUND"
        coordinator.command(unharmed, credit=verifier_pb2.Credit(up_to_len=100))
        assert len(coordinator.finish(unharmed)) == 30

    await apart(work)


async def test_a_full_verifier_says_when_to_come_again(verifier: RemoteVerifier) -> None:
    def work() -> None:
        coordinator = Coordinator(verifier)
        held = [coordinator.start(PROMPT, credit=0) for _ in range(4)]
        for session in held:
            coordinator.wait_for(session, "prefilled")
        refused = coordinator.failure(coordinator.start(PROMPT))
        assert isinstance(refused, CapacityError)
        assert refused.code == "RESOURCE_EXHAUSTED"
        assert refused.retry_after_s > 0
        coordinator.command(held[0], cancel=verifier_pb2.Cancel())
        coordinator.wait_for(held[0], "failed")
        assert len(coordinator.finish(coordinator.start(PROMPT))) == 16

    await apart(work)


async def test_the_loss_of_a_coordinators_stream_frees_its_sessions(
    server: VerifierServer, verifier: RemoteVerifier
) -> None:
    other = await RemoteVerifier.connect(server.address)
    coordinator = Coordinator(other)
    await apart(lambda: coordinator.wait_for(coordinator.start(PROMPT, max_tokens=3000), "committed"))
    assert len(await verifier.list_sessions()) == 1
    await other.close()
    for _ in range(100):
        if not await verifier.list_sessions():
            break
        await asyncio.sleep(0.02)
    assert await verifier.list_sessions() == []


async def test_the_loss_of_a_drafters_stream_detaches_it(server: VerifierServer, verifier: RemoteVerifier) -> None:
    other = await RemoteVerifier.connect(server.address)
    coordinator, drafter = Coordinator(verifier), Drafter(other)
    session = coordinator.start(PROMPT, credit=0)
    token = await apart(lambda: coordinator.attach_token(session))
    await apart(lambda: drafter.attach(session, token))
    await other.close()
    changes = await apart(lambda: coordinator.wait(lambda: coordinator.events(session, "drafter_changed")[1:]))
    assert changes[0].drafter_changed.reason == verifier_pb2.CLOSED_REASON_LOST
    assert not (await verifier.list_sessions())[0].drafter_attached


async def test_a_client_that_sends_all_and_then_only_reads(stub: verifier_pb2_grpc.VerifierServiceStub) -> None:
    """As a command-line client does: requests, end of requests, then events until the texts have ended."""
    session = new_session_id()
    start = verifier_pb2.Start(
        prompt_ids=PROMPT,
        sampling=common_pb2.Sampling(temperature=0),
        stopping=common_pb2.Stopping(max_tokens=5, ignore_eos=True),
    )
    commands = [
        SessionCommand(session_id=session, start=start),
        SessionCommand(session_id=session, credit=verifier_pb2.Credit(up_to_len=100)),
        SessionCommand(session_id=b"short", cancel=verifier_pb2.Cancel()),
    ]

    async def requests() -> AsyncIterator[verifier_pb2.SessionsRequest]:
        yield verifier_pb2.SessionsRequest(commands=commands)

    events = [event async for response in stub.Sessions(requests()) for event in response.events]
    tokens = [token for event in events for token in event.committed.tokens]
    assert len(tokens) == 5
    assert [event.WhichOneof("event") for event in events if event.session_id == session][-1] == "finished"
    assert [event.WhichOneof("event") for event in events if event.session_id == b"short"] == ["failed"]


async def test_a_drafter_that_sends_all_and_then_only_reads(stub: verifier_pb2_grpc.VerifierServiceStub) -> None:
    async def requests() -> AsyncIterator[verifier_pb2.VerifyRequest]:
        item = verifier_pb2.DraftItem(session_id=new_session_id(), seq=1, detach=verifier_pb2.Detach())
        yield verifier_pb2.VerifyRequest(items=[item])

    items = [item async for response in stub.Verify(requests()) for item in response.items]
    assert [from_status(item.error).code for item in items] == ["NOT_FOUND"]


@pytest.mark.parametrize("method", ["Sessions", "Verify"])
async def test_bytes_that_are_no_message_end_the_stream_with_a_status(server: VerifierServer, method: str) -> None:
    async with open_channel(server.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{method}")()
        await call.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert error.field == "request"


async def test_a_message_of_too_many_items_ends_its_stream(stub: verifier_pb2_grpc.VerifierServiceStub) -> None:
    call = stub.Verify()
    await call.write(verifier_pb2.VerifyRequest(items=[verifier_pb2.DraftItem()] * (MAX_ITEMS + 1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 10)
    assert isinstance(from_rpc_error(caught.value), InvalidRequestError)


async def test_a_prompt_beyond_grpcs_usual_limit_has_its_own_error(verifier: RemoteVerifier) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start([300] * 2_500_000)  # 5 MiB
    assert isinstance(await apart(lambda: coordinator.failure(session)), PromptTooLongError)
    assert len(await apart(lambda: coordinator.finish(coordinator.start(PROMPT)))) == 16


async def test_a_client_that_reads_nothing_holds_nobody_up(
    stub: verifier_pb2_grpc.VerifierServiceStub, verifier: RemoteVerifier
) -> None:
    session = new_session_id()
    start = verifier_pb2.Start(
        prompt_ids=PROMPT,
        sampling=common_pb2.Sampling(temperature=0, top_logprobs=64),
        stopping=common_pb2.Stopping(max_tokens=4000, ignore_eos=True),
    )
    call = stub.Sessions()
    await call.write(
        verifier_pb2.SessionsRequest(
            commands=[
                SessionCommand(session_id=session, start=start),
                SessionCommand(session_id=session, credit=verifier_pb2.Credit(up_to_len=4000)),
            ]
        )
    )
    coordinator = Coordinator(verifier)
    assert len(await apart(lambda: coordinator.finish(coordinator.start(PROMPT, max_tokens=100)))) == 100
    call.cancel()
    for _ in range(100):
        if not await verifier.list_sessions():
            break
        await asyncio.sleep(0.02)
    assert await verifier.list_sessions() == []


async def test_unary_calls_and_their_errors(
    stub: verifier_pb2_grpc.VerifierServiceStub, server: VerifierServer
) -> None:
    target = await stub.GetTarget(verifier_pb2.GetTargetRequest(), timeout=5)
    assert target.advertised_address == server.address
    assert target.limits.max_message_bytes == 64 << 20
    request = verifier_pb2.ReadFeaturesRequest(session_id=new_session_id(), to_position=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [one async for one in stub.ReadFeatures(request, timeout=5)]
    assert from_rpc_error(caught.value).code == "NOT_FOUND"


async def test_features_over_sockets(verifier: RemoteVerifier) -> None:
    def work() -> None:
        coordinator, drafter = Coordinator(verifier), Drafter(verifier)
        keep = common_pb2.FeatureSpec(layers=[-1], window=8)
        session = coordinator.start(PROMPT, credit=0, keep=keep)
        coordinator.wait_for(session, "prefilled")
        token = coordinator.attach_token(session)
        news = drafter.attach(session, token, want=keep)
        request = verifier_pb2.ReadFeaturesRequest(session_id=session, attach_token=token, to_position=4)
        (slab,) = verifier.read_features(request)
        assert slab == news.features

    await apart(work)


async def test_a_stop_ends_streams_with_unavailable(server: VerifierServer, verifier: RemoteVerifier) -> None:
    coordinator = Coordinator(verifier)
    session = coordinator.start(PROMPT, max_tokens=4000)
    await apart(lambda: coordinator.wait_for(session, "committed"))
    await server.stop()
    assert isinstance(await apart(lambda: coordinator.failure(session)), ServiceUnavailableError)
    await apart(lambda: coordinator.wait(lambda: coordinator.link.lost))
    assert isinstance(coordinator.link.lost, ServiceUnavailableError)
    assert not server.scheduler.health()


async def test_a_verifier_that_came_back_is_another_one(tiny_target: Path) -> None:
    config = VerifierConfig(target=tiny_target, threads=1, max_sessions=2, drain_s=0)
    first = await serve_verifier(config)
    verifier = await RemoteVerifier.connect(first.address)
    before = verifier.target().verifier_id
    coordinator = Coordinator(verifier)
    await apart(lambda: coordinator.finish(coordinator.start(PROMPT)))
    await first.stop()
    await apart(lambda: coordinator.wait(lambda: coordinator.link.lost))
    second = await serve_verifier(VerifierConfig(target=tiny_target, threads=1, max_sessions=2, port=first.port))
    again = Coordinator(verifier)
    assert len(await apart(lambda: again.finish(again.start(PROMPT)))) == 16
    assert verifier.target().verifier_id == second.scheduler.verifier_id != before
    await verifier.close()
    await second.stop()


async def test_nobody_at_home() -> None:
    with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1"):
        await RemoteVerifier.connect("127.0.0.1:1", deadline_s=0.2)


async def test_a_busy_port_leaves_nothing_behind(server: VerifierServer, tiny_target: Path) -> None:
    with pytest.raises(ServiceUnavailableError, match=str(server.port)):
        await serve_verifier(VerifierConfig(target=tiny_target, threads=1, max_sessions=1, port=server.port))


async def test_a_busy_port_is_known_before_the_target_is_loaded(server: VerifierServer, tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailableError, match=str(server.port)):
        await serve_verifier(VerifierConfig(target=tmp_path, port=server.port))


@pytest.mark.parametrize("files", [(), ("config.json", "tokenizer.json", "model.safetensors")])
async def test_a_target_that_cannot_be_loaded_lets_the_port_go(tmp_path: Path, files: tuple[str, ...]) -> None:
    """A folder that holds none, and one whose files are no target."""
    for name in files:
        (tmp_path / name).write_text("{}")
    free = GrpcServer(ServingConfig(), [], lambda server: None)
    free.bind()
    await free.stop(grace_s=0)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError if files else InvalidRequestError):
            await serve_verifier(VerifierConfig(target=tmp_path, port=free.port))


@pytest.mark.parametrize(("bound", "same"), [("127.0.0.1:5", True), ("0.0.0.0:5", False), ("[::]:5", False)])
def test_a_wildcard_is_no_address_for_others(bound: str, same: bool) -> None:
    reachable = reachable_address(bound)
    assert (reachable == bound) is same
    assert reachable.endswith(":5")


def test_settings_are_checked(tiny_target: Path) -> None:
    broken: list[dict[str, Any]] = [
        {"max_draft_wait_s": float("nan")},
        {"idle_timeout_s": -1.0},
        {"max_batch_rows": 0},
        {"host": "0.0.0.0"},
    ]
    for settings in broken:
        with pytest.raises(InvalidRequestError) as caught:
            VerifierConfig(target=tiny_target, **settings)
        assert caught.value.field == next(iter(settings))
