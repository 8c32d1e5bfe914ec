"""The waits of a session for its drafter: never longer than they can gain, never often in vain."""

from hypothesis import given
from hypothesis import strategies as st

from specla.verifier_service.draft_wait import ALLOWED_S, ALLOWED_SHARE, DraftWait

PLAIN_S, DRAFTED_S = 0.013, 0.016


def test_limit_is_what_the_wait_can_gain() -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.decode_s = 100.0
    wait.tokens_per_pass = 3.0
    assert wait.limit(PLAIN_S, DRAFTED_S) == 3 * PLAIN_S - DRAFTED_S


def test_limit_is_capped() -> None:
    wait = DraftWait(max_wait_s=0.005)
    wait.decode_s = 100.0
    assert wait.limit(PLAIN_S, DRAFTED_S) == 0.005


def test_no_wait_for_a_drafter_whose_drafts_bring_nothing() -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.tokens_per_pass = 1.0
    assert wait.limit(PLAIN_S, DRAFTED_S) == 0.0
    assert wait.until(5.0, PLAIN_S, DRAFTED_S) == 5.0


def test_the_wait_is_measured_from_its_beginning() -> None:
    wait = DraftWait(max_wait_s=1.0)
    first = wait.until(5.0, PLAIN_S, DRAFTED_S)
    assert wait.until(5.004, PLAIN_S, DRAFTED_S) == first
    assert wait.settle(5.004, drafted=False, tokens=1, pass_s=PLAIN_S, plain_s=PLAIN_S) == 5.004 - 5.0
    assert wait.until(6.0, PLAIN_S, DRAFTED_S) > 6.0  # the next pass has a wait of its own


def test_a_wait_that_paid_off_costs_nothing() -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.until(0.0, PLAIN_S, DRAFTED_S)
    wait.settle(0.008, drafted=True, tokens=3, pass_s=DRAFTED_S, plain_s=PLAIN_S)
    assert wait.wasted_s == 0.0
    assert wait.decode_s == DRAFTED_S


def test_a_draft_that_was_rejected_makes_the_wait_vain() -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.until(0.0, PLAIN_S, DRAFTED_S)
    wait.settle(0.008, drafted=True, tokens=1, pass_s=DRAFTED_S, plain_s=PLAIN_S)
    assert wait.wasted_s == 0.008
    assert wait.tokens_per_pass < 2.0


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.booleans(), st.integers(1, 8), st.floats(1e-4, 0.1)), min_size=1, max_size=200
    )
)
def test_vain_waits_never_exceed_their_allowance(passes: list[tuple[float, bool, int, float]]) -> None:
    """Whatever the drafter does, what was wasted stays within 2% of decode time + 20 ms."""
    wait, now = DraftWait(max_wait_s=0.05), 0.0
    for share, drafted, tokens, pass_s in passes:
        until = wait.until(now, PLAIN_S, DRAFTED_S)
        now += share * (until - now)  # the draft comes at some time of the wait, or its end does
        wait.settle(now, drafted=drafted, tokens=tokens if drafted else 1, pass_s=pass_s, plain_s=PLAIN_S)
        now += pass_s
        assert wait.wasted_s <= ALLOWED_S + ALLOWED_SHARE * wait.decode_s + 1e-9


def test_a_silent_drafter_is_soon_waited_for_no_more_and_again_later() -> None:
    wait, now, waited = DraftWait(max_wait_s=0.05), 0.0, 0.0
    while not wait.exhausted:
        until = wait.until(now, PLAIN_S, DRAFTED_S)
        waited += until - now
        now = until
        wait.settle(now, drafted=False, tokens=1, pass_s=PLAIN_S, plain_s=PLAIN_S)
        now += PLAIN_S
    assert 0.018 < waited < 0.03
    for _ in range(64):
        wait.settle(now, drafted=False, tokens=1, pass_s=PLAIN_S, plain_s=PLAIN_S)
    assert wait.limit(PLAIN_S, DRAFTED_S) > 0.005
