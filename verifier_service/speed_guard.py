"""The promise that a drafter costs next to nothing: a running account of what it gained and what it cost.

While the account is in the red by more than its allowance, the drafter pauses (it is told a budget of no candidates,
and nothing more), and is tried again every `PROBE_EVERY` tokens for a few passes; later, if so much had to be decoded
before what the last try has cost is its share of the time; sooner, if the text begins to repeat itself. What is
allowed is measured in passes, up to a limit in seconds: where a pass takes 0.2 ms, 20 ms are a hundred tokens.

What sessions found is kept for their drafter's link: where the last ones all gave up, or ended in the red, most new
ones begin with a pause. And all of them together have an account of the thread's time, for what one session's tries
take all others of its passes wait for: each may be within its own allowance, and sixteen of them cost a fifth.
"""

import math
import random
from enum import Enum, auto

ALLOWED_SHARE = 0.025  # of decode time: keeps at least 0.97 of plain decoding's speed
ALLOWED_PASSES = 2.0  # plain ones, beside that, to get to know the drafter
ALLOWED_S = 0.02  # no more than that
BANKED_PASSES = 10.0  # plain ones; gains beyond do not pay for later losses
BANKED_S = 0.1  # no more than that
PROBE_EVERY = 128  # tokens
PROBE_SHARE = 0.01  # of decode time, for tries that bring nothing
FIRST_REST = 4  # times PROBE_EVERY: the longest rest after the first try that brought nothing
PROBE_PASSES = 4
PROBE_BUDGET = 7  # candidates
WON_PASSES = 2.0  # plain ones: who has gained so much is worth a try in the next session, too
LOST_IN_A_ROW = 4  # pauses without such a gain between them, after which new sessions begin with a pause
TRIED_ANYWAY = 8  # of so many such sessions one, drawn, is tried all the same: requests may come in a rhythm
RED_PASSES = 1.5 * LOST_IN_A_ROW * ALLOWED_PASSES  # plain ones, that a link's sessions may have lost together
DEBT_PASSES = 3 * RED_PASSES  # no more is remembered, and of one session's pass RED_PASSES: mishaps happen

_MOST_DOUBLINGS = 20


class Reputation:
    """What sessions of one link have made of its drafts: a new one need not try what all others tried in vain.

    Attributes:
        woken_in_vain: tries in a row that something spoke for, and that brought nothing.
    """

    def __init__(self) -> None:
        self._balance = 0.0  # of the thread's time, in plain passes, which may take longer or shorter meanwhile
        self._held = 0.0  # of it as deposits
        self._plain_s = math.inf
        self._lost = 0
        self._spared = 0
        self._draw = random.Random(0)
        self._tried = 0  # which of the next TRIED_ANYWAY
        self._short_s = 0.0
        self.woken_in_vain = 0

    def won(self) -> None:
        """A session has gained something."""
        self._lost = self.woken_in_vain = 0

    def lost(self, *, woken: bool) -> None:
        """A session has given up, for the time being; perhaps after a try that something spoke for."""
        self._lost += 1
        self.woken_in_vain += woken

    def ended(self, balance_s: float, allowed_s: float) -> None:
        """A session has ended before it gave up: those that were too short for that count together."""
        self._short_s = min(self._short_s + balance_s, 0.0)
        if self._short_s < -allowed_s:
            self._short_s = 0.0
            self.lost(woken=False)

    def book(self, net_s: float, plain_s: float) -> None:
        """A pass of some session has gained or cost so much of the thread's time; a plain pass takes plain_s."""
        self._plain_s = plain_s
        net = max(net_s / plain_s, -RED_PASSES)
        self._balance = max(min(self._balance + net, BANKED_PASSES), -DEBT_PASSES)

    def spend(self, seconds: float) -> None:
        """So much of the thread's time went into something else for the link, attaching its drafter."""
        if self._plain_s < math.inf:
            self.book(-seconds, self._plain_s)

    def grant(self) -> float:
        """A session is about to try: it leaves a deposit, in plain passes, for others would try at the same time. It
        is to be refunded."""
        if self._plain_s == math.inf:
            return 0.0
        self._held += ALLOWED_PASSES
        return ALLOWED_PASSES

    def refund(self, deposit: float) -> None:
        """The session has begun to try, or never will: what it loses is booked as it comes."""
        self._held -= deposit

    def earn(self, passes: float) -> None:
        """So many passes, or parts of them, were the link's sessions': their share pays for what was lost."""
        if self._balance < 0.0:
            self._balance = min(self._balance + ALLOWED_SHARE * passes, 0.0)

    @property
    def in_red(self) -> bool:
        """Whether nothing should be tried before more has been decoded."""
        return self._balance - self._held < -RED_PASSES

    @property
    def gave_up(self) -> bool:
        """Whether the last sessions all have."""
        return self._lost >= LOST_IN_A_ROW

    def spares(self) -> bool:
        """Whether a session that begins now should begin with a pause."""
        if self.in_red:
            return True
        if not self.gave_up:
            return False
        place = self._spared % TRIED_ANYWAY
        self._spared += 1
        if place == 0:
            self._tried = self._draw.randrange(TRIED_ANYWAY)
        return place != self._tried


class Begin(Enum):
    """What a session does with its drafter at first."""

    BY_REPUTATION = auto()
    """It rests or is asked, as its link's reputation has it."""
    AT_ONCE = auto()
    """It is asked."""
    AS_TRY = auto()
    """It is tried: the session has done without so far."""
    AS_WOKEN_TRY = auto()
    """Likewise, as something speaks for it."""


class SpeedGuard:
    """One session's account with one drafter, in seconds of the session's time.

    Args:
        committed_len: now.
        reputation: of the drafter's link; None: it has none yet.
        begin: what to do with the drafter at first.
        deposit: that was left with the reputation for that.
        unconditional: never pause.

    Attributes:
        balance_s: gains less costs since the start, gains banked up to a limit.
        paused: whether the drafter should send nothing now.
        probing: whether it is being tried again.
    """

    def __init__(
        self,
        committed_len: int = 0,
        reputation: Reputation | None = None,
        begin: Begin = Begin.BY_REPUTATION,
        *,
        deposit: float = 0.0,
        unconditional: bool = False,
    ) -> None:
        self._reputation = reputation or Reputation()
        self._unconditional = unconditional
        self.balance_s = 0.0
        self.paused = False
        self.probing = False
        self._decode_s = 0.0
        self._plain_s = math.inf
        self._probe_at = 0
        self._failed_probes = 0
        self._probe_passes = 0
        self._probe_balance_s = 0.0
        self._woken = False
        self._has_rested = False
        self._deposit = deposit
        if unconditional or begin is Begin.AT_ONCE:
            return
        if begin is not Begin.BY_REPUTATION:
            self._rest(committed_len, 0)
            self._woken = begin is Begin.AS_WOKEN_TRY
            self.start_probe_if_due(committed_len)
        elif self._reputation.spares():
            self._rest(committed_len, (FIRST_REST if self._reputation.gave_up else 1) * PROBE_EVERY)
        else:
            self._deposit = self._reputation.grant()

    def record(
        self,
        committed_len: int,
        *,
        gained_s: float,
        cost_s: float,
        decode_s: float,
        plain_s: float,
        sessions: int = 1,
    ) -> None:
        """Account for one pass of the session.

        Args:
            committed_len: after the pass.
            gained_s: time that the accepted candidates saved.
            cost_s: time that drafting added: to the pass, before it, after it.
            decode_s: duration of the pass.
            plain_s: what the pass takes without candidates.
            sessions: that waited for the pass; of what it gained or cost so many are the thread's time.
        """
        self._decode_s += decode_s
        self._plain_s = plain_s
        net = gained_s - cost_s
        self.balance_s = min(self.balance_s + net, BANKED_S, BANKED_PASSES * plain_s)
        self._take_deposit_back()
        if not self._unconditional:
            self._reputation.book(net / sessions, plain_s)
            self._reputation.earn(decode_s / plain_s / sessions)
        if self.balance_s > WON_PASSES * plain_s:
            self._reputation.won()
        if self.probing:
            self._probe_balance_s += net
            self._probe_passes += 1
            if self._probe_passes >= PROBE_PASSES or self._probe_balance_s < -self._to_know_s:
                self._end_probe(committed_len)
        elif not self.paused and self.balance_s < self._lowest_s:
            self.pause(committed_len)

    def end(self) -> None:
        """The session has ended, or its drafter has left it."""
        self._take_deposit_back()
        if self.probing and self._probe_balance_s < 0:
            self._reputation.lost(woken=self._woken)  # the rest of the try would hardly have changed that
        elif not self._has_rested and not self._unconditional:
            self._reputation.ended(self.balance_s, self._to_know_s)

    def rest(self, decode_s: float) -> None:
        """Account for a pass of a session whose drafter pauses, and did nothing for it."""
        self._decode_s += decode_s

    @property
    def failures(self) -> int:
        """Tries in a row that brought nothing: this session's, or the link's that something spoke for."""
        return max(self._failed_probes, self._reputation.woken_in_vain)

    @property
    def _lowest_s(self) -> float:
        return -(self._to_know_s + ALLOWED_SHARE * self._decode_s)

    @property
    def _to_know_s(self) -> float:
        return min(ALLOWED_S, ALLOWED_PASSES * self._plain_s)

    def pause(self, committed_len: int, lost_s: float = 0.0) -> None:
        """Stop asking for drafts until PROBE_EVERY more tokens were committed, or so many that what the last try lost
        is PROBE_SHARE of their time; up to a limit that doubles with every try, since one may have been disturbed."""
        if self._unconditional:
            return
        self._reputation.lost(woken=self._woken)
        earned_back = math.ceil(lost_s / (PROBE_SHARE * self._plain_s))
        most = PROBE_EVERY * FIRST_REST << min(self._failed_probes, _MOST_DOUBLINGS)
        self._rest(committed_len, max(PROBE_EVERY, min(earned_back, most)))

    def _rest(self, committed_len: int, tokens: int) -> None:
        self.paused, self.probing, self._woken, self._has_rested = True, False, False, True
        self._probe_at = committed_len + tokens

    def end_rest(self, committed_len: int) -> None:
        """Something speaks for the drafter: it is tried again as soon as may be."""
        if not self._deposit:
            self._deposit = self._reputation.grant()
        self._woken |= committed_len < self._probe_at
        self._probe_at = min(self._probe_at, committed_len)

    def _take_deposit_back(self) -> None:
        self._reputation.refund(self._deposit)
        self._deposit = 0.0

    def is_due(self, committed_len: int) -> bool:
        """Whether a drafter that pauses is to be tried again: in the red only if that was granted before."""
        if not self.paused or committed_len < self._probe_at:
            return False
        return self._deposit > 0.0 or not self._reputation.in_red

    def start_probe_if_due(self, committed_len: int) -> bool:
        """Whether a probe begins with the pass that comes next."""
        if not self.is_due(committed_len):
            return False
        if not self._deposit:
            self._deposit = self._reputation.grant()
        self.paused, self.probing = False, True
        self._probe_passes, self._probe_balance_s = 0, 0.0
        return True

    def _end_probe(self, committed_len: int) -> None:
        self.probing = False
        if self._probe_balance_s > 0:
            self._woken = False
            self._failed_probes = self._reputation.woken_in_vain = 0
            self.balance_s = max(self.balance_s, self._lowest_s)  # what probes cost is forgiven, no more
        else:
            self.pause(committed_len, -self._probe_balance_s)
            self._failed_probes += 1
