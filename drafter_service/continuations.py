"""From places where the context has stood before to a tree of what followed there, with honest probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from specla.drafter_service.calibration import Calibration, cell_of
from specla.drafter_service.occurrences import Occurrence
from specla.drafter_service.tree import ROOT, DraftTree

Weigh = Callable[[int], float]  # of a place, by the length of its match
LEAST = 0.005  # a candidate that is this unlikely is not worth its row on any device


@dataclass(slots=True)
class Way:
    """How the text may go on: what followed some places, all of them the same."""

    tokens: Sequence[int]
    weight: float  # of the places together
    length: int  # of the longest match among them


@dataclass(slots=True)
class Guess:
    """One continuation of a node."""

    token: int
    cell: int
    ways: list[Way]  # those that go on like this
    behind: "list[Guess] | None"  # what is guessed to follow; None until it is a candidate


# A guess that waits to become a candidate: minus its path's chance, its parent and its rank, which settle ties,
# its depth and its chance behind its parent.
_Offer = tuple[float, int, int, int, float, Guess]


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
        self._unlikely = math.exp(-tau)
        self._guessed: list[Guess] | None = None  # behind the root; None: nobody asked

    def guess(self, places: Sequence[Occurrence], reach: int) -> list[Guess]:
        """What may follow the text if it goes on as the places did, `reach` tokens far.

        Places that go on alike are taken for one. What a place weighs is settled here: its match grows along the
        draft, but so do those of the others.
        """
        ways: dict[tuple[int, ...], Way] = {}
        for place in places:
            tokens = place.continuation(reach)
            way = ways.get(tokens)
            if way is None:
                ways[tokens] = Way(tokens, self._weigh(place.length), place.length)
            else:
                way.weight += self._weigh(place.length)
                way.length = max(way.length, place.length)
        self._guessed = self._fork(list(ways.values()), 0)
        return self._guessed

    def grow(self, places: Sequence[Occurrence], budget: int) -> DraftTree:
        """The `budget` likeliest candidates: best first, a node's continuations guessed when the node is taken.

        The chance of the i-th guess is what the guesses before it leave over, times how often a guess of its
        class is right once they are wrong; so the chances of siblings add up to less than 1.
        """
        tokens, parents, log_probs = list[int](), list[int](), list[float]()
        waiting = list[_Offer]()
        self._offer(waiting, ROOT, 0, 1.0, self.guess(places, budget + 1), LEAST)
        least = max(LEAST, -waiting[0][0] * self._unlikely) if waiting else 1.0
        while waiting and len(tokens) < budget and -waiting[0][0] >= least:
            cost, parent, _, depth, chance, guess = heappop(waiting)
            node = len(tokens)
            tokens.append(guess.token)
            parents.append(parent)
            log_probs.append(math.log(chance))
            guess.behind = self._fork(guess.ways, depth + 1)
            self._offer(waiting, node, depth + 1, -cost, guess.behind, least)
        return DraftTree(tuple(tokens), tuple(parents), tuple(log_probs))

    def settle(self, tokens: Sequence[int]) -> int:
        """`tokens` came behind the last guesses, if any were made; returns to how many of them guesses were due."""
        guesses, self._guessed = self._guessed, None
        for number, token in enumerate(tokens):
            if guesses is None:
                return number
            came = None
            for guess in guesses:
                self._calibration.count(guess.cell, guess.token == token)
                if guess.token == token:
                    came = guess
                    break
            guesses = came.behind if came is not None else None
        return len(tokens)

    def _fork(self, ways: list[Way], depth: int) -> list[Guess]:
        """How the ways go on at this depth, the heaviest continuation first.

        Of equally heavy ones the one that comes first, that is the newest, leads. The share of a guess is taken
        among the places that no guess before it has claimed.
        """
        if len(ways) == 1:
            way = ways[0]
            return [Guess(way.tokens[depth], cell_of(depth, 0, way.length + depth, 1.0), ways, None)]
        groups: dict[int, list[Way]] = {}
        for way in ways:
            groups.setdefault(way.tokens[depth], []).append(way)
        weighed = [(sum([way.weight for way in group]), token, group) for token, group in groups.items()]
        if len(weighed) > 1:
            weighed.sort(key=lambda one: one[0], reverse=True)
        left = sum([weight for weight, _, _ in weighed])
        found = []
        for rank, (weight, token, group) in enumerate(weighed[: self._branching]):
            length = max([way.length for way in group])
            found.append(Guess(token, cell_of(depth, rank, length + depth, weight / left), group, None))
            left -= weight
        return found

    def _offer(
        self, waiting: list[_Offer], parent: int, depth: int, path: float, guesses: list[Guess], least: float
    ) -> None:
        """Queue the guesses behind a node, but for those whose path would be below `least`."""
        left = 1.0
        for rank, guess in enumerate(guesses):
            chance = left * self._calibration.chance(guess.cell)
            left -= chance
            if path * chance >= least:
                heappush(waiting, (-path * chance, parent, rank, depth, chance, guess))
