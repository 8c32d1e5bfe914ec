"""Services that are stopped and started again at the same address, all in this process but over sockets."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from specla.client import AsyncClient
from specla.client.config import CoordinatorConfig
from specla.client.server import CoordinatorServer
from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.server import DrafterServer, serve_drafter
from specla.rpc.errors import ServiceUnavailableError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.server import VerifierServer, serve_verifier

OPTIONS = {"temperature": 1.0, "seed": 4, "ignore_eos": True}


async def until(holds: Callable[[], object], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 (state of another task)
            await asyncio.sleep(0.02)


async def start_verifier(target: Path, port: int = 0) -> VerifierServer:
    # So many tokens that a text cannot end while nobody reads it, whatever the sockets take.
    limits = {"max_sessions": 4, "max_new_tokens": 1_000_000}
    return await serve_verifier(VerifierConfig(target=target, threads=1, port=port, drain_s=0.0, **limits))


async def start_drafter(port: int = 0) -> DrafterServer:
    return await serve_drafter(DrafterConfig(name="random", port=port, drain_s=0.0))


async def test_parts_come_back_and_are_used_again(tiny_target: Path) -> None:
    verifier, drafter = await start_verifier(tiny_target), await start_drafter()
    config = CoordinatorConfig(
        port=0,
        verifiers=(verifier.address,),
        drafters=(drafter.address,),
        tokenizer=tiny_target,
        drafter_retry_s=0.1,
        drain_s=0.0,
    )
    coordinator = CoordinatorServer(config)
    await coordinator.start()
    client = AsyncClient(coordinator.address)
    try:
        want = (await client.generate("Hello", drafter="none", max_tokens=300, **OPTIONS)).token_ids

        # The drafter goes and comes back while a text is generated.
        ids: list[int] = []

        async def attached() -> bool:
            (session,) = await asyncio.wrap_future(verifier.scheduler.ask_sessions())
            return session.drafter_attached

        async def wait_attached(is_so: bool) -> None:
            async with asyncio.timeout(15):
                while await attached() is not is_so:  # noqa: ASYNC110 (state of another thread)
                    await asyncio.sleep(0.01)

        stream = client.stream("Hello", max_tokens=1_000_000, **OPTIONS)
        await anext(stream)
        await wait_attached(True)
        await drafter.stop()
        await wait_attached(False)
        drafter = await start_drafter(drafter.port)
        await wait_attached(True)
        async for event in stream:
            ids += getattr(event, "token_ids", ())
            if len(ids) >= 300:
                break
        await stream.aclose()
        assert tuple(ids[:300]) == want

        # The verifier goes: nothing to generate with; it comes back: all is well.
        await verifier.stop()
        await until(lambda: not coordinator.ready)
        with pytest.raises(ServiceUnavailableError):
            await client.generate("Hello", max_tokens=4, **OPTIONS)
        verifier = await start_verifier(tiny_target, verifier.port)
        await until(lambda: coordinator.ready)
        assert (await client.generate("Hello", max_tokens=300, **OPTIONS)).token_ids == want
    finally:
        await client.close()
        await coordinator.stop()
        await drafter.stop()
        await verifier.stop()
