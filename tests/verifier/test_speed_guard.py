"""The account of what a drafter gains and costs: a useless one pauses and is tried again every 128 tokens."""

import random

from specla.verifier_service.speed_guard import (
    ALLOWED_PASSES,
    ALLOWED_S,
    ALLOWED_SHARE,
    BANKED_PASSES,
    DEBT_PASSES,
    FIRST_REST,
    LOST_IN_A_ROW,
    PROBE_EVERY,
    PROBE_PASSES,
    RED_PASSES,
    TRIED_ANYWAY,
    WON_PASSES,
    Begin,
    Reputation,
    SpeedGuard,
)

PLAIN_S = 0.013


def decode(guard: SpeedGuard, tokens: int, cost_s: float, gained: int = 0, length: int = 10) -> int:
    """Run passes of a session whose every drafted pass costs and gains so much; returns how many were drafted."""
    drafted, end = 0, length + tokens
    while length < end:
        guard.start_probe_if_due(length)
        if guard.paused:
            length += 1
            guard.record(length, gained_s=0.0, cost_s=0.0, decode_s=PLAIN_S, plain_s=PLAIN_S)
        else:
            drafted += 1
            length += 1 + gained
            guard.record(length, gained_s=gained * PLAIN_S, cost_s=cost_s, decode_s=PLAIN_S + cost_s, plain_s=PLAIN_S)
    return drafted


def test_a_useful_drafter_never_pauses() -> None:
    guard = SpeedGuard()
    decode(guard, tokens=500, cost_s=0.006, gained=1)
    assert not guard.paused
    assert guard.balance_s > 0


def test_a_cheap_drafter_that_brings_nothing_may_go_on() -> None:
    guard = SpeedGuard()
    assert decode(guard, tokens=500, cost_s=0.0002) == 500


def test_a_dear_drafter_pauses_and_is_probed() -> None:
    guard = SpeedGuard()
    tokens = 1000
    drafted = decode(guard, tokens=tokens, cost_s=0.008)
    assert drafted < 10 + PROBE_PASSES * (tokens // PROBE_EVERY + 1)
    loss_s = drafted * 0.008
    probes_s = PROBE_PASSES * 0.008 * (tokens // PROBE_EVERY)
    assert loss_s <= ALLOWED_S + ALLOWED_SHARE * (tokens * PLAIN_S) + 0.008 + probes_s


def test_speed_outside_of_probes_is_nearly_that_of_plain_decoding() -> None:
    """Costs and gains at random, of a drafter that loses on the whole: 0.97 of plain speed, probes apart."""
    chance = random.Random(3)
    guard, length, spent_s, probes_s = SpeedGuard(), 0, 0.0, 0.0
    while length < 5000:
        guard.start_probe_if_due(length)
        gained, cost_s = 0, 0.0
        if not guard.paused:
            gained, cost_s = int(chance.random() < 0.3), 0.007
        length += 1 + gained
        spent_s += PLAIN_S + cost_s
        if guard.probing:
            probes_s += max(0.0, cost_s - gained * PLAIN_S)
        guard.record(length, gained_s=gained * PLAIN_S, cost_s=cost_s, decode_s=PLAIN_S + cost_s, plain_s=PLAIN_S)
    assert length * PLAIN_S / (spent_s - probes_s - ALLOWED_S) >= 0.97


def test_a_drafter_that_became_useful_is_taken_back_at_the_next_probe() -> None:
    guard = SpeedGuard()
    decode(guard, tokens=200, cost_s=0.008)
    assert guard.paused
    decode(guard, tokens=PROBE_EVERY + 20, cost_s=0.004, gained=2, length=210)
    assert not guard.paused
    assert not guard.probing


def test_a_try_that_was_disturbed_is_not_the_last_for_long() -> None:
    """A hiccup of a hundred passes in one probe: 10,000 tokens would have to pay for it."""
    quick_s, reputation, rests, length = 0.0002, Reputation(), list[int](), 10
    guard = SpeedGuard(10, reputation)
    for _ in range(4):
        while not guard.start_probe_if_due(length):
            length += 1
            cost_s = 0.0 if guard.paused else quick_s
            guard.record(length, gained_s=0.0, cost_s=cost_s, decode_s=quick_s, plain_s=quick_s)
        guard.record(length, gained_s=0.0, cost_s=100 * quick_s, decode_s=quick_s, plain_s=quick_s)
        begun = length
        while not guard.is_due(length):
            length += 1
            reputation.earn(1)
        rests.append(length - begun)
    assert rests == [512, 1024, 2048, 4096]


def test_old_gains_do_not_pay_for_long_losses() -> None:
    guard = SpeedGuard()
    decode(guard, tokens=20000, cost_s=0.001, gained=3)
    drafted = decode(guard, tokens=100, cost_s=0.2, gained=0, length=20010)
    assert drafted < 20


def test_what_a_links_sessions_have_made_of_its_drafts() -> None:
    reputation, plain_s = Reputation(), 0.01

    def session(net_s: float) -> bool:
        """Whether it begins with a pause; if not, it records what it gains, or loses."""
        guard = SpeedGuard(10, reputation)
        if not guard.paused:
            gained_s, cost_s = max(net_s, 0.0), max(-net_s, 0.0)
            guard.record(20, gained_s=gained_s, cost_s=cost_s, decode_s=plain_s, plain_s=plain_s)
        else:
            assert guard.is_due(10 + FIRST_REST * PROBE_EVERY)
            assert not guard.is_due(9 + FIRST_REST * PROBE_EVERY)
        return guard.paused and not guard.is_due(20)

    def begins_with_a_pause() -> bool:
        guard = SpeedGuard(10, reputation)
        guard.end()
        return guard.paused

    too_much = (ALLOWED_PASSES + 2 * ALLOWED_SHARE) * plain_s  # for one of them, not for all together
    assert [session(-too_much) for _ in range(LOST_IN_A_ROW)] == [True] * LOST_IN_A_ROW  # after their first pass
    assert not reputation.in_red
    assert begins_with_a_pause()
    assert not SpeedGuard(10, reputation, unconditional=True).paused
    assert not SpeedGuard(10).paused
    spared = [begins_with_a_pause() for _ in range(2 * TRIED_ANYWAY - 1)]
    assert spared.count(False) == 2
    reputation.won()
    assert [session(WON_PASSES * plain_s * 1.1) for _ in range(20)] == [False] * 20
    assert [session(-too_much) for _ in range(LOST_IN_A_ROW - 1)] == [True] * (LOST_IN_A_ROW - 1)
    session(WON_PASSES * plain_s * 1.1)
    assert not begins_with_a_pause(), "losses count in a row"


def test_what_a_links_sessions_lose_together_is_paid_for_by_what_they_decode() -> None:
    """Each within its own allowance; and what one session gains the others may lose."""
    reputation = Reputation()
    plain_s, each = 0.0002, 1.9  # plain passes that each session loses

    def lose() -> None:
        guard = SpeedGuard(10, reputation, Begin.AT_ONCE)
        guard.record(11, gained_s=0.0, cost_s=16 * each * plain_s, decode_s=plain_s, plain_s=plain_s, sessions=16)

    while not reputation.in_red:
        reputation.won()
        lose()
    reputation.won()
    assert reputation.spares(), "whatever else speaks for it"
    reputation.earn(each / ALLOWED_SHARE)
    assert not reputation.spares()
    for _ in range(1000):
        lose()
    assert reputation.in_red
    reputation.earn((DEBT_PASSES - RED_PASSES) / ALLOWED_SHARE * 0.999)
    assert reputation.in_red
    reputation.earn((DEBT_PASSES - RED_PASSES) / ALLOWED_SHARE * 0.002)
    assert not reputation.in_red, "no more debts than these are remembered"
    reputation.earn(1e6)
    reputation.spend(1000.0)
    assert not reputation.in_red, "one mishap"
    reputation.spend(0.1 * plain_s)
    assert reputation.in_red, "what was decoded before is not saved up"


def test_a_drafter_that_rests_is_not_tried_on_schedule_while_its_link_is_in_the_red() -> None:
    reputation, plain_s = Reputation(), 0.01
    guard = SpeedGuard(10, reputation)
    guard.record(11, gained_s=0.0, cost_s=3 * plain_s, decode_s=plain_s, plain_s=plain_s)
    assert guard.paused
    while not reputation.in_red:
        reputation.book(-plain_s, plain_s)
    assert not guard.start_probe_if_due(10_000)
    while reputation.in_red:
        reputation.earn(1)
    assert guard.start_probe_if_due(10_000)
    assert reputation.in_red, "and now nobody else"
    guard.record(10_001, gained_s=0.0, cost_s=0.0, decode_s=plain_s, plain_s=plain_s)
    assert not reputation.in_red
    in_red = SpeedGuard(10, reputation)
    while not reputation.in_red:
        reputation.book(-plain_s, plain_s)
    rests_first = SpeedGuard(10, reputation)
    assert (in_red.paused, rests_first.paused) == (False, True)
    reputation.earn(1e6)
    assert not rests_first.is_due(9 + PROBE_EVERY)
    assert rests_first.is_due(10 + PROBE_EVERY), "its link has not given up"


def test_deposits_are_apart_from_what_was_gained_and_lost() -> None:
    reputation = Reputation()
    assert reputation.grant() == 0.0, "nobody knows yet what a pass takes"
    reputation.book(1.0, 0.01)
    deposits = list[float]()
    while not reputation.in_red:
        deposits.append(reputation.grant())
    assert sum(deposits) > BANKED_PASSES + RED_PASSES
    assert not reputation.gave_up
    reputation.earn(1e6)
    assert reputation.in_red, "they are not paid for by what is decoded"
    for deposit in deposits:
        reputation.refund(deposit)
    reputation.book(-(BANKED_PASSES + RED_PASSES) * 0.02 * 0.999, 0.02)
    assert not reputation.in_red, "passes count, not seconds"


def test_what_was_tried_in_vain_for_a_reason_counts_for_all_sessions_of_the_link() -> None:
    """Not what was tried because it was due: that says nothing against the reason."""
    reputation = Reputation()
    first, second = SpeedGuard(10, reputation), SpeedGuard(10, reputation)
    for guard in (first, second):
        guard.record(20, gained_s=0.0, cost_s=2.1 * PLAIN_S, decode_s=PLAIN_S, plain_s=PLAIN_S)
        assert guard.paused

    def try_again(guard: SpeedGuard, length: int, net_s: float) -> None:
        assert guard.start_probe_if_due(length)
        for _ in range(PROBE_PASSES):
            if guard.probing:
                gained_s, cost_s = max(net_s, 0.0), max(-net_s, 0.0)
                guard.record(length, gained_s=gained_s, cost_s=cost_s, decode_s=PLAIN_S, plain_s=PLAIN_S)

    try_again(first, 20 + PROBE_EVERY, -2.1 * PLAIN_S)
    assert (first.failures, second.failures) == (1, 0)
    for count in (1, 2):
        first.end_rest(300)
        try_again(first, 300, -2.1 * PLAIN_S)
        assert second.failures == count
    second.end_rest(30)
    try_again(second, 30, PLAIN_S)
    assert (first.failures, second.failures) == (3, 0)


def test_sessions_that_end_before_they_give_up_count_together() -> None:
    reputation = Reputation()

    def session(net_passes: float) -> None:
        guard = SpeedGuard(10, reputation)
        gained_s, cost_s = max(net_passes, 0.0) * PLAIN_S, max(-net_passes, 0.0) * PLAIN_S
        guard.record(20, gained_s=gained_s, cost_s=cost_s, decode_s=PLAIN_S, plain_s=PLAIN_S)
        assert not guard.paused
        guard.end()

    for _ in range(100):
        session(-1.4)
        session(1.6)
    assert not SpeedGuard(10, reputation).paused, "together they gain"
    for _ in range(2 * LOST_IN_A_ROW):
        session(-1.4)
    assert SpeedGuard(10, reputation).paused
    unconditional = Reputation()
    for _ in range(100):
        guard = SpeedGuard(10, unconditional, unconditional=True)
        guard.record(20, gained_s=0.0, cost_s=PLAIN_S, decode_s=PLAIN_S, plain_s=PLAIN_S)
        guard.end()
    assert not SpeedGuard(10, unconditional).paused


def test_a_try_that_the_texts_end_cuts_short_counts_as_far_as_it_went() -> None:
    reputation = Reputation()
    for _ in range(LOST_IN_A_ROW):
        assert not reputation.spares()
        guard = SpeedGuard(10, reputation)
        guard.record(11, gained_s=0.0, cost_s=2.1 * PLAIN_S, decode_s=PLAIN_S, plain_s=PLAIN_S)
        assert guard.paused
        reputation.won()
        guard.end_rest(12)
        assert guard.start_probe_if_due(12)
        guard.record(13, gained_s=0.0, cost_s=0.1 * PLAIN_S, decode_s=PLAIN_S, plain_s=PLAIN_S)
        assert guard.probing
        guard.end()
        assert guard.failures == 1, "something had spoken for it"
    good = SpeedGuard(10, reputation)
    good.pause(10)
    good.end_rest(10)
    assert good.start_probe_if_due(10)
    good.record(12, gained_s=PLAIN_S, cost_s=0.0, decode_s=PLAIN_S, plain_s=PLAIN_S)
    failures = good.failures
    good.end()
    assert good.failures == failures
