"""A coordinator over scripted verifiers and drafters, requests for it, and answers checked for shape."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from scripted_verifier import ScriptedDrafter, ScriptedVerifier, token_at
from tiny_target import make_tiny_tokenizer

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.client.tokenizer import Tokenizer
from specla.v1 import generation_pb2

TOKENIZER = Tokenizer(make_tiny_tokenizer().to_str().encode())
PROMPT = [5, 6, 7]
SEED = 11


def coordinator(
    verifiers: Sequence[ScriptedVerifier], drafters: Sequence[ScriptedDrafter] = (), **config: object
) -> Coordinator:
    config = {"credit": 64, "attach_timeout_s": 0.05, "drafter_retry_s": 0.05} | config
    return Coordinator(verifiers, drafters, TOKENIZER, CoordinatorConfig(**config))  # type: ignore[arg-type]


def request(max_tokens: int = 40, **fields: object) -> generation_pb2.GenerateRequest:
    fields = {"token_ids": {"ids": PROMPT}, "sampling": {"seed": SEED}} | fields
    fields.setdefault("stopping", {"max_tokens": max_tokens})
    return generation_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


def text_of(count: int, prompt: int = len(PROMPT)) -> list[int]:
    return [token_at(prompt + i, SEED) for i in range(count)]


class Told:
    """A whole answer, checked for shape."""

    def __init__(self, responses: list[generation_pb2.GenerateResponse]) -> None:
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) <= {"delta"}
        self.started = responses[0].started
        self.finished = responses[-1].finished
        self.ids: list[int] = []
        self.text = ""
        first = responses[1].delta.offset
        for response in responses[1:-1]:
            assert response.delta.offset == first + len(self.ids)
            assert len(response.delta.drafted) == len(response.delta.token_ids)
            self.ids += response.delta.token_ids
            self.text += response.delta.text


async def tell(answers: AsyncIterator[generation_pb2.GenerateResponse]) -> Told:
    return Told([response async for response in answers])


def kinds(verifier: ScriptedVerifier) -> list[str | None]:
    return [command.WhichOneof("command") for command in verifier.commands]


async def until(condition: Callable[[], object], seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (the scripted parts have no event to wait for)
            await asyncio.sleep(0.002)
