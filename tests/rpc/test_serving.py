"""The server shell: health, reflection, limits, errors, an orderly stop."""

import asyncio
import gc
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specla.rpc.channel import ClientTls, from_rpc_error, open_channel
from specla.rpc.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ServiceUnavailableError,
    SpeclaError,
    UnknownSessionError,
)
from specla.rpc.serving import GrpcServer
from specla.rpc.settings import MAX_MESSAGE_BYTES, ServingConfig, check_address, is_loopback

Context = grpc.aio.ServicerContext[Any, Any]
SECRET = "the prompt of somebody"


class Service:
    """Four methods, one of each kind of behaviour that the shell must handle."""

    def __init__(self) -> None:
        self.cleaned = 0
        self.hanging = 0
        self.flooded = 0
        self.has_cleaned = asyncio.Event()
        self.live = True

    async def echo(self, request: StringValue, context: Context) -> StringValue:
        if request.value == "unknown":
            raise UnknownSessionError("no such session", hint="Open it")
        if request.value == "fault":
            raise ValueError(SECRET)
        return request

    async def count(self, request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        yield StringValue(value="1")
        if request.value == "fault":
            raise ValueError(SECRET)
        if request.value == "full":
            raise CapacityError("full", retry_after_s=2.0)
        yield StringValue(value="2")

    async def hang(self, request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        try:
            yield StringValue(value="on")
            self.hanging += 1
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            self.cleaned += 1
            self.has_cleaned.set()

    async def flood(self, request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        try:
            while True:
                self.flooded += 1
                yield StringValue(value="x" * (1 << 20))
        finally:
            self.has_cleaned.set()

    def register(self, server: grpc.aio.Server) -> None:
        coders = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": StringValue.SerializeToString,
        }
        handlers = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo, **coders),
            "Count": grpc.unary_stream_rpc_method_handler(self.count, **coders),
            "Hang": grpc.unary_stream_rpc_method_handler(self.hang, **coders),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood, **coders),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def server(service: Service) -> AsyncIterator[GrpcServer]:
    config = ServingConfig(drain_s=0.2, max_concurrent_calls=2)
    server = GrpcServer(config, ["test.Test"], service.register, lambda: service.live, resume_hint="Go elsewhere")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(server.address) as channel:
        yield channel


def unary(channel: grpc.aio.Channel, method: str = "Echo") -> Any:
    return channel.unary_unary(
        f"/test.Test/{method}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )


def stream(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_stream(
        f"/test.Test/{method}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )


async def failure(call: Any) -> SpeclaError:
    async def drain() -> None:
        if hasattr(call, "__aiter__"):
            [one async for one in call]
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain()
    return from_rpc_error(caught.value)


async def test_calls_pass_and_our_errors_keep_their_details(channel: grpc.aio.Channel) -> None:
    assert (await unary(channel)(StringValue(value="hello"))).value == "hello"
    assert [one.value async for one in stream(channel, "Count")(StringValue())] == ["1", "2"]
    error = await failure(unary(channel)(StringValue(value="unknown")))
    assert isinstance(error, UnknownSessionError)
    assert error.hint == "Open it"
    full = await failure(stream(channel, "Count")(StringValue(value="full")))
    assert isinstance(full, CapacityError)
    assert full.retry_after_s == 2.0


@pytest.mark.parametrize("method", ["Echo", "Count"])
async def test_a_fault_reaches_nobody_word_for_word(
    channel: grpc.aio.Channel, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = unary(channel) if method == "Echo" else stream(channel, method)
    error = await failure(call(StringValue(value="fault")))
    assert isinstance(error, InternalError)
    assert SECRET not in str(error)
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert error.metadata["error_id"] in printed.out + printed.err


@pytest.mark.parametrize(("method", "kind"), [("Echo", "unary_unary"), ("Count", "unary_stream")])
async def test_bytes_that_are_no_message_are_an_invalid_request(
    channel: grpc.aio.Channel, method: str, kind: str
) -> None:
    error = await failure(getattr(channel, kind)(f"/test.Test/{method}")(b"\xff\xff"))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "request"


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    assert (await failure(unary(channel, "Nothing")(StringValue()))).code == "UNIMPLEMENTED"


async def test_too_many_calls_are_told_when_to_come_again(
    channel: grpc.aio.Channel, server: GrpcServer, service: Service
) -> None:
    hanging = [stream(channel, "Hang")(StringValue()) for _ in range(2)]
    for call in hanging:
        await call.read()
    for _ in range(3):
        refused = await failure(unary(channel)(StringValue()))
        assert isinstance(refused, CapacityError)
        assert refused.retry_after_s == 1.0
    stub = health_pb2_grpc.HealthStub(channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    hanging[0].cancel()
    await service.has_cleaned.wait()
    await asyncio.sleep(0.01)
    assert (await unary(channel)(StringValue(value="again"))).value == "again"


async def test_a_call_that_ends_in_the_middle_of_a_write_is_cleaned_up_at_once(
    channel: grpc.aio.Channel, service: Service
) -> None:
    flood = stream(channel, "Flood")(StringValue())
    await flood.read()
    sent = 0
    while sent < service.flooded:  # until nobody takes more: the handler hangs in a write
        sent = service.flooded
        await asyncio.sleep(0.1)
    gc.collect()
    gc.disable()
    try:
        flood.cancel()
        await asyncio.wait_for(service.has_cleaned.wait(), 5)
    finally:
        gc.enable()


async def test_a_stop_ends_its_calls_with_our_error_and_waits_for_them(
    channel: grpc.aio.Channel, server: GrpcServer, service: Service
) -> None:
    ends = [asyncio.create_task(failure(stream(channel, "Hang")(StringValue()))) for _ in range(2)]
    while service.hanging < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await server.stop()
    assert service.cleaned == 2
    for error in await asyncio.gather(*ends):
        assert isinstance(error, ServiceUnavailableError)
        assert (error.message, error.hint) == ("the service stopped before the call had ended", "Go elsewhere")
    await server.stop()
    assert isinstance(await failure(unary(channel)(StringValue())), ServiceUnavailableError)


async def test_a_stop_does_not_wait_for_a_reader_that_takes_nothing(
    channel: grpc.aio.Channel, server: GrpcServer, service: Service
) -> None:
    flood = stream(channel, "Flood")(StringValue())
    await flood.read()
    await asyncio.wait_for(server.stop(), 5)
    assert service.has_cleaned.is_set()


async def test_health_is_the_state_at_the_moment_of_asking(
    channel: grpc.aio.Channel, server: GrpcServer, service: Service
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="test.Test"))
    assert (await watch.read()).status == serving
    service.live = False
    for name in ("", "test.Test"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == not_serving
    assert (await watch.read()).status == not_serving
    watch.cancel()
    assert (await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))).code == "NOT_FOUND"


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    call.cancel()
    names = [one.name for one in answer.list_services_response.service]
    assert "grpc.health.v1.Health" in names
    assert "test.Test" in names


async def test_messages_of_more_than_4_mib_pass(channel: grpc.aio.Channel) -> None:
    large = StringValue(value="x" * (9 << 20))
    assert len((await unary(channel)(large)).value) == 9 << 20
    assert MAX_MESSAGE_BYTES == 64 << 20


async def test_messages_beyond_the_limit_are_refused(channel: grpc.aio.Channel) -> None:
    error = await failure(unary(channel)(StringValue(value="x" * (MAX_MESSAGE_BYTES + 1))))
    assert error.code == "RESOURCE_EXHAUSTED"


async def test_a_busy_port_is_refused_in_our_words_alone(
    server: GrpcServer, service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    second = GrpcServer(ServingConfig(port=server.port), ["test.Test"], service.register)
    with pytest.raises(ServiceUnavailableError, match=f"127.0.0.1:{server.port}: Address already in use") as caught:
        await second.start()
    assert "Another program has the port" in caught.value.hint
    assert capfd.readouterr().err == "", "gRPC has words of its own"


@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]"])
async def test_a_host_of_another_machine_is_refused(
    host: str, service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ServiceUnavailableError, match=f"cannot listen on {re.escape(host)}:0: ") as caught:
        GrpcServer(ServingConfig(host=host, insecure=True), ["test.Test"], service.register).bind()
    assert "this machine" in caught.value.hint
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("taken", [0, 1])
async def test_a_name_one_of_whose_addresses_has_the_port_taken_is_refused(
    taken: int, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = GrpcServer(ServingConfig(port=0), ["test.Test"], service.register)
    first.bind()
    hosts = ["127.0.0.2", "127.0.0.2"]
    hosts[taken] = "127.0.0.1"
    places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, first.port)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    second = GrpcServer(ServingConfig(host="localhost", port=first.port), ["test.Test"], service.register)
    with pytest.raises(ServiceUnavailableError, match="Address already in use"):
        second.bind()
    await first.stop(grace_s=0)


async def test_a_name_with_an_address_that_is_not_there_is_served_at_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    server = GrpcServer(ServingConfig(host="localhost"), ["test.Test"], service.register)
    server.bind()
    assert server.port
    await server.stop(grace_s=0)


@pytest.mark.parametrize(
    ("host", "says"), [("a..b", "is no host's name"), ("a" * 300, "is no host's name"), ("127.1", "host in full")]
)
async def test_a_host_that_cannot_be_read_is_refused(host: str, says: str, service: Service) -> None:
    with pytest.raises(ServiceUnavailableError, match=says):
        GrpcServer(ServingConfig(host=host, insecure=True), ["test.Test"], service.register).bind()


async def test_a_port_that_was_only_bound_is_let_go(service: Service) -> None:
    bound = GrpcServer(ServingConfig(), ["test.Test"], service.register)
    bound.bind()
    await bound.stop(grace_s=0)
    again = GrpcServer(ServingConfig(port=bound.port), ["test.Test"], service.register)
    await again.start()
    await again.stop(grace_s=0)
    await GrpcServer(ServingConfig(), ["test.Test"], service.register).stop()


async def test_a_call_that_is_not_answered_in_time(channel: grpc.aio.Channel) -> None:
    assert isinstance(await failure(stream(channel, "Hang")(StringValue(), timeout=0.1)), DeadlineError)


async def test_nobody_at_home() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        assert isinstance(await failure(unary(channel)(StringValue(), timeout=2)), ServiceUnavailableError)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host": "0.0.0.0"}, "host"),
        ({"port": 70000}, "port"),
        ({"tls_cert": Path("c.pem")}, "tls_cert"),
        ({"tls_client_ca": Path("ca.pem")}, "tls_client_ca"),
        ({"max_concurrent_calls": 0}, "max_concurrent_calls"),
        ({"drain_s": float("nan")}, "drain_s"),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServingConfig(**settings)
    assert caught.value.field == field
    assert caught.value.hint


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":50051", "host:99999", "host:0", "host:-1", "host:5_0", "h:٣"]
)
def test_what_is_not_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_address("server", address)
    assert caught.value.field == "server"


def test_hosts_of_all_kinds_are_taken() -> None:
    for address in ("localhost:50051", "127.0.0.1:1", "[::1]:65535", "verifier-0.verifiers:50061"):
        check_address("server", address)


def test_beyond_loopback_with_tls_or_on_ones_own_word() -> None:
    assert ServingConfig(host="0.0.0.0", insecure=True).host == "0.0.0.0"
    assert ServingConfig(host="0.0.0.0", tls_cert=Path("c.pem"), tls_key=Path("k.pem")).tls_key == Path("k.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_tls(service: Service, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    server = GrpcServer(ServingConfig(tls_cert=cert, tls_key=key, drain_s=0), ["test.Test"], service.register)
    await server.start()
    try:
        async with open_channel(server.address, ClientTls(root_ca=cert)) as channel:
            assert (await unary(channel)(StringValue(value="hello"), timeout=5)).value == "hello"
        async with open_channel(server.address) as channel:
            assert isinstance(await failure(unary(channel)(StringValue(), timeout=2)), ServiceUnavailableError)
    finally:
        await server.stop()


async def test_a_stop_of_an_idle_server_is_quick(server: GrpcServer) -> None:
    started = time.monotonic()
    await server.stop()
    assert time.monotonic() - started < 1.0
