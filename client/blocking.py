"""Generation for callers without an event loop: one loop in a thread of its own, and iterators over it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar, Unpack

from specla.client.options import Options, build_request, timeout_of
from specla.client.results import Collector, Event, GenerateResult
from specla.rpc.errors import SessionCancelledError
from specla.v1 import generation_pb2

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = False
        self._submitting = threading.Lock()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt here cancels it there.

        Raises:
            SessionCancelledError: the thread was closed meanwhile.
        """
        with self._submitting:
            if self._closing:
                work.close()
                raise SessionCancelledError("this client is closed", hint="Make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except CancelledError:
            raise SessionCancelledError("this client was closed", hint="Close it when its work is done") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs there, stop the loop and its thread. Harmless twice."""
        with self._submitting:  # what was submitted before is cancelled, nothing comes after
            if self._closing:
                return
            self._closing = True
            last = asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop)
        last.result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()  # streams that nobody is reading now


class Pump(Generic[T]):
    """An async generator that may be closed while its next item is awaited."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._step: asyncio.Task[T | None] | None = None

    async def next(self) -> T | None:
        """The next item, or None at the end."""
        self._step = asyncio.ensure_future(anext(self._items, None))
        return await self._step

    async def close(self) -> None:
        """Cancel what is awaited and run the generator's `finally`."""
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._items.aclose()


class BlockingGenerator:
    """`generate` and `stream` over `_events`, which a subclass gives. Usable from several threads at once."""

    def __init__(self, name: str) -> None:
        self._thread = LoopThread(name)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> GenerateResult:
        """Generate a completion of a text, or of token ids, and wait for all of it.

        Args:
            prompt: text, or token ids.
            options: see `Options`.

        Raises:
            SpeclaError: what went wrong, and how to mend it; its class says what kind.
        """
        timeout = timeout_of(options)
        return self._thread.run(_collect(self._events(build_request(prompt, options), timeout)))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Event]:
        """The same as it comes: Started, Deltas, Finished. Closing the iterator cancels the generation."""
        timeout = timeout_of(options)
        return self._iterate(self._events(build_request(prompt, options), timeout))

    def _events(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        raise NotImplementedError

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        pump = Pump(events)
        try:
            while (event := self._thread.run(pump.next())) is not None:
                yield event
        finally:
            with suppress(SessionCancelledError):  # the client is closed, and the generator with it
                self._thread.run(pump.close())


async def _collect(events: AsyncGenerator[Event, None]) -> GenerateResult:
    """All of it on the loop: no hop between threads for each event."""
    collector = Collector()
    async with aclosing(events):
        async for event in events:
            collector.add(event)
    return collector.result()
