"""Verifier and drafters in this process, joined without sockets: an engine in its thread, drafters that it wakes."""

import asyncio
from collections.abc import Sequence

from specla.client.coordinator.coordinator import Coordinator
from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafters.make import make_drafter
from specla.drafter_service.local import LocalDrafter
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.scheduler import Scheduler


class InProcess:
    """The parts. Loading the target blocks: not for an event loop's thread.

    Attributes:
        scheduler: the verifier, a VerifierPort.
        drafters: joined to it, the preferred one first.
    """

    def __init__(self, config: VerifierConfig, drafters: Sequence[DrafterConfig]) -> None:
        """Load the target, start the engine's thread.

        Raises:
            InvalidRequestError: a setting.
            UnsupportedModelError: a checkpoint that cannot be run.
        """
        made = [make_drafter(drafter) for drafter in drafters]  # before the target: refuses sooner
        self.scheduler = Scheduler.load(config)
        self.drafters = [
            LocalDrafter(drafter, settings, self.scheduler) for drafter, settings in zip(made, drafters, strict=True)
        ]

    def join(self, coordinator: Coordinator) -> None:
        """Give a coordinator these parts; on its event loop.

        Raises:
            UnsupportedModelError: the coordinator's tokenizer is not the target's.
        """
        coordinator.add_verifier(self.scheduler)
        for drafter in self.drafters:
            coordinator.add_drafter(drafter)

    def close(self) -> None:
        """Detach the drafters and end the engine's thread; sessions that still run are failed. Blocks."""
        for drafter in self.drafters:
            drafter.close()
        self.scheduler.stop()


async def load(config: VerifierConfig, drafters: Sequence[DrafterConfig]) -> InProcess:
    """The same for an event loop: loads in another thread.

    Raises:
        SpeclaError: as InProcess.
    """
    return await asyncio.to_thread(InProcess, config, drafters)
