"""Reports: medians and quartiles, goals that can fail, JSON of the promised shape, no paths in the command."""

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from specla.benchmarks import report
from specla.benchmarks.options import _writable
from specla.benchmarks.report import Goal, Report, Row, command_line, too_few
from specla.client.cli.main import app


def test_rows_are_medians_with_quartiles() -> None:
    row = Row.of("case", "name", [5.0, 1.0, 2.0, 3.0, 4.0], "ms")
    assert (row.median, row.low, row.high, row.samples) == (3.0, 1.5, 4.5, 5)
    few = Row.of("case", "name", [3.0, 1.0], "ms")
    assert (few.median, few.low, few.high) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no samples"):
        Row.of("case", "name", [], "ms")


@pytest.mark.parametrize(
    ("got", "sense", "met"),
    [(1.4, "at most", True), (1.41, "at most", False), (1.25, "at least", False), (1.4, "at least", True)],
)
def test_goals_are_met_or_not(got: float, sense: str, met: bool) -> None:
    assert Goal(name="g", want=1.4, got=got, unit="x", sense=sense).met is met  # type: ignore[arg-type]


@pytest.mark.parametrize("sense", ["at most", "at least"])
def test_a_figure_that_is_no_number_meets_no_goal(sense: str) -> None:
    assert not Goal(name="g", want=1.0, got=math.nan, unit="x", sense=sense).met  # type: ignore[arg-type]


def test_json_holds_rows_goals_and_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/specla", "bench", "passes", "--target", "/some/where/models"])
    made = Report(title="t", device="d")
    made.rows.append(Row.of("c", "n", [1.0], "ms"))
    made.goals.append(Goal(name="g", want=1.0, got=2.0, unit="x", sense="at most"))
    made.write(tmp_path / "deep" / "t.json")
    read = json.loads((tmp_path / "deep" / "t.json").read_text())
    assert read["command"] == command_line() == "specla bench passes --target models"
    assert read["goals"] == [{"name": "g", "want": 1.0, "got": 2.0, "unit": "x", "sense": "at most", "met": False}]
    assert read["rows"][0]["median"] == 1.0
    assert "python" in read["versions"]
    assert not made.none_missed


def test_goals_of_too_few_prompts_are_not_judged_and_the_output_says_why() -> None:
    made = Report(title="t", device="d", unjudged=too_few(1, 8))
    made.goals.append(Goal(name="g", want=1.0, got=2.0, unit="x", sense="at least"))
    out = Console(file=io.StringIO(), width=200)
    made.show(out)
    assert isinstance(out.file, io.StringIO)
    assert out.file.getvalue().splitlines()[-2:] == [
        "not judged  g: 2 x, wanted at least 1",
        "Goals are not judged: 1 prompt is too few, 8 or more are needed.",
    ]
    kept = made.to_json()
    assert kept["goals"] == [{"name": "g", "want": 1.0, "got": 2.0, "unit": "x", "sense": "at least", "met": None}]
    assert kept["notes"] == {"goals not judged": "1 prompt is too few, 8 or more are needed"}
    assert made.none_missed
    assert too_few(8, 8) == ""


def test_a_short_run_of_the_drafters_judges_nothing(tiny_target: Path) -> None:
    few = ["--limit", "1", "--rounds", "1", "--max-tokens", "4", "--temperatures", "0", "--threads", "1"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "drafters", "--target", str(tiny_target), *few])
    assert done.exit_code == 0, done.output
    assert "Goals are not judged: 1 prompt of each kind is too few" in done.stdout
    assert len(re.findall("^not judged  ", done.stdout, re.M)) == 3
    assert not re.search("^(NOT )?met  ", done.stdout, re.M)


def test_a_commit_that_is_named_counts_before_what_git_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLA_COMMIT", "1a2b3c4")
    assert report.versions()["commit"] == "1a2b3c4"
    monkeypatch.delenv("SPECLA_COMMIT")
    assert report.versions()["commit"] != "1a2b3c4"
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    assert report.versions()["commit"] == "unknown"


def test_a_place_that_takes_nothing_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    assert _writable(kept) == kept
    assert kept.read_text() == "{}"
    new = tmp_path / "folder" / "new.json"
    assert _writable(new) == new
    assert not new.exists()
    with pytest.raises(typer.BadParameter, match="kept"):
        _writable(kept / "below.json")
