"""What is made ready before an engine serves: counted in the log, and refused where a GPU has no room for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from generations import engine_of
from structlog.testing import capture_logs

from specla.kernels.topology import Topology
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.cpu_backend import CpuBackend
from specla.verifier_service.engine import Engine
from specla.verifier_service.memory import MIB
from specla.verifier_service.preparing import pass_times_of, prepare
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.gated_deltanet import TargetWeights


class Prepares(CpuBackend):
    """A backend with passes to make ready, and room for some of them."""

    fault: Exception = torch.OutOfMemoryError("CUDA out of memory")

    def __init__(self, weights: TargetWeights, store: StateStore, room: int) -> None:
        super().__init__(weights, store)
        self.made, self.room = [], room

    def usual_chunks(self) -> list[int]:
        return [64]

    def prepare_chunk(self, tokens: int) -> None:
        self.made.append(tokens)

    def usual_batches(self) -> list[list[Topology]]:
        return [[Topology.root_only()] * sessions for sessions in (1, 2, 4)]

    def prepare(self, topologies: Sequence[Topology]) -> None:
        if len(self.made) == self.room + 1:
            raise self.fault
        self.made.append(len(topologies))


@pytest.fixture
def engine_with(tiny_target: Path) -> Callable[[int], tuple[Engine, Prepares]]:
    plain = engine_of(tiny_target)

    def make(room: int) -> tuple[Engine, Prepares]:
        weights = cast(TargetWeights, plain.target.weights)
        backend = Prepares(weights, StateStore(weights.config, 2), room)
        return Engine(plain.config, backend, plain.target), backend

    return make


def test_usual_passes_are_made_and_said(engine_with: Callable[[int], tuple[Engine, Prepares]]) -> None:
    engine, backend = engine_with(99)
    with capture_logs() as logs:
        prepare(engine)
    assert backend.made == [64, 1, 2, 4]
    assert [(line["event"], line["passes"]) for line in logs] == [("passes_ready", 4)]


def test_memory_beyond_what_was_counted_is_said(engine_with: Callable[[int], tuple[Engine, Prepares]]) -> None:
    class Wrong:
        def slots(self, max_sessions: int, max_rows: int, limit_mib: int) -> int:
            return max_sessions

        def beyond(self, sessions: int, max_rows: int) -> int:
            return 3 * MIB + 1

    engine, _ = engine_with(99)
    engine.memory = Wrong()
    with capture_logs() as logs:
        prepare(engine)
    assert [(line["event"], line.get("mib")) for line in logs] == [("passes_ready", None), ("memory_beyond_account", 4)]


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_no_room_for_them_is_said(engine_with: Callable[[int], tuple[Engine, Prepares]], fault: Exception) -> None:
    engine, backend = engine_with(2)
    backend.fault = fault
    with pytest.raises(InvalidRequestError, match="no room for more than 3 of") as caught:
        pass_times_of(engine, lambda: 0.0)
    assert caught.value.field == "memory_mib"
    assert "smaller memory_mib" in caught.value.hint


def test_another_fault_is_not_taken_for_a_lack_of_room(engine_with: Callable[[int], tuple[Engine, Prepares]]) -> None:
    engine, backend = engine_with(0)
    backend.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        prepare(engine)


def test_a_cpu_has_nothing_to_make(tiny_target: Path) -> None:
    with capture_logs() as logs:
        prepare(engine_of(tiny_target))
    assert not logs
