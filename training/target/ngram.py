"""A 5-gram model over tokens, interpolated Kneser-Ney: the yardstick beside held-out figures."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ORDER = 5
DISCOUNT = 0.75
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


class _Level(NamedTuple):
    """Counts of one order: grams by hash, and per context the total and the number of different continuations."""

    grams: Hashes
    counts: NDArray[np.int64]
    contexts: Hashes
    totals: NDArray[np.int64]
    kinds: NDArray[np.int64]


def _hashes(tokens: NDArray[np.uint16], n: int) -> Hashes:
    """`[len - n + 1]` hashes of the n-grams at every place; n = 0 gives zeros, one a token."""
    with np.errstate(over="ignore"):
        length = len(tokens) - n + 1 if n else len(tokens)
        result = np.zeros(length, np.uint64)
        for i in range(n):
            result = (result + tokens[i : i + length].astype(np.uint64) + np.uint64(1)) * _FACTOR
            result ^= result >> np.uint64(29)
        return result


class NGram:
    """Interpolated Kneser-Ney with one discount: the highest order counts occurrences, the others predecessors
    (Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998)."""

    def __init__(self, tokens: NDArray[np.uint16], vocab_size: int, order: int = ORDER) -> None:
        self.order, self.vocab_size = order, vocab_size
        self.levels = [self._level(tokens, n) for n in range(1, order + 1)]

    def _level(self, tokens: NDArray[np.uint16], n: int) -> _Level:
        places = np.arange(len(tokens) - n + 1)
        if n < self.order:  # every different (n + 1)-gram counts its last n tokens once
            _, first = np.unique(_hashes(tokens, n + 1), return_index=True)
            places = first + 1
        grams, first, counts = np.unique(_hashes(tokens, n)[places], return_index=True, return_counts=True)
        context = _hashes(tokens, n - 1)[places[first]]
        contexts, group = np.unique(context, return_inverse=True)
        totals = np.bincount(group, counts).astype(np.int64)
        return _Level(grams, counts, contexts, totals, np.bincount(group))

    def nats(self, tokens: NDArray[np.uint16]) -> NDArray[np.float64]:
        """`[len - order + 1]` negative log-probabilities of the tokens from place order - 1 on, in nats."""
        skip = self.order - 1
        probability = np.full(len(tokens) - skip, 1.0 / self.vocab_size)
        for n, level in enumerate(self.levels, 1):
            gram = _hashes(tokens, n)[skip - n + 1 :]
            context = _hashes(tokens, n - 1)[skip - n + 1 :][: len(gram)]
            count = _look_up(level.grams, level.counts, gram)
            total = _look_up(level.contexts, level.totals, context)
            kinds = _look_up(level.contexts, level.kinds, context)
            seen = np.maximum(total, 1)
            mixed = np.maximum(count - DISCOUNT, 0) / seen + DISCOUNT * kinds / seen * probability
            probability = np.where(total > 0, mixed, probability)
        nats: NDArray[np.float64] = -np.log(probability)
        return nats


def _look_up(keys: Hashes, values: NDArray[np.int64], wanted: Hashes) -> NDArray[np.int64]:
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
