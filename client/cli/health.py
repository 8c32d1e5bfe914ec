"""`specla health HOST:PORT`: the standard health check, for containers and people."""

from pathlib import Path
from typing import Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specla.client.cli.exits import FAILED
from specla.client.options import timeout_of
from specla.rpc.settings import check_address


def health(address: str, service: str, timeout: float, ca: Path | None) -> None:
    """Print one line: the state.

    Args:
        address: HOST:PORT.
        service: full name; empty asks for the whole server.
        timeout: seconds.
        ca: PEM file of the authority that signed the server's certificate; None: plain text.

    Raises:
        InvalidRequestError: the address or the timeout is none.
        typer.Exit: status 1 unless it is SERVING.
    """
    check_address("address", address)
    timeout_s = timeout_of({"timeout": timeout})
    credentials = grpc.ssl_channel_credentials(ca.read_bytes()) if ca is not None else None
    options = (("grpc.enable_http_proxy", 0),)
    open_channel = (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    )
    with open_channel as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs leave the methods out
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
            state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        except grpc.RpcError as error:
            state = error.code().name
    typer.echo(f"{address} {service or 'server'}: {state}")
    if state != "SERVING":
        raise typer.Exit(FAILED)
