"""What must not happen while launches are captured; the captures themselves are tested where there is a GPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from specla.verifier_service.gpu import capture


class Captured:
    """Stands in for a graph, and for what captures it."""

    capturing = False

    @contextmanager
    def capture(self, graph: object, **options: object) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        self.capturing = True
        yield
        self.capturing = False


class Garbage:
    """A cycle that only the garbage collector frees, and that notes whether a capture was under way then."""

    freed: list[bool]

    def __init__(self, state: Captured, freed: list[bool]) -> None:
        self.me, self.state, self.freed = self, state, freed

    def __del__(self) -> None:
        self.freed.append(self.state.capturing)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Captured:
    state = Captured()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", state.capture)
    return state


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_on, threshold = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    if was_on:
        gc.enable()
    else:
        gc.disable()


def test_no_garbage_is_collected_during_a_capture(state: Captured) -> None:
    """A graph among it would end the capture."""
    freed = list[bool]()
    gc.enable()
    gc.set_threshold(1)

    def launch() -> None:
        for _ in range(100):
            Garbage(state, freed)

    capture.captured(launch, None)
    assert True not in freed
    gc.collect()
    assert freed == [False] * 100


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_is_left_as_it_was(state: Captured, was_on: bool, fails: bool) -> None:
    (gc.enable if was_on else gc.disable)()

    def launch() -> None:
        assert not gc.isenabled()
        if fails:
            raise ValueError

    with pytest.raises(ValueError) if fails else nullcontext():  # noqa: PT011
        capture.captured(launch, None)
    assert gc.isenabled() is was_on
