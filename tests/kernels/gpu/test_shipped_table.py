"""The table that ships, against the times that it was fitted from: made by our fit, choosing within 5% of the best."""

import json
from pathlib import Path

import pytest
import triton

from specla.benchmarks.kernels.cases import Place
from specla.benchmarks.kernels.recorded import recorded, table_of, timed_places
from specla.benchmarks.kernels.tune import Times, _fitted, fitted, layer_of
from specla.kernels.gpu.selector import TABLES, Choice, Measured, Mode, Selector
from specla.kernels.topology import Topology

DEVICE = "NVIDIA H200"
RECORD = json.loads((Path(__file__).parent / "data" / "h200_times.json").read_text())
RECORDED = RECORD["times"]
PLACES = 60
"""Of the tuning plan; plain decoding is among them."""

MODES: tuple[Mode, ...] = ("exact", "fast")
SLACK_US = 0.2


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot have the forms in Gluon."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.fixture
def places(as_on_a_gpu: None) -> list[tuple[Place, Times]]:
    """With the microseconds of every tree and choice."""
    return timed_places(RECORD)


def over_best(measured: Measured, mode: Mode, tree: Topology, times: dict[Choice, float]) -> tuple[float, float]:
    """What a place's choice takes over the best: as a ratio, and in microseconds."""
    choice = Selector(DEVICE, [measured]).choose(mode, measured.shape, [tree] * measured.sessions)
    best = min(us for c, us in times.items() if mode == "fast" or c.is_exact)
    return times[choice] / best, times[choice] - best


def test_the_table_is_the_fit_of_the_recorded_times() -> None:
    made = table_of(RECORD)
    shipped = json.loads((TABLES / "h200.json").read_text())
    assert made["devices"] == shipped["devices"]
    assert len(made["measured"]) == len(shipped["measured"]) == PLACES
    assert [p["sessions"] for p in made["measured"] if p["rows"] == 1 and p["shape"][0] == 256] == [1, 16, 4, 64]
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
    assert count == 2 * len(RECORDED)


def test_trees_that_were_left_out_of_the_fit(places: list[tuple[Place, Times]]) -> None:
    """Nearly all choices for a tree that the fit has not seen are near the best; the others guess at small chains."""
    near, count = 0, 0
    for place, times in places:
        for name, us in times.items() if len(times) > 1 else ():
            measured = fitted(place, {tree: other for tree, other in times.items() if tree != name})
            for mode in MODES:
                ratio, more = over_best(measured, mode, place.topologies[name], us)
                near += ratio < 1.05 or more < SLACK_US
                count += 1
    assert count == 2 * (len(RECORDED) - sum(len(times) == 1 for _, times in places))
    assert near >= 0.98 * count


def test_trees_that_are_chosen_badly_for_count_more() -> None:
    """Two choices that take turns at being the best by a few percent: least squares alone takes the wrong one."""
    place = next(p for p, _ in timed_places(RECORD) if p.name == "8 heads of 256, 1 session, up to 129 rows")
    times = next(times for p, times in timed_places(RECORD) if p.name == place.name)
    once, best = _fitted(place, times, dict.fromkeys(times, 1.0)), fitted(place, times)

    def worst(measured: Measured) -> float:
        return max(over_best(measured, "fast", place.topologies[name], us)[0] for name, us in times.items())

    assert worst(best) < 1.03 < worst(once)


def run(device: str, rows: dict[str, dict[str, float]], commit: str = "c1") -> dict[str, object]:
    """A tuning run's report."""
    found = [
        {"case": case, "name": name, "median": us, "unit": "us"}
        for case, times in rows.items()
        for name, us in times.items()
    ]
    found.append({"case": "all", "name": "over the best", "median": 1.0, "unit": "x"})
    return {"device": device, "date": "today", "versions": {"commit": commit}, "command": "tune", "rows": found}


def test_later_runs_replace_cases_and_keep_the_others() -> None:
    one, sixteen = (
        "8 heads of 256, 1 session, up to 1 rows, chain of 1",
        "8 heads of 256, 16 sessions, up to 1 rows, chain of 1",
    )
    first = run(
        "a device, large",
        {one: {"serial": 3.00049, "gone": 9.0}, sixteen: {"serial": 20.0}, "no case": {"serial": 1.0}},
    )
    record = recorded([first, run("a device, large", {one: {"serial": 2.5}})])
    assert record["times"] == {one: {"serial": 2.5}, sixteen: {"serial": 20.0}}
    assert record["older"] == {}
    later = recorded([run("a device, large", {sixteen: {"serial": 19.0}}, "c2")], record)
    assert later["times"] == {one: {"serial": 2.5}, sixteen: {"serial": 19.0}}
    assert later["older"] == {one: "c1"}
    assert recorded([run("a device, large", {sixteen: {"serial": 18.0}}, "c3")], later)["older"] == {one: "c1"}
    assert one not in recorded([run("another", {sixteen: {"serial": 19.0}})], record)["times"]
    table = table_of(record)
    assert table["devices"] == ["a device"]
    assert [(place["sessions"], place["costs"][0]["base_us"]) for place in table["measured"]] == [(1, 2.5), (16, 20.0)]


@pytest.mark.parametrize("devices", [[], ["a device", "another"]])
def test_a_record_is_of_one_device(devices: list[str]) -> None:
    with pytest.raises(ValueError, match="give those of one"):
        recorded([run(device, {}) for device in devices])
