"""Every figure that was asked for, from what was measured; what was not measured is NaN and so not met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from specla.benchmarks.kernels import drift, restore
from specla.benchmarks.kernels.cases import DEEP, WIDE_TREE, Case
from specla.benchmarks.kernels.measure import REPLAYS, RING, STAND_ALONE, Timed
from specla.benchmarks.kernels.sampler import DEFAULT
from specla.benchmarks.kernels.shapes import PAPER, WIDE
from specla.benchmarks.report import Goal
from specla.kernels.gpu.selector import Mode

SAMPLER_US = 30.0
_REPLAY_TIMES = {(DEEP, False): 4.0, (DEEP, True): 1.5, (WIDE_TREE, False): 12.0, (WIDE_TREE, True): 2.0}
_RESTORE_TIMES = {restore.MODEL: 20.0, restore.ALONE_AT_ONCE: 2.0}  # the rival's better form: one launch
_LAYER_US: dict[Mode, dict[int, float]] = {
    "fast": {16: 6.0, 32: 7.0, 64: 10.0},
    "exact": {16: 10.0, 32: 12.0, 64: 16.0},
}
_COMMIT_TIMES = 1.4
_ONCE_TIMES = 1.3
_LARGEST_US = 40.0


def case_name(*, sessions: int, tree: str, shape: object = PAPER) -> str:
    """The name of a goal's case."""
    return Case(shape=shape, sessions=sessions, tree=tree).name  # type: ignore[arg-type]


def ratio(samples: Mapping[str, Sequence[float]] | None, slow: str, fast: str) -> float:
    """The median over rounds of slow / fast; NaN where one was not measured."""
    if samples is None or slow not in samples or fast not in samples:
        return math.nan
    return statistics.median(s / f for s, f in zip(samples[slow], samples[fast], strict=True))


def goals(
    timed: Mapping[str, Timed],
    restored: Mapping[str, Sequence[float]],
    drifts: Mapping[Mode, Sequence[drift.Point]],
    sampled: Mapping[str, Sequence[float]],
    bandwidth: float,
) -> list[Goal]:
    """All goals, in the order of the table that set them.

    Args:
        timed: cases by name.
        restored: microseconds by name.
        drifts: curves by mode.
        sampled: microseconds of sampling 64 rows, by configuration.
        bandwidth: bytes a second of a plain copy.
    """

    def samples(case: str) -> Mapping[str, Sequence[float]] | None:
        return timed[case].samples if case in timed else None

    def median(case: str, mode: Mode) -> float:
        return statistics.median(timed[case].samples[mode]) if case in timed else math.nan

    found = []
    for (tree, batched), want in _REPLAY_TIMES.items():
        how = "one batched launch" if batched else "paths singly"
        got = ratio(samples(case_name(sessions=1, tree=tree)), REPLAYS["recurrent", batched], "fast")
        name = f"selected kernel against root-to-leaf replay, {how}, {tree}"
        found.append(Goal(name=name, want=want, got=got, unit="x", sense="at least"))
    for rival, want in _RESTORE_TIMES.items():
        name = f"restoring an accepted state of {restore.TOKENS} tokens, all layers: factors against {rival}"
        got = ratio(restored, rival, restore.FACTORS)
        found.append(Goal(name=name, want=want, got=got, unit="x", sense="at least"))
    sixteen = case_name(sessions=16, tree="EAGLE-like tree of 16")
    for against, label in (("fast", "deferred"), (RING["fast"], "deferred with the ring")):
        name = f"{label} against stand-alone update at the commit boundary, 16 sessions"
        got = ratio(samples(sixteen), STAND_ALONE["fast"], against)
        found.append(Goal(name=name, want=_COMMIT_TIMES, got=got, unit="x", sense="at least"))
    for mode, wanted in _LAYER_US.items():
        for rows, want in wanted.items():
            got = median(case_name(sessions=1, tree=f"EAGLE-like tree of {rows}"), mode)
            name = f"a layer, 1 session, EAGLE-like tree of {rows} rows, {mode}"
            found.append(Goal(name=name, want=want, got=got, unit="us", sense="at most"))
    for sessions in (16, 64):
        case = case_name(sessions=sessions, tree="EAGLE-like tree of 16")
        floor = timed[case].once / bandwidth * 1e6 if case in timed else math.nan
        name = f"a layer, {sessions} sessions x 16 rows, over the time to move the bytes once, fast"
        found.append(Goal(name=name, want=_ONCE_TIMES, got=median(case, "fast") / floor, unit="x", sense="at most"))
    largest = case_name(sessions=1, tree="EAGLE-like tree of 129", shape=WIDE)
    name = "129 rows, 48 heads of 128, 1 session, fast"
    found.append(Goal(name=name, want=_LARGEST_US, got=median(largest, "fast"), unit="us", sense="at most"))
    got = statistics.median(sampled[DEFAULT]) if DEFAULT in sampled else math.nan
    found.append(Goal(name="sampling 64 rows of 32,000, top-p", want=SAMPLER_US, got=got, unit="us", sense="at most"))
    for mode, limit in drift.WANTED.items():
        name = f"state after {drift.STEPS:,} committed steps against float64, {mode}"
        got = drifts[mode][-1].error if drifts.get(mode) else math.nan
        found.append(Goal(name=name, want=limit, got=got, unit="relative error", sense="at most"))
    return found
