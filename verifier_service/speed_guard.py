"""The promise that a drafter costs next to nothing: a running account of what it gained and what it cost.

While the account is in the red by more than its allowance, the drafter pauses (it is told a budget of no candidates,
and nothing more), and is tried again every `PROBE_EVERY` tokens for a few passes.
"""

ALLOWED_SHARE = 0.025  # of decode time: keeps at least 0.97 of plain decoding's speed
ALLOWED_S = 0.02  # beside that, to get to know the drafter
BANKED_S = 0.1  # gains beyond it do not pay for later losses
PROBE_EVERY = 64  # tokens
PROBE_PASSES = 4
PROBE_BUDGET = 8  # candidates


class SpeedGuard:
    """One session's account with one drafter, in seconds of the session's time.

    Args:
        unconditional: never pause.

    Attributes:
        balance_s: gains less costs since the start, gains banked up to a limit.
        paused: whether the drafter should send nothing now.
        probing: whether it is being tried again.
    """

    def __init__(self, *, unconditional: bool = False) -> None:
        self._unconditional = unconditional
        self.balance_s = 0.0
        self.paused = False
        self.probing = False
        self._decode_s = 0.0
        self._probe_at = 0
        self._probe_passes = 0
        self._probe_balance_s = 0.0

    def record(self, committed_len: int, *, gained_s: float, cost_s: float, decode_s: float) -> None:
        """Account for one pass of the session.

        Args:
            committed_len: after the pass.
            gained_s: time that the accepted candidates saved.
            cost_s: time that drafting added: to the pass, before it, after it.
            decode_s: duration of the pass.
        """
        self._decode_s += decode_s
        net = gained_s - cost_s
        self.balance_s = min(self.balance_s + net, BANKED_S)
        if self.probing:
            self._probe_balance_s += net
            self._probe_passes += 1
            if self._probe_passes >= PROBE_PASSES:
                self._end_probe(committed_len)
        elif not self.paused and self.balance_s < self._lowest_s:
            self.pause(committed_len)

    @property
    def _lowest_s(self) -> float:
        return -(ALLOWED_S + ALLOWED_SHARE * self._decode_s)

    def pause(self, committed_len: int) -> None:
        """Stop asking for drafts until PROBE_EVERY more tokens were committed."""
        if self._unconditional:
            return
        self.paused, self.probing = True, False
        self._probe_at = committed_len + PROBE_EVERY

    def start_probe_if_due(self, committed_len: int) -> bool:
        """Whether a probe begins with the pass that comes next."""
        if not self.paused or committed_len < self._probe_at:
            return False
        self.paused, self.probing = False, True
        self._probe_passes, self._probe_balance_s = 0, 0.0
        return True

    def _end_probe(self, committed_len: int) -> None:
        self.probing = False
        if self._probe_balance_s > 0:
            self.balance_s = max(self.balance_s, self._lowest_s)  # what probes cost is forgiven, no more
        else:
            self.pause(committed_len)
