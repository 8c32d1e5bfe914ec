"""A generation during which something happens, and waiting for what happens."""

import time
from collections.abc import Callable

from specla.client import Delta, GenerateResult
from specla.client.blocking import BlockingGenerator
from specla.client.results import Collector


def generate_and(
    client: BlockingGenerator, prompt: str, event_after: int, happens: Callable[[], None], **options: object
) -> GenerateResult:
    """All of a generation; `happens` is called once so many tokens have come."""
    collector, tokens = Collector(), 0
    for event in client.stream(prompt, **options):  # type: ignore[arg-type]
        collector.add(event)
        if isinstance(event, Delta):
            if tokens < event_after <= tokens + len(event.token_ids):
                happens()
            tokens += len(event.token_ids)
    assert tokens > event_after
    return collector.result()


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)
