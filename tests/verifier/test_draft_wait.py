"""The waits of a session for its drafter: never longer than they can gain, never often in vain."""

import pytest
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
    assert wait.settle(5.004, came=False, verified=0, tokens=1, pass_s=PLAIN_S) == 5.004 - 5.0
    assert wait.until(6.0, PLAIN_S, DRAFTED_S) > 6.0  # the next pass has a wait of its own


def test_a_wait_for_a_draft_that_was_verified_is_not_in_vain() -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.until(0.0, PLAIN_S, DRAFTED_S)
    wait.settle(0.008, came=True, verified=4, tokens=3, pass_s=DRAFTED_S)
    assert wait.wasted_s == 0.0
    assert wait.decode_s == DRAFTED_S
    assert wait.tokens_per_pass > 2.0


@pytest.mark.parametrize("came", [True, False])
def test_a_wait_for_nothing_worth_verifying_is_in_vain(came: bool) -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.until(0.0, PLAIN_S, DRAFTED_S)
    wait.settle(0.008, came=came, verified=0, tokens=1, pass_s=PLAIN_S)
    assert wait.wasted_s == 0.008
    assert (wait.tokens_per_pass < 2.0) is came


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.booleans(), st.integers(0, 8), st.floats(1e-4, 0.1)), min_size=1, max_size=200
    )
)
def test_vain_waits_never_exceed_their_allowance(passes: list[tuple[float, bool, int, float]]) -> None:
    """Whatever the drafter does, what was wasted stays within 2% of decode time + 20 ms."""
    wait, now = DraftWait(max_wait_s=0.05), 0.0
    for share, came, verified, pass_s in passes:
        until = wait.until(now, PLAIN_S, DRAFTED_S)
        now += share * (until - now)  # the draft comes at some time of the wait, or its end does
        verified = verified if came else 0
        wait.settle(now, came=came, verified=verified, tokens=1 + verified, pass_s=pass_s)
        now += pass_s
        assert wait.wasted_s <= ALLOWED_S + ALLOWED_SHARE * wait.decode_s + 1e-9


def test_a_silent_drafter_is_soon_waited_for_no_more_and_again_later() -> None:
    wait, now, waited = DraftWait(max_wait_s=0.05), 0.0, 0.0
    while not wait.exhausted:
        until = wait.until(now, PLAIN_S, DRAFTED_S)
        waited += until - now
        now = until
        wait.settle(now, came=False, verified=0, tokens=1, pass_s=PLAIN_S)
        now += PLAIN_S
    assert 0.018 < waited < 0.03
    assert wait.until(now, PLAIN_S, DRAFTED_S) == now
    assert wait.granted_s == 0.0
    for _ in range(64):
        wait.settle(now, came=False, verified=0, tokens=1, pass_s=PLAIN_S)
    assert wait.limit(PLAIN_S, DRAFTED_S) > 0.005


def test_hope_is_given_back_before_a_probe() -> None:
    wait = DraftWait(max_wait_s=1.0)
    wait.decode_s = 10.0
    for _ in range(40):
        wait.settle(0.0, came=True, verified=0, tokens=1, pass_s=PLAIN_S)
    assert wait.limit(PLAIN_S, DRAFTED_S) == 0.0
    wait.hope()
    assert wait.limit(PLAIN_S, DRAFTED_S) > 0.0
