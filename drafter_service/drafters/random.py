"""`random`: worthless candidates in trees of any shape, which claim to be good. For tests and benchmarks only.

It is the worst case for what stands behind it: text must not change, and the cost model has to find out
by itself that the claimed probabilities are not met.
"""

import math
import random
from collections.abc import Sequence

from specla.drafter_service.tree import ROOT, DraftTree, TreeBuilder
from specla.v1 import common_pb2


class RandomState:
    """Draws from the ids up to the highest one seen, so that every candidate is one of the vocabulary."""

    def __init__(self, tokens: Sequence[int], *, seed: int, probability: float) -> None:
        self._seed = seed
        self._log_prob = math.log(probability)
        self._position = 0
        self._ids = 1
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Count the tokens and note the highest id."""
        self._position += len(tokens)
        self._ids = max(self._ids, *(token + 1 for token in tokens)) if tokens else self._ids

    def draft(self, budget: int) -> DraftTree:
        """A tree of up to `budget` candidates, a function of (seed, position, budget, highest id)."""
        draw = random.Random((self._seed << 32) + self._position)
        tree = TreeBuilder()
        for _ in range(budget):
            tree.add(draw.randint(ROOT, len(tree) - 1), draw.randrange(self._ids), self._log_prob)
        return tree.build()

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """Does nothing."""


class RandomDrafter:
    """Drafts at random.

    Args:
        seed: equal seeds draft alike.
        probability: what every candidate claims, in (0, 1].
    """

    name = "random"

    def __init__(self, *, seed: int = 0, probability: float = 0.5) -> None:
        self._seed = seed
        self._probability = probability

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> RandomState:
        """Begin a session."""
        return RandomState(tokens, seed=self._seed, probability=self._probability)
