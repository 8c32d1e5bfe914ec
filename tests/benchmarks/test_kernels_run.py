"""Cases, goals and drawings of the kernel benchmark, without a GPU."""

import math
import os
import subprocess
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
import triton
from typer.testing import CliRunner

from specla.benchmarks.cli import bench
from specla.benchmarks.kernels import drift, restore
from specla.benchmarks.kernels.candidates import BUCKETS, best, bucket_rows, candidates
from specla.benchmarks.kernels.cases import DEEP, GOAL_CASES, WIDE_TREE, all_cases, goals_plan, tuning_plan
from specla.benchmarks.kernels.correctness import Errors
from specla.benchmarks.kernels.goals import case_name, goals, ratio
from specla.benchmarks.kernels.measure import BEST, REPLAYS, RING, STAND_ALONE, Timed
from specla.benchmarks.kernels.pictures import DRIFT, TIMES, draw
from specla.benchmarks.kernels.sampler import DEFAULT
from specla.benchmarks.kernels.shapes import NARROW, PAPER, WIDE, Shape, bytes_once
from specla.benchmarks.kernels.summary import OVER_BEST, Run, summarise
from specla.benchmarks.kernels.timing import in_turns, layers_needed
from specla.benchmarks.kernels.topologies import chain, eagle_like
from specla.benchmarks.kernels.tune import fitted
from specla.benchmarks.report import Report
from specla.kernels.gpu.factorised import FactorisedTile
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.selector import Choice
from specla.kernels.gpu.serial_split import columns_of
from specla.kernels.gpu.streamed import StreamedTile
from specla.kernels.gpu.tuning import fit
from specla.kernels.topology import Topology

TUNED = tuple(rows for rows in BUCKETS if rows != 128)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def timed(case, **samples):
    chosen, best = {"exact": "serial", "fast": "serial"}, {"exact": "serial", "fast": "factorised"}
    return Timed(case, samples, {"serial": 9.0}, chosen, best, 4_000_000, 4, 90, {"a": "why"})


def all_timed():
    us = {"exact": [8.0, 8.0], "fast": [4.0, 5.0], STAND_ALONE["fast"]: [6.0, 10.0], RING["fast"]: [3.0, 4.0]}
    us |= {BEST["exact"]: [8.0, 8.0], BEST["fast"]: [4.0, 4.0]}
    us |= {REPLAYS["recurrent", False]: [40.0, 60.0], REPLAYS["recurrent", True]: [8.0, 11.0]}
    return {case.name: timed(case, **us) for case in GOAL_CASES}


class TestBytes:
    def test_of_one_session_by_hand(self):
        shape = Shape("by hand", 1, 2, 32, 16)
        states = 2 * (2 * 32 * 16) * 4
        pending = 3 * (32 * 2 + 2 * 16 * 4 + 2 * 4)
        inputs = 5 * ((32 + 32 + 2 * 16) * 2 + 2 * 2 * 4)
        outputs = 5 * (2 * 16) * (4 + 2)
        assert bytes_once(shape, sessions=1, rows=5, pending=3) == states + pending + inputs + outputs

    def test_the_ring_spares_the_write(self):
        both = [bytes_once(PAPER, sessions=4, rows=64, pending=4, state_written=w) for w in (True, False)]
        assert both[0] - both[1] == 4 * PAPER.state_bytes

    def test_layers_lie_three_caches_apart(self):
        assert layers_needed(2_000_000, 60_000_000) == 90
        assert layers_needed(500_000_000, 60_000_000) == 2


class Recorded:
    """In place of a graph: notes when it is run."""

    def __init__(self, name, order):
        self.name, self._order = name, order

    def sample(self):
        self._order.append(self.name)
        return float(len(self._order))


class TestTurns:
    def test_rounds_rotate_so_that_nobody_is_always_first(self):
        order = []
        samples = in_turns([Recorded(name, order) for name in "abc"], 4)
        assert order == list("abcbcacababc")
        assert samples["a"] == [1.0, 6.0, 8.0, 10.0]

    def test_names_must_differ(self):
        with pytest.raises(ValueError, match="repeat"):
            in_turns([Recorded("a", []), Recorded("a", [])], 2)


class TestCases:
    def test_goals_come_first_and_names_are_unique(self):
        cases = all_cases()
        assert tuple(cases[: len(GOAL_CASES)]) == GOAL_CASES
        assert not any(case.goal for case in cases[len(GOAL_CASES) :])
        assert len({case.name for case in cases}) == len(cases)

    def test_the_grid_is_whole(self):
        trees = [
            DEEP,
            WIDE_TREE,
            *(f"chain of {n}" for n in (4, 8, 16)),
            *(f"EAGLE-like tree of {n}" for n in (64, 128)),
        ]
        wanted = {(s, t) for s in (1, 4, 16, 64) for t in trees}
        for shape in (PAPER, WIDE):
            assert wanted <= {(c.sessions, c.tree) for c in all_cases() if c.shape == shape}

    def test_the_chunked_kernel_runs_on_the_papers_trees(self):
        assert [c.tree for c in all_cases() if "chunked" in c.replay] == ["tree (2, 12, 16)", "tree (4, 4, 32)"]

    def test_tuning_covers_shapes_sessions_and_buckets(self):
        plan = tuning_plan()
        found = {(place.shape, place.sessions, place.rows) for place in plan.places}
        assert found == {(s, n, r) for s in (PAPER, WIDE, NARROW) for n in (1, 4, 16, 64) for r in (1, *TUNED)}
        assert len({place.name for place in plan.places}) == len(plan.places) == len(found)
        assert not plan.cases
        assert not plan.samplers
        assert not plan.drift_steps

    def test_some_buckets_alone(self):
        assert {place.rows for place in tuning_plan([1, 64]).places} == {1, 64}

    def test_plain_decoding_has_one_tree_and_one_cost(self):
        (tree,) = next(p for p in tuning_plan().places if p.rows == 1).topologies.values()
        assert tree is Topology.root_only()
        found = fit(Choice("serial"), [(tree, 3.0), (tree, 5.0), (tree, 4.0)])
        assert (found.base, found.per_step, found.per_other) == (4.0, 0.0, 0.0)

    @pytest.mark.parametrize("rows", TUNED)
    def test_a_places_trees_tell_all_costs_apart(self, rows):
        """Of every choice, with any of the trees left out."""
        place = next(p for p in tuning_plan().places if p.rows == rows)
        trees = place.topologies
        assert max(map(len, trees.values())) == rows
        choices = candidates(PAPER, 1, list(trees.values()), rows)
        for missing in ("", *trees):
            found = fitted(place, {n: dict.fromkeys(choices, 1.0 + len(t)) for n, t in trees.items() if n != missing})
            assert [cost.choice for cost in found.costs] == choices
            assert all(cost.base + cost.per_step + cost.per_other > 0 for cost in found.costs)

    def test_the_short_plan_is_the_goals_with_fewer_rounds(self):
        plan = goals_plan()
        assert [case.name for case in plan.cases] == [case.name for case in GOAL_CASES]
        assert all(case.rounds < goal.rounds for case, goal in zip(plan.cases, GOAL_CASES, strict=True))
        assert [case.tree for case in plan.cases if case.replay] == ["tree (2, 12, 16)", "tree (4, 4, 32)"]


class TestCandidates:
    def test_groups_up_to_the_leaves_and_what_fits_at_once(self):
        def groups(*case):
            shape, sessions, topology = case
            return [c.groups for c in candidates(shape, sessions, [topology]) if c.kernel == "serial"]

        assert groups(PAPER, 1, eagle_like(16)) == [1, 2, 4]
        assert groups(PAPER, 1, eagle_like(32)) == [1, 2, 3, 4]
        assert groups(PAPER, 1, eagle_like(64)) == [1, 3, 4, 5, 6]
        assert groups(PAPER, 1, chain(8)) == [1]
        assert groups(PAPER, 64, eagle_like(64)) == [1]

    def test_groups_that_a_gpu_holds_at_once(self, monkeypatch):
        """528 programs of 16 columns, or 396 of 32, which take their place where those would not fit."""
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

        def groups(shape, sessions, rows):
            return [c.groups for c in candidates(shape, sessions, [eagle_like(rows)]) if c.kernel == "serial"]

        assert groups(PAPER, 1, 16) == [1, 2, 4]
        assert groups(PAPER, 1, 64) == [1, 3, 4, 5, 6]
        assert groups(WIDE, 1, 32) == [1, 2]
        assert groups(NARROW, 4, 32) == groups(PAPER, 4, 32) == [1]

    def test_columns_of_a_program(self):
        def columns(sessions, groups, heads, keys, values):
            bucket = Bucket(sessions=sessions, rows=16 * sessions, tree_rows=16, pending=16, groups=groups)
            return columns_of(bucket, heads, keys, values)

        assert [columns(1, groups, 8, 256, 256) for groups in (1, 4, 5)] == [16, 16, 32]
        assert [columns(sessions, 1, 8, 256, 256) for sessions in (4, 5)] == [16, 32]
        assert [columns(1, groups, 48, 128, 128) for groups in (1, 2)] == [32, 32]
        assert [columns(sessions, 1, 16, 128, 128) for sessions in (1, 4)] == [16, 32]
        assert columns(64, 1, 8, 256, 48) == 16  # no whole number of 32

    @pytest.mark.parametrize("shape", [PAPER, WIDE])
    @pytest.mark.parametrize("sessions", [1, 16, 64])
    @pytest.mark.parametrize("rows", [16, 32, 64, 129])
    def test_forms_that_the_shape_and_the_bucket_can_have(self, monkeypatch, shape, sessions, rows):
        def forms():
            return [type(c.tile) for c in candidates(shape, sessions, [eagle_like(rows)]) if c.kernel == "factorised"]

        assert forms() == [FactorisedTile]  # the interpreter has this one alone
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        if sessions > 1 and rows == 16:
            assert forms() == [*[StreamedTile] * 4, HeldTile]
        elif rows == 16:
            assert forms() == [HeldTile] * 3
        else:
            assert forms() == [HeldTile] * 2

    def test_exact_mode_chooses_among_serial_kernels(self):
        times = {Choice("serial"): 9.0, Choice("serial", 2): 7.0, Choice("factorised"): 5.0}
        assert best(times, "exact") == Choice("serial", 2)
        assert best(times, "fast") == Choice("factorised")

    def test_buckets(self):
        assert [bucket_rows(n) for n in (4, 16, 17, 65, 129)] == [16, 16, 32, 128, 129]


class TestGoals:
    def test_every_figure_is_a_goal_and_nan_where_unmeasured(self):
        found = goals({}, {}, {}, {}, 4e12)
        assert len(found) == 20
        assert all(math.isnan(goal.got) and not goal.met for goal in found)

    def test_ratios_are_of_the_same_round(self):
        assert ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b") == 2.0
        assert math.isnan(ratio({"a": [1.0]}, "a", "b"))

    def test_figures_come_from_their_cases(self):
        restored = {restore.FACTORS: [10.0, 10.0], restore.MODEL: [250.0, 230.0], restore.ALONE: [30.0, 10.0]}
        drifts = {"exact": [drift.Point(1, 1e-8), drift.Point(10, 2e-7)], "fast": [drift.Point(10, 2e-3)]}
        found = {g.name: g for g in goals(all_timed(), restored, drifts, {DEFAULT: [25.0]}, 4e12)}
        replay = "selected kernel against root-to-leaf replay"
        assert found[f"{replay}, paths singly, tree (2, 12, 16)"].got == 11.0
        assert found[f"{replay}, one batched launch, tree (4, 4, 32)"].got == pytest.approx(2.1)
        assert found[f"{replay}, paths singly, tree (4, 4, 32)"].met is False
        assert found["a layer, 1 session, EAGLE-like tree of 16 rows, exact"].got == 8.0
        assert found["a layer, 16 sessions x 16 rows, over the time to move the bytes once, fast"].got == 4.5
        model = f"restoring an accepted state of 8 tokens, all layers: factors against {restore.MODEL}"
        assert found[model].got == 24.0
        assert found["state after 10,000 committed steps against float64, exact"].met
        assert not found["state after 10,000 committed steps against float64, fast"].met
        assert found["129 rows, 48 heads of 128, 1 session, fast"].got == 4.5
        assert len(found) == 20

    def test_goals_name_cases_that_exist(self):
        names = {case.name for case in GOAL_CASES}
        assert case_name(sessions=16, tree="EAGLE-like tree of 16") in names
        assert case_name(sessions=1, tree="EAGLE-like tree of 129", shape=WIDE) in names


class TestSummary:
    def test_rows_carry_times_ratios_and_bandwidth(self):
        made = Run(Report(title="t", device="d"), timed=all_timed(), bandwidth=4e12)
        summarise(made)
        summarise(made)  # twice is as once
        case = GOAL_CASES[0].name
        rows = {row.name: row for row in made.report.rows if row.case == case}
        assert rows["fast"].median == 4.5
        assert rows[OVER_BEST["fast"]].median == pytest.approx(1.125)
        assert rows[OVER_BEST["exact"]].median == 1
        worst = next(row for row in made.report.rows if row.name == f"{OVER_BEST['fast']}, the worst")
        assert (worst.case, worst.median) == ("all cases", pytest.approx(1.125))
        assert made.report.notes["worst choice, fast"].startswith("1.125 of the best, ")
        assert rows["exact, bytes moved once over time"].median == pytest.approx(500.0)  # 4 MB in 8 us
        assert rows["exact, of the copy bandwidth"].median == pytest.approx(0.125)
        assert rows[f"{REPLAYS['recurrent', True]}, over fast"].median == pytest.approx(2.1)
        assert len([row for row in made.report.rows if row.case == case and row.name == "fast"]) == 1
        assert "serial" in made.report.notes[f"chosen, {case}"]
        assert made.report.notes[f"not run, {case}, a"] == "why"
        assert len(made.report.goals) == 20

    def test_errors_pass_only_within_their_tolerance(self):
        good = Errors("case", "name", 1e-6, 2e-6, 0.0, 1e-5)
        assert good.passed
        assert not good._replace(states=2e-5).passed
        assert not good._replace(outputs=math.inf).passed


class TestDrift:
    def test_passes_end_at_every_checkpoint(self):
        assert drift.checkpoints(10_000) == [1, 10, 100, 1000, 10_000]
        lengths = drift.spans(30, 8)
        assert lengths == [1, 8, 1, 8, 8, 4]

    @pytest.mark.parametrize("mode", ["exact", "fast"])
    def test_curve_of_a_tiny_shape(self, mode):
        points = drift.drift(Shape("tiny", 1, 1, 16, 16), mode, steps=20, device=DEVICE, dtype=torch.float32)
        assert [point.step for point in points] == [1, 10, 20]
        assert all(0 < point.error < 1e-5 for point in points)


class TestPictures:
    def test_both_are_drawn_and_repeatable(self, tmp_path):
        drifts = {"exact": [drift.Point(1, 1e-8), drift.Point(10, 2e-7)], "fast": [drift.Point(1, 1e-4)]}
        first = draw(tmp_path / "a", all_timed(), drifts, "GPU, 132 multiprocessors")
        second = draw(tmp_path / "b", all_timed(), drifts, "GPU, 132 multiprocessors")
        assert [path.name for path in first] == [TIMES, DRIFT]
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes()
        assert "replay, recurrent, one launch" in first[0].read_text()

    def test_nothing_is_drawn_from_nothing(self, tmp_path):
        assert draw(tmp_path, {}, {}, "GPU") == []


class TestCommand:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_is_refused_without_a_gpu(self):
        result = CliRunner().invoke(bench, ["kernels"])
        assert result.exit_code == 1
        assert "finds none here: run it where" in result.output

    @pytest.mark.parametrize("rows", ["17", "1.5", "16,200", "a"])
    def test_rows_that_no_bucket_has_are_refused(self, tmp_path, rows):
        result = CliRunner().invoke(bench, ["kernels", "--tune", str(tmp_path / "table.json"), "--tune-rows", rows])
        assert result.exit_code == 2
        assert "--tune-rows" in result.output

    def test_needs_no_service_packages(self):
        code = (
            "import sys, specla.benchmarks.__main__\n"
            "import specla.benchmarks.kernels.run, specla.benchmarks.kernels.pictures\n"
            "bad = {'grpc', 'structlog', 'google', 'tokenizers', 'safetensors', 'fla'} & set(sys.modules)\n"
            "assert not bad, bad"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
