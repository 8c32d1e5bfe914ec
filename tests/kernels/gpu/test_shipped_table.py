"""The table that ships, against the times that it was fitted from: made by our fit, choosing within 5% of the best."""

import json
from pathlib import Path

import pytest
import triton

from specla.benchmarks.kernels.candidates import candidates
from specla.benchmarks.kernels.cases import Place, tuning_plan
from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.tune import fitted, layer_of
from specla.kernels.gpu.selector import TABLES, Choice, Measured, Mode, Selector, alike
from specla.kernels.topology import Topology

DEVICE = "NVIDIA H200"
_DATA = json.loads((Path(__file__).parent / "data" / "h200_times.json").read_text())
RECORDED: dict[str, dict[str, float]] = _DATA["times"]
LATER: dict[str, dict[str, float]] = _DATA["later"]["times"]
"""What kernels that were made after the record take of it."""

MODES: tuple[Mode, ...] = ("exact", "fast")
SLACK_US = 0.2

Times = dict[str, dict[Choice, float]]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot have the forms in Gluon."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.fixture
def places(as_on_a_gpu: None) -> list[tuple[Place, Times]]:
    """Those that were timed, with the microseconds of every tree and choice."""
    found = []
    for place in tuning_plan().places:
        found_here = candidates(place.shape, place.sessions, list(place.topologies.values()), place.rows)
        choices = {name_of(c): c for c in found_here}
        times = {
            tree: {
                choices[name]: us * LATER.get(place.name, {}).get(name, 1.0)
                for name, us in RECORDED[f"{place.name}, {tree}"].items()
            }
            for tree in place.trees
            if f"{place.name}, {tree}" in RECORDED
        }
        if times:
            found.append((place, times))
    return found


def over_best(measured: Measured, mode: Mode, tree: Topology, times: dict[Choice, float]) -> tuple[float, float]:
    """What a place's choice takes over the best: as a ratio, and in microseconds."""
    choice = Selector(DEVICE, [measured]).choose(mode, measured.shape, [tree] * measured.sessions)
    best = min(us for c, us in times.items() if mode == "fast" or c.is_exact)
    return times[choice] / best, times[choice] - best


def test_the_table_is_the_fit_of_the_recorded_times(places: list[tuple[Place, Times]]) -> None:
    made = Selector(DEVICE, [fitted(place, times) for place, times in places]).to_table(alike(DEVICE))
    shipped = json.loads((TABLES / "h200.json").read_text())
    assert made["devices"] == shipped["devices"]
    assert len(made["measured"]) == len(shipped["measured"]) == 23
    for ours, theirs in zip(made["measured"], shipped["measured"], strict=True):
        assert {k: ours[k] for k in ("shape", "sessions", "rows")} == {
            k: theirs[k] for k in ("shape", "sessions", "rows")
        }
        for a, b in zip(ours["costs"], theirs["costs"], strict=True):
            assert [a[k] for k in ("kernel", "groups", "tile")] == [b[k] for k in ("kernel", "groups", "tile")]
            for key in ("base_us", "per_step_us", "per_other_us"):
                assert a[key] == pytest.approx(b[key], rel=0.01, abs=0.02)  # times are recorded to a nanosecond


def test_choices_are_within_five_percent_of_the_best(places: list[tuple[Place, Times]]) -> None:
    selector = Selector.for_device(DEVICE)
    by_place = {(m.shape, m.sessions, m.rows): m for m in selector.measured}
    count = 0
    for place, times in places:
        measured = by_place[layer_of(place), place.sessions, place.rows]
        for name, us in times.items():
            for mode in MODES:
                ratio, _ = over_best(measured, mode, place.topologies[name], us)
                assert ratio < 1.05, f"{place.name}, {name}, {mode}"
                count += 1
    assert count == 200


def test_trees_that_were_left_out_of_the_fit(places: list[tuple[Place, Times]]) -> None:
    """Nearly all choices for a tree that the fit has not seen are near the best; the others guess at small chains."""
    near, count = 0, 0
    for place, times in places:
        for name, us in times.items():
            measured = fitted(place, {tree: other for tree, other in times.items() if tree != name})
            for mode in MODES:
                ratio, more = over_best(measured, mode, place.topologies[name], us)
                near += ratio < 1.05 or more < SLACK_US
                count += 1
    assert count == 200
    assert near >= 196
