"""What sessions take on a GPU, measured in a process of its own: nothing that others have loaded is there already."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from specla.benchmarks.target_pass.cases import SAMPLING, Case
from specla.benchmarks.target_pass.host import engine_of
from specla.benchmarks.target_pass.model import random_weights
from specla.kernels.gpu.selector import Mode
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.gpu.memory import GpuMemoryAccount
from specla.verifier_service.passes import PassItem


class Footprint(NamedTuple):
    """Bytes of all that is not weights, and how often they hold the bare states of all sessions."""

    counted: int
    taken: int
    states: int

    @property
    def overhead(self) -> float:
        """The larger one over the states."""
        return max(self.counted, self.taken) / self.states


def footprint(mode: Mode, sessions: int, max_rows: int) -> Footprint:
    """Of an engine whose usual passes are ready, and that has run a prompt and a pass."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measured, mode, sessions, max_rows).result()


def _measured(mode: Mode, sessions: int, max_rows: int) -> Footprint:
    engine = engine_of(random_weights("cuda"), mode, sessions=sessions, max_rows=max_rows)
    engine.prepare()
    prompt = [token % 1000 for token in range(engine.config.chunk_tokens + 100)]
    session = engine.open(b"", prompt, [], SAMPLING, Stopping(max_tokens=8))
    while not engine.prefill(session, 1 << 20):
        pass
    engine.run_pass([PassItem(session, Case(1, 1, mode).topology)])
    memory = engine.memory
    assert isinstance(memory, GpuMemoryAccount)
    return Footprint(memory.backend_bytes(sessions, max_rows), memory.taken(), sessions * memory.state_per_session)
