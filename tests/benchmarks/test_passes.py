"""The pass benchmark on a tiny target: right paths come true, shapes are what they say, goals are drawn from rows."""

from pathlib import Path

import pytest

from specla.benchmarks import passes
from specla.benchmarks.report import Report
from specla.kernels.topology import Topology
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine


def test_shapes_are_topologies() -> None:
    for shape in passes.shapes([2, 5, 9, 17]):
        topology = Topology.from_wire(shape.parents)
        assert len(topology) == shape.rows
        if "chain" in shape.name:
            assert int(topology.depth.max()) == shape.rows - 1
        if "tree of 9" in shape.name:
            assert sorted(topology.depth.tolist()) == [0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_measures_every_shape(tiny_target: Path, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "TEXT_LEN", 24)
    kinds = passes.shapes([5, 9])
    config = VerifierConfig(target=tiny_target, numerics=numerics, threads=1, max_sessions=len(kinds) + 1)  # type: ignore[arg-type]
    seconds = passes.measure(Engine(config), [1, 2, 3], [5, 9], rounds=4, progress=lambda: None)
    assert set(seconds) == {shape.name for shape in kinds}
    assert all(len(samples) == 4 and min(samples) > 0 for samples in seconds.values())
    made = Report(title="passes", device="test")
    passes.add_to(made, numerics, seconds)
    assert [goal.want for goal in made.goals] == [1.4, 2.1]
    medians = {row.name: row.median for row in made.rows if row.unit == "ms"}
    worst = max(m for name, m in medians.items() if "of 5 rows" in name) / medians[passes.PLAIN]
    assert made.goals[0].got == pytest.approx(worst)


def test_a_wrong_commit_is_seen(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "TEXT_LEN", 24)
    engine = Engine(VerifierConfig(target=tiny_target, threads=1, max_sessions=2))
    runner = passes.Runner(engine, passes.Shape(passes.PLAIN), [1, 2, 3], [0] * 24)
    with pytest.raises(RuntimeError, match="other tokens than plain decoding"):
        _ = [runner.step() for _ in range(20)]


def test_price_of_exact(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "TEXT_LEN", 24)
    exact, fast = (
        Engine(VerifierConfig(target=tiny_target, numerics=numerics, threads=1, max_sessions=2))  # type: ignore[arg-type]
        for numerics in ("exact", "fast")
    )
    seconds = passes.measure_price(exact, fast, [1, 2, 3], rounds=5)
    made = Report(title="price", device="test")
    passes.add_price(made, seconds)
    assert [row.name for row in made.rows] == ["exact", "fast", "exact over fast"]
    assert all(row.samples == 5 and row.median > 0 for row in made.rows)
