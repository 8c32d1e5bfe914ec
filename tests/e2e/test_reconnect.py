"""Services that are stopped and started again at the same address, all in this process but over sockets."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from verifier_harness import Coordinator

from specla.client import AsyncClient
from specla.client.config import CoordinatorConfig
from specla.client.server import CoordinatorServer
from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.server import DrafterServer, serve_drafter
from specla.rpc.errors import CapacityError, ServiceUnavailableError
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


async def test_a_full_verifier_sends_sessions_on_and_full_ones_say_when_to_come_again(tiny_target: Path) -> None:
    """With credit and a drafter, as every request comes: what was sent behind a refused Start must not hide why."""
    limits = {"max_sessions": 1, "max_new_tokens": 1_000_000}
    verifiers = [
        await serve_verifier(VerifierConfig(target=tiny_target, threads=1, drain_s=0.0, **limits)) for _ in range(2)
    ]
    drafter = await start_drafter()
    addresses = tuple(verifier.address for verifier in verifiers)
    config = CoordinatorConfig(
        port=0, verifiers=addresses, drafters=(drafter.address,), tokenizer=tiny_target, drain_s=0.0
    )
    coordinator = CoordinatorServer(config)
    await coordinator.start()
    client = AsyncClient(coordinator.address)
    try:
        await until(lambda: len(coordinator._coordinator._verifiers.members) == 2)
        other = Coordinator(verifiers[0].scheduler)  # the coordinator does not know that this one is full
        await asyncio.to_thread(other.wait_for, other.start([5], credit=0), "opened")
        for _ in range(3):
            assert len((await client.generate("Hello", max_tokens=5, **OPTIONS)).token_ids) == 5
        stream = client.stream("Hello", max_tokens=1_000_000, **OPTIONS)
        await anext(stream)
        for _ in range(3):
            with pytest.raises(CapacityError) as caught:
                await client.generate("Hello", max_tokens=5, **OPTIONS)
            assert caught.value.retry_after_s
        await stream.aclose()
    finally:
        await client.close()
        await coordinator.stop()
        await drafter.stop()
        for verifier in verifiers:
            await verifier.stop()
