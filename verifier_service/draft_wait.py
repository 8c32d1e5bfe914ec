"""How long a session may sit out passes for its drafter: never longer than the wait can gain, and never often in vain.

A drafted pass yields some tokens; plain decoding would take that many plain passes. What is left of this time after
the drafted pass itself is the most that a wait for the draft can gain, and so the most that it may last. Waits that
brought nothing, because no draft came or none of it was worth verifying, add up; once they have eaten their allowance
the session waits no more until decoding has earned a new one. (What rejected drafts cost is speed_guard.py's account.)
What is allowed is measured in passes, up to a limit in seconds: where a pass takes 0.2 ms, 20 ms are a hundred tokens.
All times are seconds of the caller's clock, so that tests turn it by hand.
"""

import math

ALLOWED_SHARE = 0.02  # of decode time, lost to waits that brought nothing
ALLOWED_PASSES = 2.0  # plain ones, beside that, once
ALLOWED_S = 0.02  # no more than that
WORTH_WAITING = 0.1  # of a plain pass: with less than this left there is no point in waiting
WORTH_WAITING_S = 1e-3  # no more than that

FIRST_TOKENS_PER_PASS = 2.0  # believed of a drafter that has shown nothing yet
SMOOTHING = 0.125


class DraftWait:
    """One session's patience with one drafter.

    Args:
        max_wait_s: longest single wait.
        unconditional: wait so long whatever it gains.

    Attributes:
        tokens_per_pass: running mean of the tokens that a drafted pass commits, the bonus token included.
        decode_s: time of the passes so far.
        wasted_s: time of the waits that brought nothing.
        granted_s: how long the last wait was allowed to be.
    """

    def __init__(self, max_wait_s: float, *, unconditional: bool = False):
        self.tokens_per_pass = FIRST_TOKENS_PER_PASS
        self.decode_s = 0.0
        self.wasted_s = 0.0
        self.granted_s = 0.0
        self._max_wait_s = max_wait_s
        self._unconditional = unconditional
        self._plain_s = math.inf
        self._since: float | None = None
        self._until = 0.0

    @property
    def left_s(self) -> float:
        """How much more may be wasted now."""
        allowed_s = min(ALLOWED_S, ALLOWED_PASSES * self._plain_s)
        return allowed_s + ALLOWED_SHARE * self.decode_s - self.wasted_s

    @property
    def exhausted(self) -> bool:
        """Whether the session must decode without waiting."""
        return self.left_s < min(WORTH_WAITING_S, WORTH_WAITING * self._plain_s)

    def limit(self, plain_s: float, drafted_s: float) -> float:
        """The longest wait that can pay off: what the draft's pass would save, capped."""
        if self._unconditional:
            return self._max_wait_s
        self._plain_s = plain_s
        if self.exhausted:
            return 0.0
        gain = self.tokens_per_pass * plain_s - drafted_s
        return max(0.0, min(gain, self._max_wait_s, self.left_s))

    def until(self, now: float, plain_s: float, drafted_s: float) -> float:
        """When the wait that began at the first call since the last pass ends; `now` if it should not be."""
        if self._since is None:
            self.granted_s = self.limit(plain_s, drafted_s)
            self._since, self._until = now, now + self.granted_s
        return self._until

    def hope(self) -> None:
        """Believe in the drafter again, as in one that has shown nothing yet: it is about to be probed."""
        self.tokens_per_pass = max(self.tokens_per_pass, FIRST_TOKENS_PER_PASS)

    def settle(self, now: float, *, came: bool, verified: int, tokens: int, pass_s: float) -> float:
        """Account for a pass that has just run, and for the wait before it.

        Args:
            now: when the pass began.
            came: whether a draft was there for it.
            verified: candidates of the draft that took part.
            tokens: what the pass committed.
            pass_s: how long it took.

        Returns:
            How long the session had waited.
        """
        waited = 0.0 if self._since is None else max(0.0, now - self._since)
        self._since = None
        self.decode_s += pass_s
        if verified == 0:
            self.wasted_s += waited
        if came:
            self.tokens_per_pass += SMOOTHING * (tokens - self.tokens_per_pass)
        return waited
