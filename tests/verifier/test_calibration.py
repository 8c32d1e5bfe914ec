"""Learning what a drafter's log-probabilities are worth."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.kernels.topology import Topology
from specla.verifier_service.calibration import BINS, Calibrator, _rising
from specla.verifier_service.intake import Draft


def draft(tokens: list[int], parents: list[int], log_probs: list[float]) -> Draft:
    return Draft(
        seq=1,
        base_len=1,
        root_token=0,
        assumed=(),
        tokens=tuple(tokens),
        parents=tuple(parents),
        log_probs=tuple(log_probs),
        topology=Topology.from_wire(parents, tokens),
    )


def test_a_drafter_is_believed_at_first() -> None:
    sure, unsure, none = Calibrator().probabilities([math.log(0.93), math.log(0.25), -math.inf])
    assert sure == pytest.approx(0.925)
    assert unsure == pytest.approx(0.25)
    assert none < 0.01


def test_a_boaster_is_believed_no_more() -> None:
    calibrator = Calibrator(Calibrator())
    for _ in range(60):
        calibrator.observe(draft([5], [-1], [-0.001]), [6])
    assert calibrator.probabilities([-0.001])[0] < 0.05


def test_a_modest_drafter_is_trusted_more() -> None:
    calibrator = Calibrator(Calibrator())
    for _ in range(60):
        calibrator.observe(draft([5], [-1], [math.log(0.15)]), [5])
    assert calibrator.probabilities([math.log(0.15)])[0] > 0.8
    assert calibrator.probabilities([math.log(0.9)])[0] > 0.8  # never less than for less confidence


def test_rates_come_near_the_true_ones() -> None:
    chance, calibrator = random.Random(1), Calibrator(Calibrator())
    for _ in range(3000):
        calibrator.observe(draft([5], [-1], [math.log(0.75)]), [5 if chance.random() < 0.35 else 6])
    assert calibrator.probabilities([math.log(0.75)])[0] == pytest.approx(0.35, abs=0.15)


def test_only_children_of_accepted_candidates_are_judged() -> None:
    calibrator = Calibrator()
    high, low = math.log(0.99), math.log(0.005)
    #  root -> 5 -> 7, root -> 6 -> 8; the target says 5, then 9
    calibrator.observe(draft([5, 6, 7, 8], [-1, -1, 0, 1], [high, high, low, high]), [5, 9])
    assert calibrator._trials[-1] == pytest.approx(2, abs=0.01)  # 5 right, 6 wrong; 8 was never reached
    assert calibrator._hits[-1] == pytest.approx(1, abs=0.01)
    assert calibrator._trials[0] == 1
    assert calibrator._hits[0] == 0


def test_a_new_session_starts_from_what_the_link_has_learnt() -> None:
    link = Calibrator()
    first = Calibrator(link)
    for _ in range(100):
        first.observe(draft([5], [-1], [-0.001]), [6])
    assert Calibrator(link).probabilities([-0.001])[0] < 0.1


@given(st.lists(st.tuples(st.integers(0, 19), st.booleans()), max_size=200))
def test_rates_rise_with_confidence(judged: list[tuple[int, bool]]) -> None:
    calibrator = Calibrator(Calibrator())
    for step, hit in judged:
        calibrator.observe(draft([5], [-1], [math.log((step + 0.5) / 20)]), [5 if hit else 6])
    rates = calibrator.rates()
    assert len(rates) == BINS
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(rates))
    assert all(0 <= rate <= 1 for rate in rates)


def test_pooling_keeps_the_weighted_mean() -> None:
    assert _rising([0.1, 0.5, 0.3, 0.9], [1, 1, 3, 1]) == pytest.approx([0.1, 0.35, 0.35, 0.9])
