"""What a run has found, and the rows and notes that its report makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specla.benchmarks.kernels import restore
from specla.benchmarks.kernels.drift import Point
from specla.benchmarks.kernels.goals import goals
from specla.benchmarks.kernels.measure import BEST, Timed
from specla.benchmarks.kernels.preparation import MODES
from specla.benchmarks.report import Report, Row
from specla.kernels.gpu.selector import Mode

OVER_BEST = {mode: f"{mode}, chosen over best" for mode in MODES}
"""What the selector's choice takes, over the best of the forms measured."""


@dataclass
class Run:
    """What a run has found so far."""

    report: Report
    timed: dict[str, Timed] = field(default_factory=dict)
    drifts: dict[Mode, list[Point]] = field(default_factory=dict)
    restored: dict[str, list[float]] = field(default_factory=dict)
    sampled: dict[str, list[float]] = field(default_factory=dict)
    others: list[Row] = field(default_factory=list)
    """Of the kernels and the host's work around the recurrence."""
    bandwidth: float = float("nan")


def summarise(made: Run) -> None:
    """Rows and goals of all that was measured so far, and notes for what was chosen or left out."""
    report = made.report
    report.rows = [Row.of("device", "copy, bytes read and written", [made.bandwidth / 1e9], "GB/s")]
    for name, timed in made.timed.items():
        for contender, samples in timed.samples.items():
            report.rows.append(Row.of(name, contender, samples, "us"))
        for contender, samples in timed.samples.items():
            if contender not in {*MODES, *BEST.values()}:
                ratios = [s / f for s, f in zip(samples, timed.samples["fast"], strict=True)]
                report.rows.append(Row.of(name, f"{contender}, over fast", ratios, "x"))
        for mode in MODES:
            samples = timed.samples[mode]
            ratios = [c / b for c, b in zip(samples, timed.samples[BEST[mode]], strict=True)]
            report.rows.append(Row.of(name, OVER_BEST[mode], ratios, "x"))
            rate = [timed.once / us / 1e3 for us in samples]
            report.rows.append(Row.of(name, f"{mode}, bytes moved once over time", rate, "GB/s"))
            share = [1e9 * r / made.bandwidth for r in rate]
            report.rows.append(Row.of(name, f"{mode}, of the copy bandwidth", share, "x"))
        for candidate, us in timed.candidates.items():
            report.rows.append(Row.of(name, f"form measured before: {candidate}", [us], "us"))
        chosen = ", ".join(f"{mode}: {kernel} (best: {timed.best[mode]})" for mode, kernel in timed.chosen.items())
        report.notes[f"chosen, {name}"] = (
            f"{chosen}; {timed.accepted} rows accepted and pending, {timed.layers} layers, {timed.once} bytes at least"
        )
        for rival, reason in timed.skipped.items():
            report.notes[f"not run, {name}, {rival}"] = reason
    for mode in MODES:
        worst = max(
            (row for row in report.rows if row.name == OVER_BEST[mode]), key=lambda row: row.median, default=None
        )
        if worst is not None:
            report.rows.append(replace(worst, case="all cases", name=f"{OVER_BEST[mode]}, the worst"))
            report.notes[f"worst choice, {mode}"] = f"{worst.median:.3f} of the best, {worst.case}"
    for rival, samples in made.restored.items():
        report.rows.append(Row.of(restore.CASE, rival, samples, "us"))
    for mode, points in made.drifts.items():
        for point in points:
            row = Row.of("drift of the state", f"{mode}, {point.step} tokens", [point.error], "relative error")
            report.rows.append(row)
    for config, samples in made.sampled.items():
        report.rows.append(Row.of("sampling 64 rows of 32,000, top-p", config, samples, "us"))
    report.rows += made.others
    report.goals = goals(made.timed, made.restored, made.drifts, made.sampled, made.bandwidth)
