"""From places where the context has stood before to a tree of what followed there, with honest probabilities."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specla.drafter_service.calibration import Calibration, cell_of
from specla.drafter_service.occurrences import Occurrence, advance
from specla.drafter_service.tree import EMPTY, ROOT, DraftTree, TreeBuilder

Weigh = Callable[[int], float]  # of a place, by the length of its match
LEAST = 0.005  # a candidate that is this unlikely is not worth its row on any device


class Guess(NamedTuple):
    """One continuation of a node, with the places that go on like it."""

    token: int
    cell: int
    places: list[Occurrence]


class _Offer(NamedTuple):
    """A candidate that waits for its turn; parent and rank settle ties, so that guesses are never compared."""

    cost: float  # minus the path's log-probability
    parent: int
    rank: int
    depth: int
    log_prob: float
    guess: Guess


class Continuations:
    """Turns places into guesses, guesses into trees, and learns from what came.

    Args:
        calibration: of the session.
        weigh: what a place counts, by the length of its match.
        branching: guesses behind one node, >= 1.
        tau: nats below the likeliest candidate at which a draft stops.
    """

    def __init__(self, calibration: Calibration, *, weigh: Weigh, branching: int, tau: float) -> None:
        self._calibration = calibration
        self._weigh = weigh
        self._branching = branching
        self._tau = tau
        self._tree: DraftTree = EMPTY
        self._made: dict[int, list[Guess]] = {}

    def guesses(self, places: Sequence[Occurrence], depth: int = 0) -> list[Guess]:
        """How the places go on, the heaviest continuation first.

        Of equally heavy ones the one whose place comes first, that is the newest, leads. The share of a
        guess is taken among the places that no guess before it has claimed.
        """
        if len(places) == 1:
            text, position, length = places[0]
            return [Guess(text[position], cell_of(depth, 0, length, 1.0), list(places))]
        groups: dict[int, list[Occurrence]] = {}
        weights: dict[int, float] = {}
        for place in places:
            token = place.text[place.position]
            if token in groups:
                groups[token].append(place)
                weights[token] += self._weigh(place.length)
            else:
                groups[token] = [place]
                weights[token] = self._weigh(place.length)
        left = sum(weights.values())
        ranked = sorted(groups, key=weights.__getitem__, reverse=True) if len(groups) > 1 else list(groups)
        found = []
        for rank, token in enumerate(ranked[: self._branching]):
            longest = max(place.length for place in groups[token])
            found.append(Guess(token, cell_of(depth, rank, longest, weights[token] / left), groups[token]))
            left -= weights[token]
        return found

    def grow(self, first: Sequence[Guess], budget: int) -> DraftTree:
        """The `budget` likeliest candidates: best first, a node's continuations guessed when the node is taken.

        The chance of the i-th guess is what the guesses before it leave over, times how often a guess of its
        class is right once they are wrong; so the chances of siblings add up to less than 1.
        """
        tree, waiting = TreeBuilder(), list[_Offer]()
        self._made = {}
        least = math.log(LEAST)
        self._offer(waiting, ROOT, 0, 0.0, first, least)
        if waiting:
            least = max(least, -waiting[0].cost - self._tau)
        while waiting and len(tree) < budget and -waiting[0].cost >= least:
            best = heapq.heappop(waiting)
            node = tree.add(best.parent, best.guess.token, best.log_prob)
            made = self._made[node] = self.guesses(advance(best.guess.places), best.depth + 1)
            self._offer(waiting, node, best.depth + 1, -best.cost, made, least)
        self._tree = tree.build()
        return self._tree

    def settle(self, first: Sequence[Guess], token: int) -> None:
        """`token` came where `first` had been guessed behind the root."""
        for guess in first:
            self._calibration.count(guess.cell, guess.token == token)
            if guess.token == token:
                return

    def settle_draft(self, tokens: Sequence[int]) -> None:
        """`tokens` came behind the last draft: settles the guesses behind its candidates, as far as they came."""
        edges = zip(self._tree.parents, self._tree.tokens, strict=True)
        children = {edge: node for node, edge in enumerate(edges)}
        node = ROOT
        for token in tokens:
            if node != ROOT:
                self.settle(self._made[node], token)
            found = children.get((node, token))
            if found is None:
                break
            node = found
        self._tree, self._made = EMPTY, {}

    def _offer(
        self, waiting: list[_Offer], parent: int, depth: int, path: float, made: Sequence[Guess], least: float
    ) -> None:
        """Queue the guesses behind a node, but for those whose path would be below `least`."""
        left = 1.0
        for rank, guess in enumerate(made):
            chance = left * self._calibration.chance(guess.cell)
            left -= chance
            log_prob = math.log(max(chance, 1e-9))
            if path + log_prob >= least:
                heapq.heappush(waiting, _Offer(-path - log_prob, parent, rank, depth, log_prob, guess))
