"""Forecasts of pass times, and the choice of candidates that are worth a pass."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.verifier_service.cost_model import (
    NodeBudget,
    PassTimes,
    Prospect,
    choose,
    measure,
    path_chances,
    worth_drafting,
)

TABLE = {1: 0.010, 2: 0.011, 5: 0.013, 9: 0.020, 17: 0.034}


def test_forecasts_are_linear_between_measurements_and_beyond() -> None:
    times = PassTimes(TABLE)
    assert times.predict(5) == pytest.approx(0.013)
    assert times.predict(3) == pytest.approx(0.011 + 0.002 / 3)
    assert times.predict(33) == pytest.approx(0.034 + 16 * 0.014 / 8)
    assert PassTimes({1: 0.01}).predict(40) == pytest.approx(0.01)


def test_the_shortest_of_a_few_rounds_counts() -> None:
    rounds = iter([{1: 3.0, 2: 5.0}, {1: 2.0, 2: 9.0}, {1: 4.0, 2: 4.0}, {1: 9.0, 2: 9.0}])
    times = measure(lambda: next(rounds), lambda: 0.0)
    assert (times.predict(1), times.predict(2)) == (2.0, 4.0)


def test_a_busy_machine_is_measured_once() -> None:
    rounds, clock = iter([{1: 3.0}]), iter([0.0, 5.0, 5.0, 5.0])
    assert measure(lambda: next(rounds), lambda: next(clock)).predict(1) == 3.0


def test_forecasts_follow_the_load_of_the_machine() -> None:
    times = PassTimes(TABLE)
    for _ in range(10):
        times.observe(1, 1, 0.020)
    assert times.predict(1) == pytest.approx(0.020, rel=0.25)
    assert times.predict(9) == pytest.approx(0.040, rel=0.25)


def test_one_disturbed_pass_changes_no_forecast() -> None:
    times = PassTimes(TABLE)
    for _ in range(7):
        times.observe(1, 1, 0.010)
    before = times.predict(5)
    assert times.observe(1, 1, 1.0) == pytest.approx(0.040)
    assert times.predict(5) == pytest.approx(before, rel=0.02)


def test_a_wrong_measurement_is_corrected_while_others_stay() -> None:
    times = PassTimes(TABLE)
    for _ in range(300):
        times.observe(1, 1, 0.010)
        times.observe(5, 1, 0.010)
        times.observe(9, 1, 0.020)
    assert times.predict(5) / times.predict(1) == pytest.approx(1.0, rel=0.1)
    assert times.predict(9) / times.predict(1) == pytest.approx(2.0, rel=0.1)


def test_fewer_rows_never_take_longer() -> None:
    times = PassTimes({1: 0.3, 2: 0.4, 3: 0.1, 5: 0.35, 9: 0.2})
    forecasts = [times.predict(rows) for rows in range(1, 20)]
    assert forecasts == sorted(forecasts)
    assert forecasts[0] == 0.1


def test_what_drafts_cost_is_not_taken_for_load() -> None:
    """Measured as free, they are not: after a few passes their price is known, and that of plain passes unchanged."""
    times = PassTimes({1: 0.010, 2: 0.010, 3: 0.010})
    times.observe(1, 1, 0.010)
    for _ in range(6):
        times.observe(3, 1, 0.030)
    assert times.predict(1) == pytest.approx(0.010)
    assert times.predict(3) == pytest.approx(0.030, rel=0.2)
    assert choose([chain(0.5, 0.5)], times, 99) != [[0, 1]]


def chain(*chances: float, max_depth: int = 99) -> Prospect:
    return Prospect(list(range(-1, len(chances) - 1)), chances, max_depth)


def test_certain_candidates_are_kept_and_hopeless_ones_left_out() -> None:
    times = PassTimes(TABLE)
    assert choose([chain(0.95, 0.95, 0.95, 0.95)], times, 99) == [[0, 1, 2, 3]]
    assert choose([chain(0.05, 0.05, 0.05)], times, 99) == [[]]


def test_nothing_is_kept_deeper_than_could_be_committed() -> None:
    assert choose([chain(0.99, 0.99, 0.99, max_depth=2)], PassTimes(TABLE), 99) == [[0, 1]]
    assert choose([chain(0.99, max_depth=0)], PassTimes(TABLE), 99) == [[]]


def test_rows_of_a_pass_are_limited_over_all_sessions() -> None:
    kept = choose([chain(0.99, 0.98), chain(0.97, 0.96), chain()], PassTimes(TABLE), 5)
    assert kept == [[0, 1], [], []]


trees = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1, allow_nan=False)), min_size=0, max_size=8).map(
    lambda nodes: Prospect([seed % (i + 1) - 1 for i, (seed, _) in enumerate(nodes)], [p for _, p in nodes], 99)
)


@given(st.lists(trees, min_size=1, max_size=2))
def test_no_closed_set_yields_more_tokens_a_second(prospects: list[Prospect]) -> None:
    times = PassTimes(TABLE)
    kept = choose(prospects, times, 99)
    nodes = [(i, n) for i, prospect in enumerate(prospects) for n in range(len(prospect.parents))]

    def reach(i: int, n: int) -> float:
        parents, chances, _ = prospects[i]
        return chances[n] * (reach(i, parents[n]) if parents[n] >= 0 else 1.0)

    def rate(chosen: set[tuple[int, int]]) -> float:
        sessions = len(prospects)
        return (sessions + sum(reach(*node) for node in chosen)) / times.predict(sessions + len(chosen), sessions)

    mine = {(i, n) for i, rows in enumerate(kept) for n in rows}
    for i, n in mine:
        parent = prospects[i].parents[n]
        assert parent < 0 or (i, parent) in mine
    size = min(len(nodes), 6)
    best = max(rate(set(some)) for count in range(size + 1) for some in itertools.combinations(nodes[:8], count))
    assert rate(mine) >= best - 1e-9


def test_the_budget_grows_while_it_is_used_and_shrinks_when_it_is_not() -> None:
    """With the root it fills what devices multiply by at once."""
    budget = NodeBudget(64)
    assert budget.nodes == 15
    budget.observe(15, 15)
    assert budget.nodes == 31
    budget.observe(31, 31)
    assert budget.nodes == 63
    budget.observe(63, 63)
    assert budget.nodes == 64
    for _ in range(100):
        budget.observe(64, 0)
    assert budget.nodes == 3
    assert NodeBudget(2).nodes == 2


def test_the_budget_does_not_grow_for_candidates_that_cost_more_than_they_save() -> None:
    budget = NodeBudget(64)
    for _ in range(20):
        budget.observe(15, 15, worth=5)
    assert budget.nodes == 15
    for _ in range(20):
        budget.observe(15, 15, worth=2)
    assert budget.nodes == 11
    assert budget.mean_kept == pytest.approx(15, abs=0.1), "all the same they are verified"


def test_what_lies_between_passes_is_part_of_an_iteration() -> None:
    times = PassTimes({1: 0.010, 9: 0.012})
    assert times.iteration(1) == times.predict(1)
    for seconds in (0.004, 0.004, 0.5, 0.004, -0.1):
        times.observe_between(1, seconds)
    assert times.between(1) == 0.004
    assert times.iteration(9) == pytest.approx(0.016)
    assert times.between(2) == 0.0, "two sessions have none yet"
    times.observe_between(20, 0.001)
    assert times.between(30) == 0.001
    assert times.iteration(30, 30) == times.predict(30, 30) + 0.001


def test_candidates_are_weighed_against_whole_iterations() -> None:
    """A candidate that costs more than it brings in passes alone, and less with what lies between them."""
    prospects, times = [Prospect([-1], [0.3], 9)], PassTimes({1: 0.010, 2: 0.014})
    assert choose(prospects, times, 16) == [[]]
    times.observe_between(1, 0.010)
    assert choose(prospects, times, 16) == [[0]]


def test_a_candidate_is_worth_its_drafting_if_its_path_comes_true_often_enough() -> None:
    parents, chances = [-1, 0, 1, 0, -1], [0.8, 0.5, 0.5, 0.25, 0.1]
    assert path_chances(parents, chances) == pytest.approx([0.8, 0.4, 0.2, 0.2, 0.1])
    for price, worth in ((0.0, 5), (0.15, 4), (0.3, 2), (0.9, 0)):
        assert worth_drafting(parents, chances, [0, 1, 2, 3, 4], price) == worth
    assert worth_drafting(parents, chances, [0, 3], 0.3) == 1
