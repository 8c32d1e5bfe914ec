"""How often a guess of a given kind comes true, learnt from the tokens as they are committed.

A match is only a match: what it is worth depends on the text (code repeats itself, prose does not), on
the length of the match and on how many of its continuations agree. So probabilities are counted, not assumed.
"""

from bisect import bisect_right
from functools import lru_cache

LENGTHS = (1, 2, 3, 4, 5, 7, 10, 15, 22, 32)  # lower bounds of the classes of match length
SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 0.999)  # lower bounds of the classes of agreement
RANKS = 3  # first guess, second, any later one
DEPTHS = 3  # behind the root, behind a candidate, deeper
CELLS = DEPTHS * RANKS * len(LENGTHS) * len(SHARES)

_LENGTH_CLASS = tuple(bisect_right(LENGTHS, max(length, 1)) - 1 for length in range(LENGTHS[-1] + 1))


@lru_cache(maxsize=4096)  # of a few hundred kinds that come again and again
def cell_of(depth: int, rank: int, length: int, share: float) -> int:
    """The class of a guess.

    Args:
        depth: candidates between it and the root. Deeper guesses rest on the places that the guesses above
            them left over, which agree more than places found afresh would.
        rank: 0 for the first guess of its place, 1 for the one to fall back on, ...
        length: tokens of context that agree, >= 1; beyond 32 as 32.
        share: weight of the places that go on like this among those not guessed before it, in (0, 1].
    """
    kind = min(depth, DEPTHS - 1) * RANKS + min(rank, RANKS - 1)
    length_class = _LENGTH_CLASS[min(length, LENGTHS[-1])]
    return (kind * len(LENGTHS) + length_class) * len(SHARES) + bisect_right(SHARES, share) - 1


def _rule_of_thumb(cell: int) -> float:
    """What a class is taken for before anything was counted: share x length / (length + 3), less for later ranks."""
    rest, share_class = divmod(cell, len(SHARES))
    kind, length_class = divmod(rest, len(LENGTHS))
    length = LENGTHS[length_class]
    share = max(SHARES[share_class], 0.1)
    return share * length / (length + 3) / (1 + kind % RANKS)


_RULES_OF_THUMB = [_rule_of_thumb(cell) for cell in range(CELLS)]


class Calibration:
    """Chances by class, smoothed towards a broader calibration (Laplace), forgetting what is long past.

    A chance is reckoned when its class is counted, so asking for it, which is done more often, is quick. What
    the broader calibration learns elsewhere shows here once the class is counted here.

    Args:
        broader: what to fall back on where little was counted; None falls back on a rule of thumb.
        trust: how many trials the fall-back weighs.
        memory: trials of a class after which its counts are halved.
    """

    def __init__(self, broader: "Calibration | None" = None, *, trust: float = 16.0, memory: float = 128.0) -> None:
        self._broader = broader
        self._trust = trust
        self._memory = memory
        self._hits = [0.0] * CELLS
        self._trials = [0.0] * CELLS
        self._chances: list[float] = list(_RULES_OF_THUMB if broader is None else broader._chances)

    def chance(self, cell: int) -> float:
        """The chance in (0, 1) that a guess of this class comes true, given that those before it did not."""
        return self._chances[cell]

    def count(self, cell: int, hit: bool) -> float:
        """A guess of this class came true, or did not; the broader calibration learns it, too. Returns the chance."""
        prior = _RULES_OF_THUMB[cell] if self._broader is None else self._broader.count(cell, hit)
        hits, trials = self._hits[cell] + hit, self._trials[cell] + 1.0
        if trials >= self._memory:
            hits, trials = hits * 0.5, trials * 0.5
        self._hits[cell], self._trials[cell] = hits, trials
        chance = self._chances[cell] = (hits + self._trust * prior) / (trials + self._trust)
        return chance
