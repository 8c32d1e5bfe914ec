"""One benchmark's result: rows and goals, with device, versions, command and date; as JSON and as a table."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("specla", "torch", "triton", "numpy", "grpcio", "protobuf", "tokenizers", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured thing: the median of its samples, with the spread."""

    case: str
    name: str
    median: float
    low: float
    high: float
    unit: str
    samples: int

    @classmethod
    def of(cls, case: str, name: str, samples: Sequence[float], unit: str) -> "Row":
        """The median and the first and third quartile of `samples` (with fewer than four: least and greatest)."""
        if not samples:
            raise ValueError(f"no samples for {case}/{name}")
        ordered = sorted(samples)
        low, high = ordered[0], ordered[-1]
        if len(ordered) >= 4:
            low, _, high = statistics.quantiles(ordered, n=4)
        median = statistics.median(ordered)
        return cls(case=case, name=name, median=median, low=low, high=high, unit=unit, samples=len(ordered))


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that was asked for, met or not."""

    name: str
    want: float
    got: float
    unit: str
    sense: Literal["at most", "at least"]

    @property
    def met(self) -> bool:
        """Whether `got` is on the wanted side of `want`; a NaN is on neither."""
        return self.got <= self.want if self.sense == "at most" else self.got >= self.want


@dataclass(kw_only=True)
class Report:
    """Rows and goals of one run.

    Attributes:
        unjudged: why its goals are not judged; empty where they are.
    """

    title: str
    device: str
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: dict[str, str | int | float | bool] = field(default_factory=dict)
    unjudged: str = ""

    def to_json(self) -> dict[str, object]:
        """The shape kept under benchmarks/results/; what was not measured, or not judged, is null."""
        return {
            "title": self.title,
            "device": self.device,
            "versions": versions(),
            "command": command_line(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "notes": self.notes | ({"goals not judged": self.unjudged} if self.unjudged else {}),
            "rows": [asdict(row) for row in self.rows],
            "goals": [
                {
                    **asdict(goal),
                    "got": None if math.isnan(goal.got) else goal.got,
                    "met": None if self.unjudged else goal.met,
                }
                for goal in self.goals
            ],
        }

    def write(self, path: Path) -> None:
        """Write the JSON, creating its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def show(self, console: Console) -> None:
        """Print rows and goals as tables."""
        table = Table(title=self.title, caption=self.device)
        for column in ("case", "name", "median", "spread", "unit"):
            table.add_column(column, justify="left" if column in ("case", "name", "unit") else "right")
        for row in self.rows:
            table.add_row(row.case, row.name, f"{row.median:.4g}", f"{row.low:.4g} .. {row.high:.4g}", row.unit)
        console.print(table)
        for goal in self.goals:
            mark = "not judged" if self.unjudged else "[green]met[/]" if goal.met else "[red]NOT met[/]"
            console.print(f"{mark}  {goal.name}: {goal.got:.4g} {goal.unit}, wanted {goal.sense} {goal.want:.4g}")
        if self.unjudged:
            console.print(f"Goals are not judged: {self.unjudged}.")

    @property
    def none_missed(self) -> bool:
        """Whether every goal is met, or none is judged."""
        return bool(self.unjudged) or all(goal.met for goal in self.goals)


def too_few(prompts: int, least: int, kind: str = "") -> str:
    """Why goals over so few prompts (of a kind) are not judged; nothing where they are enough."""
    if prompts >= least:
        return ""
    counted = f"1 prompt{kind} is" if prompts == 1 else f"{prompts} prompts{kind} are"
    return f"{counted} too few, {least} or more are needed"


def command_line() -> str:
    """The command as a user would type it: no paths of this machine."""
    return " ".join(["specla", *(Path(arg).name if os.path.isabs(arg) else arg for arg in sys.argv[1:])])


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, and the commit."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["commit"] = commit()
    return found


def commit() -> str:
    """What SPECLA_COMMIT names (for copies of a checkout that leave its git behind), or as git describes it."""
    named = os.environ.get("SPECLA_COMMIT")
    if named:
        return named
    if shutil.which("git") is not None:
        git = subprocess.run(
            ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
        if git.returncode == 0:
            return git.stdout.strip()
    return "unknown"


def cpu_name() -> str:
    """The processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
