"""Drawings of a run: times of kernels and rivals by tree, and drift of the state."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specla.benchmarks.kernels.drift import WANTED, Point
from specla.benchmarks.kernels.measure import BEST, RING, STAND_ALONE, Timed
from specla.benchmarks.kernels.shapes import PAPER
from specla.kernels.gpu.selector import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES, DRIFT = "kernel-times.svg", "kernel-drift.svg"
_COLOURS = {"exact": "#2b6cb0", "fast": "#2f855a"}
_OTHERS = ("#b7791f", "#c53030", "#805ad5", "#718096", "#d69e2e", "#97266d", "#4a5568")
_SETTINGS: Any = {"svg.hashsalt": "specla", "svg.fonttype": "none", "font.size": 9.0}


def draw(folder: Path, timed: Mapping[str, Timed], drifts: Mapping[Mode, Sequence[Point]], device: str) -> list[Path]:
    """Writes what there is data for into `folder`; returns the files."""
    import matplotlib

    matplotlib.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    cases = [t for t in timed.values() if t.case.shape == PAPER and t.case.sessions == 1 and len(t.case.replay) == 1]
    with matplotlib.rc_context(_SETTINGS):
        if cases:
            written.append(_times(folder / TIMES, cases, device))
        if drifts:
            written.append(_drift(folder / DRIFT, drifts, device))
    return written


def _times(path: Path, cases: Sequence[Timed], device: str) -> Path:
    """Grouped bars: a group a tree, a bar a kernel, logarithmic microseconds."""
    hidden = {*STAND_ALONE.values(), *RING.values(), *BEST.values()}
    names = list(dict.fromkeys(name for t in cases for name in t.samples if not (name in hidden or "ready" in name)))
    figure, axes = _page(10.0)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        found = [(at, t.samples[name]) for at, t in enumerate(cases) if name in t.samples]
        heights = [statistics.median(samples) for _, samples in found]
        places = [at + (i - (len(names) - 1) / 2) * width for at, _ in found]
        colour = _COLOURS.get(name, _OTHERS[i % len(_OTHERS)])
        axes.bar(places, heights, width, label=name, color=colour)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [t.case.tree.replace(" tree of", "\ntree of") for t in cases])
    axes.set_ylabel("microseconds a layer, commit included")
    axes.set_title(f"Verifying one session's tree, {PAPER.name}, {device.split(',')[0]}")
    return _saved(figure, axes, path)


def _drift(path: Path, drifts: Mapping[Mode, Sequence[Point]], device: str) -> Path:
    """Relative error of the state against committed tokens, both logarithmic, with what is allowed."""
    figure, axes = _page(6.5)
    for mode, points in drifts.items():
        axes.plot([p.step for p in points], [p.error for p in points], marker="o", label=mode, color=_COLOURS[mode])
        axes.axhline(WANTED[mode], linestyle=":", color=_COLOURS[mode])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("committed tokens")
    axes.set_ylabel("relative error of the state (dotted: allowed)")
    axes.set_title(f"Drift against float64, {device.split(',')[0]}")
    return _saved(figure, axes, path)


def _page(width: float) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def _saved(figure: Any, axes: Axes, path: Path) -> Path:
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    return path
