"""Times bias, penalties and bans on cold logits, and proves them by the sampler on the CPU."""

from __future__ import annotations

import random

import numpy as np
import torch

from specla.benchmarks.kernels.timing import Graph, Work, in_turns, layers_needed
from specla.benchmarks.report import Row
from specla.kernels.gpu.adjusting import LogitEntries, adjust_logits
from specla.kernels.sampling import RowSampling, SessionSampling, adjusted_logits
from specla.kernels.sampling_params import SamplingParams

ROWS, VOCABULARY = 64, 32_000
LENGTHS = (0, 256, 2048)
"""Tokens of each session so far, half of them output: with none, every row has its bias and bans alone."""

CASE = f"penalties of {ROWS} rows of {VOCABULARY:,}"
ROUNDS = 15
_SESSIONS = 4
_ROUNDING = 2.0**-22  # relative: two units in the last place


class WrongLogitsError(RuntimeError):
    """The kernel adjusts logits otherwise than the CPU does."""


def measure_penalties(*, l2: int, device: str = "cuda") -> list[Row]:
    """Microseconds of one launch by how much text the sessions have.

    Args:
        l2: bytes of the L2 cache.
        device: where to run.

    Raises:
        WrongLogitsError: a logit differs from the CPU's.
    """
    copies = layers_needed(ROWS * VOCABULARY * 4, l2)
    draw = torch.Generator(device=device).manual_seed(5)
    logits = torch.randn(copies, ROWS, VOCABULARY, generator=draw, device=device)
    graphs = []
    for length in LENGTHS:
        entries, count = _prepared(length, device)
        _check(entries, _rows(length), device)
        work = _work(f"lists of {count:,} changes, texts of {length:,} tokens", logits, entries)
        graphs.append(Graph.capture(work))
    return [Row.of(CASE, name, samples, "us") for name, samples in in_turns(graphs, ROUNDS).items()]


def warm(device: str = "cuda") -> None:
    """Compiles, and checks one case."""
    _check(_prepared(LENGTHS[1], device)[0], _rows(LENGTHS[1]), device)


def _rows(length: int) -> RowSampling:
    """Rows of some sessions, each a root: repetition, presence, frequency, a bias and a ban."""
    draw = random.Random(length)
    params = SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 1.5},
        banned_ids=frozenset({11}),
    )
    texts = [[int(draw.random() * VOCABULARY) for _ in range(length)] for _ in range(_SESSIONS)]
    sessions = [SessionSampling(params, VOCABULARY, text[: length // 2], text[length // 2 :]) for text in texts]
    return RowSampling(sessions, [row % _SESSIONS for row in range(ROWS)], [length] * ROWS)


def _prepared(length: int, device: str) -> tuple[LogitEntries, int]:
    """Changes on the device, and how long all sessions' lists are."""
    rows = _rows(length)
    entries = LogitEntries(ROWS, VOCABULARY, _SESSIONS * (length + 2), device)
    changes = entries.changes_of(rows)
    entries.put(changes)
    return entries, len(changes.shared)


def _check(entries: LogitEntries, rows: RowSampling, device: str) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32))
    got = logits.to(device, copy=True)
    adjust_logits(got, entries)
    for row in range(ROWS):
        want = adjusted_logits(logits[row].numpy(), rows.sessions[rows.row_session[row]], [])
        if not np.allclose(got[row].cpu().numpy(), want, rtol=_ROUNDING, atol=1e-6):
            raise WrongLogitsError(f"row {row} of {ROWS} has other logits than on the CPU")


def _work(name: str, logits: torch.Tensor, entries: LogitEntries) -> Work:
    def run(count: int = logits.shape[0]) -> None:
        for i in range(count):
            adjust_logits(logits[i], entries)

    return Work(name, logits.shape[0], lambda: run(1), run)
