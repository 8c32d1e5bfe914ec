"""Generation for callers without an event loop: one loop in a thread of its own, and iterators over it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar, Unpack

from specla.client.options import DEFAULT_TIMEOUT_S, Options, build_request
from specla.client.results import Collector, Event, GenerateResult
from specla.v1 import generation_pb2

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and its thread. Harmless twice."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


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
        collector = Collector()
        for event in self.stream(prompt, **options):
            collector.add(event)
        return collector.result()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Event]:
        """The same as it comes: Started, Deltas, Finished. Closing the iterator cancels the generation."""
        timeout = options.get("timeout", DEFAULT_TIMEOUT_S)
        return self._iterate(self._events(build_request(prompt, options), timeout))

    def _events(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        raise NotImplementedError

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        pump = Pump(events)
        try:
            while (event := self._thread.run(pump.next())) is not None:
                yield event
        finally:
            if not self._thread.loop.is_closed():
                self._thread.run(pump.close())
