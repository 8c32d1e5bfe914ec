"""Counted chances: what they start from, how they learn, how they forget."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.drafter_service.calibration import CELLS, Calibration, cell_of


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 32), st.floats(1e-6, 1.0))
def test_every_guess_has_a_class_with_a_chance_inside_zero_and_one(
    depth: int, rank: int, length: int, share: float
) -> None:
    cell = cell_of(depth, rank, length, share)
    assert 0 <= cell < CELLS
    assert 0 < Calibration().chance(cell) < 1


def test_classes_order_longer_matches_and_larger_shares() -> None:
    start = Calibration()
    assert start.chance(cell_of(0, 0, 20, 1.0)) > start.chance(cell_of(0, 0, 2, 1.0))
    assert start.chance(cell_of(0, 0, 8, 1.0)) > start.chance(cell_of(0, 0, 8, 0.4))
    assert start.chance(cell_of(0, 0, 8, 1.0)) > start.chance(cell_of(0, 1, 8, 1.0))
    assert len({cell_of(d, r, n, s) for d in (0, 1, 2) for r in (0, 1, 2) for n in (1, 9) for s in (0.1, 1.0)}) == 36


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_learns_a_rate(rate: float) -> None:
    rng, calibration, cell = random.Random(0), Calibration(), cell_of(0, 0, 5, 1.0)
    other = calibration.chance(cell + 1)
    for _ in range(400):
        calibration.count(cell, rng.random() < rate)
    assert calibration.chance(cell) == pytest.approx(rate, abs=0.12)
    assert calibration.chance(cell + 1) == other


def test_forgets() -> None:
    calibration, cell = Calibration(memory=32, trust=4), cell_of(0, 0, 5, 1.0)
    for _ in range(1000):
        calibration.count(cell, True)
    for _ in range(60):
        calibration.count(cell, False)
    assert calibration.chance(cell) < 0.2


def test_a_session_starts_from_what_the_process_has_learnt_and_departs_from_it() -> None:
    process, cell = Calibration(memory=2000), cell_of(0, 0, 5, 1.0)
    for _ in range(900):
        Calibration(process).count(cell, True)
    session = Calibration(process)
    assert session.chance(cell) > 0.95
    for _ in range(100):
        session.count(cell, False)
    assert session.chance(cell) < 0.2
    assert Calibration(process).chance(cell) > 0.8
