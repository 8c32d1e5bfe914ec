"""Every figure that was asked of whole passes; what was not measured is NaN and so not met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specla.benchmarks.kernels.goals import ratio
from specla.benchmarks.kernels.preparation import MODES
from specla.benchmarks.report import Goal
from specla.benchmarks.target_pass.cases import ACCEPTED, Case
from specla.kernels.gpu.selector import Mode

ONE_MS, ONE_MS_AT_LEAST = 0.88, 1.15
BATCH = (16, 16)
BATCH_TIMES, BATCH_MS = 1.45, 1.95
THROUGHPUT = (64, 8)
THROUGHPUT_TIMES = 1.8
HOST_US = 60.0
MEMORY_TIMES = 1.4
PREFILL_TOKENS, PREFILL_TIMES = 8192, 1.0
_ROWS = {16: 1.06, 32: 1.12, 64: 1.35}


@dataclass
class Measured:
    """What a run has found so far.

    Attributes:
        passes: microseconds by mode, then case name; sample r of all cases of a mode is from the same round.
        host: microseconds that the host adds to a pass, by mode.
        memory: bytes a session over its bare state, by mode.
        prefill: milliseconds by name, ours and the library's; sample r from the same round.
    """

    passes: dict[Mode, dict[str, list[float]]] = field(default_factory=dict)
    host: dict[Mode, list[float]] = field(default_factory=dict)
    memory: dict[Mode, float] = field(default_factory=dict)
    prefill: dict[str, list[float]] = field(default_factory=dict)


OURS, LIBRARY = "ours", "flash-linear-attention"


def goals(found: Measured) -> list[Goal]:
    """All goals, each in both modes where the mode matters."""
    made = []

    def add(name: str, want: float, got: float, unit: str, *, least: bool = False) -> None:
        made.append(Goal(name=name, want=want, got=got, unit=unit, sense="at least" if least else "at most"))

    for mode in MODES:
        samples = found.passes.get(mode, {})

        def name_of(sessions: int, rows: int, mode: Mode = mode) -> str:
            return Case(sessions, rows, mode).name

        def median(case: str, samples: Mapping[str, Sequence[float]] = samples) -> float:
            return statistics.median(samples[case]) / 1e3 if case in samples else math.nan

        one = name_of(1, 1)
        add(f"one-token pass, 1 session, {mode}", ONE_MS, median(one), "ms")
        add(f"one-token pass, 1 session, at the least, {mode}", ONE_MS_AT_LEAST, median(one), "ms")
        for rows, want in _ROWS.items():
            add(f"{rows} rows over one-token pass, 1 session, {mode}", want, ratio(samples, name_of(1, rows), one), "x")
        batch, batch_one = name_of(*BATCH), name_of(BATCH[0], 1)
        add(f"{batch} over {batch_one}, {mode}", BATCH_TIMES, ratio(samples, batch, batch_one), "x")
        add(f"{batch}, {mode}", BATCH_MS, median(batch), "ms")
        many, many_one = name_of(*THROUGHPUT), name_of(THROUGHPUT[0], 1)
        gain = ACCEPTED * ratio(samples, many_one, many)
        add(f"{many}: {ACCEPTED} tokens a pass over plain decoding, {mode}", THROUGHPUT_TIMES, gain, "x", least=True)
        host = statistics.median(found.host[mode]) if mode in found.host else math.nan
        add(f"host time on the critical path of an iteration, 1 session x 16 rows, {mode}", HOST_US, host, "us")
        add(
            f"memory a session at 16 rows over its bare state, 64 sessions, {mode}",
            MEMORY_TIMES,
            found.memory.get(mode, math.nan),
            "x",
        )
    faster = ratio(found.prefill, LIBRARY, OURS)
    add(f"prefill, {PREFILL_TOKENS:,} tokens: the library's time over ours", PREFILL_TIMES, faster, "x", least=True)
    return made
