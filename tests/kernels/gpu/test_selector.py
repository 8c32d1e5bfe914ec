"""The selector: fits recover what made the times, choices are the best by the table, tables survive the disk."""

import json
import random
import warnings
from pathlib import Path

import pytest
from tree_cases import chain, random_tree

from specla.kernels.gpu.factorised import FactorisedTile
from specla.kernels.gpu.selector import Choice, Cost, LayerShape, Measured, Selector, features
from specla.kernels.gpu.tuning import fit
from specla.kernels.topology import Topology

SHAPE = LayerShape(256, 256, 8)
SERIAL, HYBRID = Choice("serial"), Choice("serial", groups=4)
FACTORISED = Choice("factorised", tile=FactorisedTile(16, 16))
STAR = Topology.from_wire([-1] * 15)


def place(*costs: Cost, sessions: int = 1, rows: int = 16, shape: LayerShape = SHAPE) -> Measured:
    return Measured(shape, sessions, rows, costs)


@pytest.mark.parametrize("choice", [SERIAL, HYBRID, FACTORISED])
def test_a_fit_recovers_the_costs(choice: Choice) -> None:
    rng = random.Random(0)
    trees = [chain(4), chain(16), STAR, *(random_tree(rng, rng.randint(2, 40)) for _ in range(12))]
    true = Cost(choice, 4.0, 0.5, 0.75 if choice == SERIAL else 0.0)
    found = fit(choice, [(tree, true.predict([tree])) for tree in trees])
    for tree in trees:
        assert found.predict([tree]) == pytest.approx(true.predict([tree]), rel=0.01)


def test_a_fit_never_rewards_steps() -> None:
    found = fit(SERIAL, [(chain(2), 10.0), (chain(8), 9.0), (chain(16), 8.0)])
    assert found.per_step == 0
    assert found.per_fetch == 0
    assert 8 < found.base < 10


@pytest.mark.parametrize("times", [[], [0.0], [1.0, float("inf")]])
def test_a_fit_refuses_what_is_no_time(times: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        fit(SERIAL, [(chain(3), time) for time in times])


def test_chains_and_stars_get_different_kernels() -> None:
    selector = Selector(
        "a device", [place(Cost(SERIAL, 3, 0.5, 1), Cost(HYBRID, 5, 0.5, 1), Cost(FACTORISED, 6, 0.2, 0))]
    )
    assert selector.choose("fast", SHAPE, [chain(4)]) == SERIAL
    assert selector.choose("fast", SHAPE, [chain(16)]) == FACTORISED
    assert selector.choose("exact", SHAPE, [chain(16)]) == SERIAL
    assert selector.choose("exact", SHAPE, [STAR]) == HYBRID
    assert features(HYBRID, STAR) == (5, 0)


def test_batches_count_all_their_trees() -> None:
    selector = Selector("a device", [place(Cost(SERIAL, 3, 0.5, 0), Cost(FACTORISED, 6, 0, 0))])
    assert selector.choose("fast", SHAPE, [chain(16)]) == FACTORISED
    assert selector.choose("fast", SHAPE, [chain(16), *[Topology.root_only()] * 5]) == SERIAL


def test_the_nearest_place_is_read() -> None:
    small, large = place(Cost(SERIAL, 1, 1, 1), rows=16), place(Cost(HYBRID, 1, 1, 1), rows=64)
    many, other = (
        place(Cost(Choice("serial", groups=2), 1, 1, 1), sessions=16, rows=16),
        place(Cost(Choice("serial", groups=8), 1, 1, 1), shape=LayerShape(128, 128, 48)),
    )
    selector = Selector("a device", [small, large, many, other])
    assert selector.choose("exact", SHAPE, [chain(16)]).groups == 1
    assert selector.choose("exact", SHAPE, [chain(17)]).groups == 4
    assert selector.choose("exact", SHAPE, [chain(129)]).groups == 4
    assert selector.choose("exact", SHAPE, [chain(9)] * 12).groups == 2
    assert selector.choose("exact", LayerShape(128, 128, 32), [chain(9)]).groups == 8


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    selector = Selector("a device", [place(Cost(SERIAL, 3, 0.5, 1), Cost(FACTORISED, 6, 0.2, 0))])
    path = tmp_path / "table.json"
    path.write_text(json.dumps(selector.to_table(["a device", "its twin"])))
    assert Selector.read(path).measured == selector.measured
    assert Selector.read(path).device == "a device"


def test_a_table_without_an_exact_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="exact choice"):
        Selector("a device", [place(Cost(FACTORISED, 6, 0.2, 0))])


def test_the_shipped_table_chooses_by_mode() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector = Selector.for_device("NVIDIA H200")
    for topologies in ([Topology.root_only()], [chain(16)], [STAR], [chain(16)] * 16, [chain(129)]):
        assert selector.choose("exact", SHAPE, topologies).is_exact
    assert selector.choose("fast", SHAPE, [random_tree(random.Random(1), 16)]).kernel == "factorised"


def test_an_unknown_device_is_told() -> None:
    with pytest.warns(UserWarning, match="no table of kernel times for a device"):
        Selector.for_device("a device")
