"""Writes the measured figures into README.md: each from benchmarks/results/*.json, none by hand.

    python tools/readme_figures.py            rewrite the marked block
    python tools/readme_figures.py --check    write nothing; exit 1 if the block is not what the results say

A result holds {title, device, versions, command, date, notes, rows, goals}: see docs/architecture.md.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_MET = {True: "yes", False: "**no**", None: "not judged"}
_MOST_GOALS = 8  # of one result that stand open
_MOST_ROWS = 24  # of one result in README; all of them, and what they were made from, stand in its JSON


def _rank(path: Path) -> tuple[str, int, str]:
    """A result's place: drafters-h200.json before drafters-16-h200.json, a case of its own."""
    return path.name.split("-")[0], path.name.count("-"), path.name


def figure(value: float) -> str:
    """A number of four significant digits at most: 0.9712, 12.4, 1520, 3.062e-06."""
    text = f"{value:.4g}"
    return f"{value:.0f}" if "e" in text and 1 <= abs(value) < 1e9 else text


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def section(name: str, result: dict[str, Any]) -> list[str]:
    """One result: what ran where, every goal met or not, and the first ratios; all rows of one that has neither."""
    versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items() if key in ("python", "torch"))
    lines = [f"### {result['title']}", "", f"`{result['command']}`, {result['date']}, {result['device']} ({versions})"]
    goals = result["goals"]
    if len(goals) > _MOST_GOALS:
        missed = [goal for goal in goals if goal["met"] is False]
        lines += ["", f"{sum(goal['met'] is True for goal in goals)} of {len(goals)} goals are met."]
        lines += ["", *goal_table(missed)] if missed else []
        lines += ["", *folded("goals", goal_table(goals))]
    elif goals:
        lines += ["", *goal_table(goals)]
    failed = [f"- {what}: {value}" for what, value in result["notes"].items() if str(value).startswith("failed:")]
    lines += ["", "Failed in this run:", "", *failed] if failed else []
    ratios = [row for row in result["rows"] if row["unit"] == "x" and not row["low"] == row["high"] == 1]
    if ratios:
        more = len(result["rows"]) - len(ratios[:_MOST_ROWS])
        note = ["", f"{more} more rows in `benchmarks/results/{name}`."] if more else []
        lines += ["", *folded("ratios", row_table(ratios[:_MOST_ROWS]) + note)]
    elif not goals:
        counts = [f"{name}: {value:,}" for name, value in result["notes"].items() if isinstance(value, int)]
        lines += ["", *row_table(result["rows"]), "", "; ".join(counts)]
    return [*lines, ""]


def goal_table(goals: list[dict[str, Any]]) -> list[str]:
    """What was asked for, what was measured."""
    rows = []
    for goal in goals:
        wanted = f"{goal.get('sense', '')} {figure(goal['want'])} {goal['unit']}".strip()
        got = "not measured" if goal["got"] is None else f"{figure(goal['got'])} {goal['unit']}".strip()
        rows.append([goal["name"], wanted, got, _MET[goal["met"]]])
    return table(["asked for", "goal", "measured", "met"], rows)


def row_table(rows: list[dict[str, Any]]) -> list[str]:
    """Medians with their spread."""
    cells = [
        [
            row["case"],
            row["name"],
            figure(row["median"]),
            f"{figure(row['low'])} .. {figure(row['high'])}",
            row["unit"],
        ]
        for row in rows
    ]
    return table(["case", "", "median", "spread", "unit"], cells)


def folded(summary: str, lines: list[str]) -> list[str]:
    """Lines that are shown on a click."""
    return [f"<details><summary>{summary}</summary>", "", *lines, "", "</details>"]


def block(results: Path) -> str:
    """What stands between the marks."""
    lines = [BEGIN, ""]
    for path in sorted(results.glob("*.json"), key=_rank):
        lines += section(path.name, json.loads(path.read_text()))
    if len(lines) == 2:
        lines += ["Nothing has been measured yet.", ""]
    return "\n".join([*lines, END])


def with_figures(readme: str, figures: str) -> str:
    """README with the marked block replaced; ValueError if it has no marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no block between {BEGIN} and {END}")
    return before + figures + after


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    readme = path.read_text()
    current = with_figures(readme, block(ROOT / "benchmarks/results"))
    if not check:
        path.write_text(current)
        return 0
    if current != readme:
        print("README.md does not show the figures of benchmarks/results: run `make readme-figures`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
