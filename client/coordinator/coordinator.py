"""The coordinator: knows verifiers, drafters and the tokenizer, and runs each request as a Generation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import structlog

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.drafters import DrafterMember, DrafterPool
from specla.client.coordinator.generation import Generation
from specla.client.coordinator.request import check_request
from specla.client.coordinator.verifiers import VerifierMember, VerifierPool
from specla.client.tokenizer import Tokenizer
from specla.rpc.errors import ServiceUnavailableError, UnsupportedModelError
from specla.rpc.links import DrafterPort, VerifierPort
from specla.v1 import generation_pb2

log = structlog.get_logger(__name__)


class Coordinator:
    """Turns GenerateRequests into text; belongs to the event loop it was made on.

    Knows nothing of gRPC: ports may be in this process or behind sockets.
    """

    def __init__(
        self,
        verifiers: Sequence[VerifierPort],
        drafters: Sequence[DrafterPort],
        tokenizer: Tokenizer,
        config: CoordinatorConfig,
        *,
        on_verifier_lost: Callable[[VerifierPort], None] | None = None,
    ) -> None:
        """`on_verifier_lost` is told of each port whose link ended; connect again and `add_verifier`.

        Raises:
            UnsupportedModelError: a verifier's tokenizer is not this one.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._verifiers = VerifierPool()
        self._drafters = DrafterPool()
        self._on_verifier_lost = on_verifier_lost
        for verifier in verifiers:
            self.add_verifier(verifier)
        for drafter in drafters:
            self.add_drafter(drafter)

    @property
    def ready(self) -> bool:
        """Whether a request could run now."""
        return self._verifiers.choose() is not None

    def add_verifier(self, port: VerifierPort) -> None:
        """From now on sessions may go there.

        Raises:
            UnsupportedModelError: its tokenizer is not this coordinator's.
        """
        target = port.target()
        if target.tokenizer_hash not in ("", self._tokenizer.hash):
            raise UnsupportedModelError(
                f"the verifier runs {target.model} with another tokenizer than this coordinator has",
                hint="Start the coordinator with the tokenizer.json of that model",
            )
        self._verifiers.add(VerifierMember(port, self._lost))
        log.info("verifier connected", address=port.address, model=target.model, numerics_id=target.numerics_id)

    def add_drafter(self, port: DrafterPort, *, rank: int | None = None) -> None:
        """From now on sessions may get it; of a lower rank it is preferred. Default: behind all others."""
        self._drafters.add(DrafterMember(port, self._config.drafter_retry_s), rank)
        log.info("drafter connected", drafter=port.info().name, address=port.address)

    def model(self) -> generation_pb2.GetModelResponse:
        """What requests can get now.

        Raises:
            ServiceUnavailableError: no verifier is connected.
        """
        target = self._some_verifier().target
        return generation_pb2.GetModelResponse(
            model=target.model,
            numerics_id=target.numerics_id,
            vocab_size=target.dims.vocab_size,
            max_prompt_tokens=target.limits.max_prompt_tokens,
            drafters=self._drafters.names(),
        )

    async def generate(
        self, request: generation_pb2.GenerateRequest, *, time_left: float | None = None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One Started, deltas, one Finished. Close the iterator to cancel.

        Args:
            request: checked here.
            time_left: seconds until the caller stops waiting, or None.

        Raises:
            InvalidRequestError: a field holds what it may not.
            CapacityError: all verifiers are full.
            DeadlineError: `time_left` passed.
            NumericsMismatchError: the text was begun under a numerics_id that no verifier has now.
            ServiceUnavailableError: no verifier is left.
            SpeclaError: what else a verifier reports.
        """
        loop = asyncio.get_running_loop()
        deadline = None if time_left is None else loop.time() + time_left
        target = self._some_verifier().target
        checked = await check_request(request, self._tokenizer, target, max_stop_strings=self._config.max_stop_strings)
        drafters = self._drafters.candidates(checked.drafters, target.tokenizer_hash)
        generation = Generation(
            checked, self._tokenizer.pieces, self._verifiers, drafters, self._config, deadline=deadline
        )
        async with aclosing(generation.responses()) as responses:
            async for response in responses:
                yield response

    def close(self) -> None:
        """End the links; what still runs is cancelled."""
        for member in self._verifiers.members:
            member.close()

    def _some_verifier(self) -> VerifierMember:
        member = self._verifiers.choose()
        if member is None:
            raise ServiceUnavailableError("no verifier is connected", hint="Try again when one is")
        return member

    def _lost(self, member: VerifierMember) -> None:
        if member not in self._verifiers.members:
            return
        self._verifiers.remove(member)
        log.warning("verifier gone", address=member.port.address, model=member.target.model, why=str(member.lost))
        if self._on_verifier_lost is not None:
            self._on_verifier_lost(member.port)
