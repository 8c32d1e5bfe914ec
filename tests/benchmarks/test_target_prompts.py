"""The benchmark's prompts without a GPU: parts are kept as they come, and one that fails leaves the others."""

import gc
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from specla.benchmarks.report import Report
from specla.benchmarks.target_pass import library, prompts
from specla.benchmarks.target_pass.goals import LIBRARY, OURS, Measured

Part = Callable[..., Any]
CASE = "prefill, 8,192 tokens"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], tuple[Report, Measured, list[int]]]:
    """The library's parts, with times that are their names' lengths and a prefill that cannot be captured."""

    def milliseconds(timed: Mapping[str, Part], rounds: int) -> dict[str, list[float]]:
        return {name: [float(len(name) or 1)] * rounds for name in timed}

    def fails(*_: object) -> None:
        raise RuntimeError("cannot be captured\nhere")

    monkeypatch.setattr(prompts, "_milliseconds", milliseconds)
    monkeypatch.setattr(library, "library_model", lambda *_: None)
    monkeypatch.setattr(library, "prefill", lambda *_: None)
    monkeypatch.setattr(library, "captured_prefill", fails)
    monkeypatch.setattr(library, "captured_step", lambda *_: None)
    monkeypatch.setattr(library, "generate_us", lambda *_: [35_000.0])

    def measure(failed: dict[str, str]) -> tuple[Report, Measured, list[int]]:
        monkeypatch.setattr(library, "warm", lambda tokens: failed)
        made, found, saved = Report(title="", device=""), Measured(), list[int]()
        prompts._library(made, found, lambda: None, lambda text: None, lambda: saved.append(len(made.rows)))
        return made, found, saved

    return measure


def test_what_fails_leaves_the_rest(run: Callable[..., tuple[Report, Measured, list[int]]]) -> None:
    made, found, saved = run({})
    assert saved == [3, 4, 5]
    assert [(row.case, row.name, row.median, row.unit) for row in made.rows] == [
        (CASE, OURS, 4.0, "ms"),
        (CASE, LIBRARY, 22.0, "ms"),
        (CASE, f"{LIBRARY} over ours", 5.5, "x"),
        ("flash-linear-attention, 1 session", "generate as shipped, a token", 35.0, "ms"),
        ("flash-linear-attention, 1 session", "a step in a CUDA graph", 1.0, "ms"),
    ]
    assert set(found.prefill) == {OURS, LIBRARY}
    assert made.notes == {"library, prefill": "failed: RuntimeError: cannot be captured"}


def test_what_is_not_tuned_is_left_out(run: Callable[..., tuple[Report, Measured, list[int]]]) -> None:
    made, found, _ = run({"prefill": "too slow"})
    assert [row.case for row in made.rows] == ["flash-linear-attention, 1 session"] * 2
    assert not found.prefill
    assert made.notes == {"library, prefill": "left out: too slow"}


def test_prefill_is_kept_as_it_was_measured_last() -> None:
    made, found = Report(title="", device=""), Measured()
    prompts._keep(made, found, {OURS: [2.0]})
    prompts._keep(made, found, {OURS: [3.0], LIBRARY: [6.0]})
    assert [(row.name, row.median) for row in made.rows] == [(OURS, 3.0), (LIBRARY, 6.0), (f"{LIBRARY} over ours", 2.0)]


def test_what_a_graph_reads_lives_as_long_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of a captured pass is held by nobody else: its memory would be given to others."""
    for name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    prompt = torch.zeros(3)
    known = weakref.ref(prompt)

    def launch(read: torch.Tensor = prompt) -> None:
        read.sum()

    replay = library._captured(launch)
    del prompt, launch
    gc.collect()
    assert known() is not None
    replay()
    del replay
    gc.collect()
    assert known() is None
