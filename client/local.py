"""Local: generation in this process, no server and no sockets. Needs the `verifier` extra (torch)."""

import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specla.client.blocking import BlockingGenerator, LoopThread
from specla.client.config import CoordinatorConfig
from specla.client.coordinator.coordinator import Coordinator
from specla.client.default_target import default_target
from specla.client.in_process import InProcess
from specla.client.logs import quiet_unless_configured
from specla.client.results import Event, ModelInfo, event_of, model_info
from specla.client.tokenizer import Tokenizer
from specla.drafter_service.config import DEFAULTS, DrafterConfig
from specla.rpc.settings import check_distinct
from specla.v1 import generation_pb2
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.targets.config import check_folder


class Local(BlockingGenerator):
    """A target and drafters in this process, with the interface of `Client`. Close it, or use `with`."""

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        drafters: Sequence[str | DrafterConfig] = DEFAULTS,
        device: str | None = None,
        numerics: str | None = None,
        threads: int | None = None,
        verifier: VerifierConfig | None = None,
    ) -> None:
        """Load the target; takes a second or so for the shipped one.

        Args:
            target: folder of the checkpoint; None: the shipped one.
            drafters: those that requests may choose from, the preferred one first; names, or settings.
            device: "cpu", "cuda", or "auto", which is the CPU.
            numerics: "exact" or "fast".
            threads: threads of one operation; set for the whole process.
            verifier: all settings of the engine; then none of the four above may be given.

        Raises:
            InvalidRequestError: a setting.
            UnsupportedModelError: a checkpoint or tokenizer that cannot be run.
        """
        given: dict[str, Any] = {"target": target, "device": device, "numerics": numerics, "threads": threads}
        given = {name: value for name, value in given.items() if value is not None}
        if verifier is not None and given:
            raise TypeError(f"give `verifier` or {', '.join(given)}, not both")
        settings = [one if isinstance(one, DrafterConfig) else DrafterConfig.of_name(one) for one in drafters]
        check_distinct("drafters", [one.name for one in settings])
        config = verifier or VerifierConfig(**({"target": default_target()} | given))
        check_folder(config.target)
        quiet_unless_configured()
        tokenizer = Tokenizer.load(config.target)
        self._parts = InProcess(config, settings)
        try:
            super().__init__("specla-local")
            self._coordinator = self._thread.run(_join(self._parts, tokenizer))
        except BaseException:  # an interrupt, or a tokenizer that is not the target's
            if hasattr(self, "_thread"):
                self._thread.close()
            self._parts.close()
            raise
        # Also at the interpreter's end: a thread that computes then would abort the process.
        self._shut = weakref.finalize(self, _shut, self._thread, self._coordinator, self._parts)

    @property
    def parts(self) -> InProcess:
        """The verifier and the drafters, for who wants to look inside."""
        return self._parts

    def model(self) -> ModelInfo:
        """What this process can generate with."""
        return model_info(self._coordinator.model())

    def close(self) -> None:
        """Cancel what runs, free the target. Harmless twice."""
        self._shut()

    async def _events(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self._coordinator.generate(request, time_left=timeout_s)) as responses:
            async for response in responses:
                event = event_of(response)
                if event is not None:
                    yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _join(parts: InProcess, tokenizer: Tokenizer) -> Coordinator:
    coordinator = Coordinator([], [], tokenizer, CoordinatorConfig())
    parts.join(coordinator)
    return coordinator


def _shut(thread: LoopThread, coordinator: Coordinator, parts: InProcess) -> None:
    thread.loop.call_soon_threadsafe(coordinator.close)
    thread.close()
    parts.close()
