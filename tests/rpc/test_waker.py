"""Hops from threads to the event loop."""

import asyncio
import sys
import threading

from specla.rpc.waker import SWITCH_INTERVAL_S, LoopWaker, speed_up_hops


async def test_wakes_between_two_turns_are_one() -> None:
    waker, ran = LoopWaker(asyncio.get_running_loop()), []

    def first() -> None:
        ran.append("first")

    def second() -> None:
        ran.append("second")

    for _ in range(5):
        waker.call(first)
        waker.call(second)
    await asyncio.sleep(0)
    assert ran == ["first", "second"]
    waker.call(first)
    await asyncio.sleep(0)
    assert ran == ["first", "second", "first"]


async def test_no_wake_from_another_thread_is_lost() -> None:
    waker = LoopWaker(asyncio.get_running_loop())
    lock, sent, seen, done = threading.Lock(), [0], [0], asyncio.Event()

    def look() -> None:
        with lock:
            seen[0] = sent[0]
        if seen[0] == 2000:
            done.set()

    def work() -> None:
        for _ in range(2000):
            with lock:
                sent[0] += 1
            waker.call(look)

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.wait_for(done.wait(), 10)
    thread.join()
    assert seen[0] == 2000


def test_a_closed_loop_is_no_fault() -> None:
    loop = asyncio.new_event_loop()
    waker = LoopWaker(loop)
    loop.close()
    waker.call(lambda: None)
    waker.call(lambda: None)


def test_hops_are_sped_up() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        speed_up_hops()
        assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6
    finally:
        sys.setswitchinterval(before)
