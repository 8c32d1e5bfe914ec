"""The whole flow of the kernel benchmark on small shapes, with direct calls in place of graphs."""

import json
import math
import os
import time
from dataclasses import replace

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
from kernel_loops import recurrent

from specla.benchmarks.kernels import (
    candidates,
    cases,
    checks,
    contenders,
    convolving,
    correctness,
    device,
    host,
    measure,
    penalties,
    place,
    preparation,
    problem,
    restore,
    run,
    sampler,
)
from specla.benchmarks.kernels import tune as tune_module
from specla.benchmarks.kernels.cases import DEEP, Case, Place, Plan, goals_plan
from specla.benchmarks.kernels.correctness import Errors
from specla.benchmarks.kernels.preparation import Preparation
from specla.benchmarks.kernels.replay import MissingLibraryError
from specla.benchmarks.kernels.shapes import PAPER, WIDE, Shape
from specla.benchmarks.kernels.timing import Graph
from specla.benchmarks.kernels.topologies import chain, tree
from specla.kernels.gpu.selector import Choice, Cost, LayerShape, Measured, Selector
from specla.kernels.topology import Topology

pytestmark = pytest.mark.timeout(400)  # interpreted kernels, on cores that others may use

SMALL = {PAPER: Shape(PAPER.name, 1, 1, 32, 16), WIDE: Shape(WIDE.name, 1, 2, 16, 16)}
FEW = {16: 2, 64: 3}
"""Sessions in place of many."""


class Direct:
    """In place of a graph: runs its work when it is sampled."""

    def __init__(self, work):
        self.name, self.work = work.name, work

    def _replace(self, *, name):
        return Direct(self.work._replace(name=name))

    def sample(self):
        begun = time.perf_counter()
        self.work.run()
        return (time.perf_counter() - begun) * 1e6 / self.work.units


def captured(work):
    work.warm()
    return Direct(work)


def a_selector(device):
    """Chooses two groups, whatever is faster."""
    costs = (Cost(Choice("serial"), 9.0, 1.0, 1.0), Cost(Choice("serial", groups=2), 1.0, 0.0, 0.0))
    return Selector(device, [Measured(LayerShape(32, 16, 1), 1, 5, costs)])


def missing(kind):
    raise MissingLibraryError("there is none")


@pytest.fixture
def small(monkeypatch):
    """The benchmark without a GPU: small shapes and trees under the names of the large ones."""
    for name in cases.TREES:
        monkeypatch.setitem(cases.TREES, name, lambda: tree(2, 2, 5))
    monkeypatch.setattr(candidates, "BUCKETS", (5,))
    monkeypatch.setattr(checks, "SIZES", {5: (5, 1)})
    for module in (contenders, correctness, problem):
        monkeypatch.setattr(module, "RING", 4)
    monkeypatch.setattr(Graph, "capture", staticmethod(captured))
    monkeypatch.setattr(measure, "TUNING_ROUNDS", 1)
    monkeypatch.setattr(tune_module, "ROUNDS", 1)
    monkeypatch.setattr(place, "RING", 4)
    monkeypatch.setattr(Selector, "for_device", staticmethod(a_selector))
    found = {"require": None, "describe": "a GPU, small", "name": "a GPU", "clocks": "unknown", "wake": None}
    found |= {"copy_bandwidth": 4e12, "l2_bytes": 1}
    for name, value in found.items():
        monkeypatch.setattr(device, name, lambda value=value: value)
    for module in (restore, preparation):
        monkeypatch.setattr(module, "PAPER", SMALL[PAPER])
    monkeypatch.setattr(restore, "LAYERS", 2)
    monkeypatch.setattr(restore, "TOKENS", 4)
    monkeypatch.setattr(restore, "PRODUCTS", ((8, 8),) * 4)
    monkeypatch.setattr(restore, "ROUNDS", 2)
    monkeypatch.setattr(sampler, "ROWS", 2)
    monkeypatch.setattr(sampler, "VOCABULARY", 512)
    monkeypatch.setattr(sampler, "ROUNDS", 1)
    for module in (checks, run):
        monkeypatch.setattr(module, "operation", lambda kind: recurrent)


def small_plan(*places):
    """The goals' cases at these places among them, and all that the goals' plan has beside them."""
    found = [goals_plan().cases[i] for i in places]
    shrunk = [replace(c, shape=SMALL[c.shape], sessions=FEW.get(c.sessions, c.sessions), rounds=1) for c in found]
    return replace(goals_plan(), cases=tuple(shrunk), drift_steps=10, device="cpu", processes=1)


class TestRun:
    def test_goals_are_saved_as_they_come_in(self, small, tmp_path):
        saved, said, path = [], [], tmp_path / "kernels.json"

        def save(report):
            report.write(path)
            saved.append(json.loads(path.read_text()))

        done = run.run(small_plan(0, 7), budget=600, say=said.append, save=save)
        assert not [line for line in said if "FAILED" in line]
        assert not [note for note in done.report.notes if note.startswith(("failed", "left out", "cannot"))]
        known = [sum(goal["got"] is not None for goal in made["goals"]) for made in saved]
        assert known == sorted(known)
        assert known[0] == 2  # the curves of drift alone
        assert known[1] - known[0] == 2  # the tree of the first case, replayed singly and at once
        assert known[-1] - known[0] == 6  # the largest tree, restoring in two ways and sampling, too
        assert saved[-1]["rows"]
        assert "shared by all layers" in saved[-1]["notes"]["method"]
        assert sum(" s] " in line for line in said) >= 2 + 4  # cases; preparing, the bandwidth, restoring and sampling

    def test_cases_are_left_out_when_the_time_is_spent(self, small):
        done = run.run(small_plan(0), budget=0, say=lambda line: None, save=lambda report: None)
        assert not done.timed
        assert DEEP in done.report.notes["left out for lack of time, goals"]
        assert done.restored  # costs little, and comes whatever the time

    def test_without_the_library_its_goals_stay_open(self, small, monkeypatch):
        for module in (checks, run):
            monkeypatch.setattr(module, "operation", missing)
        only = replace(small_plan(0), drift_steps=0, samplers=())
        done = run.run(only, budget=600, say=lambda line: None, save=lambda report: None)
        assert done.report.notes["replay rivals"] == "not measured: there is none"
        assert [name for name in done.timed[only.cases[0].name].skipped if name.startswith("replay")]
        assert math.isnan(done.report.goals[0].got)

    def test_nothing_is_timed_when_a_kernel_is_wrong(self, small, monkeypatch):
        def wrong(case, problem, contenders):
            return [Errors(case, contender.name, 1.0, 0.0, 0.0, 1e-3) for contender in contenders]

        monkeypatch.setattr(checks, "check", wrong)
        only = replace(small_plan(0), drift_steps=0, samplers=())
        with pytest.raises(run.WrongResultError, match="serial: o 1"):
            run.run(only, budget=600, say=lambda line: None, save=lambda report: None)


class TestPreparation:
    def test_a_kernel_that_cannot_be_made_is_no_candidate(self, small, monkeypatch):
        def cannot(problem, choice, **options):
            raise candidates.UNFIT[1]("too many registers")

        monkeypatch.setattr(checks, "Ours", cannot)
        case = Case(shape=SMALL[PAPER], sessions=1, tree=DEEP, replay=())
        prepared = Preparation(Plan(cases=(case,), samplers=(), drift_steps=0, device="cpu", processes=1)).result()
        assert prepared.left_out == set(preparation.kernels_of(Plan(cases=(case,))))
        assert all("too many registers" in why for why in prepared.unfit.values())

    def test_a_check_that_breaks_off_is_named(self, small, monkeypatch):
        monkeypatch.setattr(checks, "Ours", None)
        case = Case(shape=SMALL[PAPER], sessions=1, tree=DEEP, replay=())
        plan = Plan(cases=(case,), samplers=(), drift_steps=0, device="cpu", processes=1)
        with pytest.raises(preparation.TaskError, match=r"8 heads of 256, up to 5 rows.*TypeError"):
            Preparation(plan).result()

    def test_every_kernel_that_is_timed_has_a_task(self):
        plan = goals_plan()
        kernels = preparation.kernels_of(plan)
        names = set(preparation.tasks(plan, kernels))
        assert {str(kernel) for kernel in kernels} <= names
        assert len([name for name in names if name.startswith("replay")]) == 1


class TestTune:
    def test_writes_a_table_that_the_selector_reads(self, small, monkeypatch, tmp_path):
        stars = {f"a star of {n}": Topology.from_wire([-1] * n) for n in (2, 3)}
        trees = {"chain of 5": chain(5), "a fork": tree(2, 2, 5), **stars}
        for name, topology in trees.items():
            monkeypatch.setitem(cases.TREES, name, lambda topology=topology: topology)
        spot = Place(shape=SMALL[PAPER], sessions=1, rows=5, trees=tuple(trees))
        plan = Plan(places=(spot,), drift_steps=0, device="cpu", processes=1)
        done = tune_module.tune(plan, tmp_path / "table.json", budget=600, say=lambda line: None)
        selector = Selector.read(tmp_path / "table.json")
        assert selector.device == "a GPU"
        (place,) = selector.measured
        assert (place.shape, place.sessions, place.rows) == (LayerShape(32, 16, 1), 1, 5)
        assert {cost.choice for cost in place.costs} == set(candidates.candidates(spot.shape, 1, list(trees.values())))
        assert selector.choose("exact", place.shape, [trees["a fork"]]).is_exact
        timed = [row for row in done.report.rows if row.unit == "us"]
        assert len(timed) == 4 * len(place.costs)
        assert len(done.report.rows) - len(timed) == 2 * 4 + 2  # each mode's choice over the best, and the worst


class TestOthers:
    def test_convolution_penalties_and_the_host_are_rows(self, small, monkeypatch):
        shape = Shape("small", 1, 2, 16, 16)
        monkeypatch.setattr(convolving, "PAPER", shape)
        monkeypatch.setattr(convolving, "ROWS", (5,))
        monkeypatch.setattr(convolving, "SESSIONS", (1, 2))
        monkeypatch.setattr(convolving, "eagle_like", lambda rows: tree(2, 2, rows))
        monkeypatch.setattr(penalties, "ROWS", 5)
        monkeypatch.setattr(penalties, "VOCABULARY", 100)
        monkeypatch.setattr(penalties, "LENGTHS", (0, 30))
        for module in (convolving, penalties):
            monkeypatch.setattr(module, "ROUNDS", 1)
        monkeypatch.setattr(host, "SIZES", ((2, 4),))
        plan = Plan(drift_steps=0, others=True, device="cpu", processes=1)
        done = run.run(plan, budget=600, say=lambda line: None, save=lambda report: None)
        assert not [note for note in done.report.notes if note.startswith("failed")]
        rows = {(row.case, row.name) for row in done.report.rows}
        assert (convolving.CASE, "small, 2 sessions x 5 rows, over the time to move the bytes once") in rows
        assert len([row for row in rows if row[0] == convolving.CASE]) == 4
        assert len([row for row in done.report.rows if row.case == penalties.CASE]) == 2
        assert (host.CASE, "fill, fresh trees, 2 sessions x 4 rows") in rows

    def test_wrong_rows_and_logits_are_not_timed(self, small, monkeypatch):
        made = convolving.Convolving(Shape("small", 1, 2, 16, 16), 1, 8, layers=1, device="cpu")
        made.check()
        monkeypatch.setattr(convolving, "tree_convolution", lambda *args: None)
        with pytest.raises(convolving.WrongRowsError, match="q of the convolution"):
            made.check()
        monkeypatch.setattr(penalties, "ROWS", 2)
        monkeypatch.setattr(penalties, "VOCABULARY", 100)
        monkeypatch.setattr(penalties, "adjust_logits", lambda logits, entries: None)
        with pytest.raises(penalties.WrongLogitsError, match="row 0 of 2"):
            penalties.warm("cpu")


def test_tokens_at_the_border_of_top_p_may_differ():
    row = torch.log(torch.tensor([0.5, 0.4, 0.06, 0.04]))  # 0.9 of the weights lie before the third
    assert sampler._at_the_border(row, 2, 0)
    assert not sampler._at_the_border(row, 3, 0)
    assert not sampler._at_the_border(row, -1, 0)
