import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from specla.client.blocking import BlockingGenerator, LoopThread
from specla.client.results import Delta, Event, Finished, Started, Usage
from specla.rpc.errors import DeadlineError, SessionCancelledError
from specla.v1 import generation_pb2

USAGE = Usage(prompt_tokens=1, completion_tokens=3, target_passes=3, drafted_tokens=0, accepted_tokens=0)


class Counting(BlockingGenerator):
    """Says a, b, c; or waits for ever after the first."""

    def __init__(self, *, stuck: bool = False) -> None:
        super().__init__("test")
        self.stuck = stuck
        self.ended = threading.Event()
        self.waiting = threading.Event()

    async def _events(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        try:
            yield Started(model="m", numerics_id="n", seed=1, prompt_tokens=1, session_id=b"")
            if timeout_s == 0:
                raise DeadlineError("too late")
            for i, letter in enumerate("abc"):
                if self.stuck and i == 1:
                    self.waiting.set()
                    await asyncio.Event().wait()
                yield Delta(offset=i, token_ids=(i,), drafted=(False,), text=letter, logprobs=())
            yield Finished(finish_reason="length", matched_stop=None, matched_stop_id=None, usage=USAGE)
        finally:
            self.ended.set()

    def close(self) -> None:
        self._thread.close()


def test_stream_and_generate_agree() -> None:
    counting = Counting()
    events = list(counting.stream("x"))
    assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finished]
    result = counting.generate("x")
    assert (result.text, result.token_ids, result.usage, result.seed) == ("abc", (0, 1, 2), USAGE, 1)
    counting.close()


def test_errors_come_through() -> None:
    counting = Counting()
    with pytest.raises(DeadlineError):
        counting.generate("x", timeout=0)
    events = counting.stream("x", timeout=0)
    assert isinstance(next(events), Started)
    with pytest.raises(DeadlineError):
        next(events)
    counting.close()


def test_closing_a_stream_runs_its_finally() -> None:
    counting = Counting(stuck=True)
    events = counting.stream("x")
    next(events)
    assert not counting.ended.is_set()
    events.close()  # type: ignore[attr-defined]
    assert counting.ended.is_set()
    counting.close()


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_closing_the_client_ends_what_other_threads_wait_for(way: str) -> None:
    counting = Counting(stuck=True)
    caught: list[BaseException] = []

    def use() -> None:
        try:
            list(counting.stream("x")) if way == "stream" else counting.generate("x")
        except SessionCancelledError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    assert counting.waiting.wait(5)
    counting.close()
    thread.join(5)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert counting.ended.is_set()


def test_a_closed_client_says_so() -> None:
    counting = Counting()
    counting.close()
    counting.close()
    with pytest.raises(SessionCancelledError, match="closed"):
        counting.generate("x")


def test_an_interrupt_cancels_the_work() -> None:
    thread = LoopThread("test")
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    # `future.result` is interrupted as by a signal: the condition's wait raises.
    future_result = asyncio.run_coroutine_threadsafe
    with pytest.MonkeyPatch.context() as patch:

        def submit(coroutine, loop):  # type: ignore[no-untyped-def]
            future = future_result(coroutine, loop)
            patch.setattr(future, "result", interrupt)
            return future

        patch.setattr(asyncio, "run_coroutine_threadsafe", submit)
        with pytest.raises(KeyboardInterrupt):
            thread.run(work())
    assert cancelled.wait(5)
    thread.close()
