"""What a drafter's log-probabilities are worth: how often its candidates of each confidence turn out right.

A candidate is judged where the target's token behind its parent is known, whether or not the pass had verified it; so
even candidates that were left out teach something. Rates are kept for each session, leaning on those of all
sessions of the same link while there is little to go by, and are made to rise with confidence.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from specla.verifier_service.intake import Draft

_EDGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_LOG_EDGES = tuple(math.log(edge) for edge in _EDGES)
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
BINS = len(_CENTRES)

_PRIOR_WEIGHT = 2.0  # judgements that the drafter's own word counts for
_LINK_WEIGHT = 6.0  # judgements that the link's rate counts for in a session's
_UNSEEN_WEIGHT = 0.05  # of a bin without judgements, where neighbours must be made to rise
_LINK_MEMORY = 0.999
_LINK_EVERY = 8  # judgements after which a link's rates are worked out anew
_SESSION_MEMORY = 0.98  # a text changes: the last fifty judgements of a bin matter


class Calibrator:
    """Rates of acceptance by confidence.

    Args:
        link: the calibrator of all sessions of the drafter's link; None for that one itself.
    """

    def __init__(self, link: "Calibrator | None" = None):
        self._link = link
        self._memory = _LINK_MEMORY if link is None else _SESSION_MEMORY
        self._hits = [0.0] * BINS
        self._trials = [0.0] * BINS
        self._judged = 0
        self._rates: list[float] | None = None

    def probabilities(self, log_probs: Sequence[float]) -> list[float]:
        """The chance of each candidate, given that its parent was right."""
        rates = self.rates()
        return [rates[bisect_right(_LOG_EDGES, log_prob)] for log_prob in log_probs]

    def rates(self) -> list[float]:
        """The rate of each bin, never falling with confidence."""
        if self._rates is None:
            raw, weights = self._raw()
            self._rates = _rising(raw, weights)
        return self._rates

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Judge a draft by the tokens that the target produced from its root on."""
        children = draft.topology.children
        row = 0
        for token in tokens:
            follow = -1
            for child in children[row]:
                hit = draft.tokens[child - 1] == token
                self._judge(bisect_right(_LOG_EDGES, draft.log_probs[child - 1]), hit)
                if hit:
                    follow = child
            if follow < 0:
                return
            row = follow

    def _judge(self, place: int, hit: bool) -> None:
        self._trials[place] = self._trials[place] * self._memory + 1.0
        self._hits[place] = self._hits[place] * self._memory + hit
        self._judged += 1
        if self._link is not None:
            self._link._judge(place, hit)
            self._rates = None
        elif self._judged % _LINK_EVERY == 0:
            self._rates = None

    def _raw(self) -> tuple[list[float], list[float]]:
        prior, weight = (_CENTRES, _PRIOR_WEIGHT) if self._link is None else (self._link.rates(), _LINK_WEIGHT)
        raw = [(self._hits[i] + weight * prior[i]) / (self._trials[i] + weight) for i in range(BINS)]
        return raw, [trials + _UNSEEN_WEIGHT for trials in self._trials]


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, total, length = pools.pop()
            joint = total + pool[1]
            pool = ((mean * total + pool[0] * pool[1]) / joint, joint, length + pool[2])
        pools.append(pool)
    return [mean for mean, _, length in pools for _ in range(length)]
