"""From places where the context has stood before to a tree of what followed there, with honest probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from specla.drafter_service.calibration import Calibration, cell_of
from specla.drafter_service.occurrences import Occurrence
from specla.drafter_service.tree import ROOT, DraftTree

LEAST = 0.005  # a candidate that is this unlikely is not worth its row on any device


@dataclass(slots=True)
class Way:
    """How the text may go on: what followed some places, all of them the same."""

    tokens: Sequence[int]
    weight: float  # of the places together
    length: int  # of the longest match among them


# One continuation of a node: its token, its class, and the ways that go on like this.
Guess = tuple[int, int, list[Way]]
# A guess that waits to become a candidate: minus its path's chance; its parent and its rank, which settle ties;
# its depth, its chance behind its parent, its token and its ways.
_Offer = tuple[float, int, int, int, float, int, list[Way]]


class Continuations:
    """Turns places into guesses, guesses into trees, and learns from what came.

    Args:
        calibration: of the session.
        branching: guesses behind one node, >= 1.
        tau: nats below the likeliest candidate at which a draft stops.
    """

    def __init__(self, calibration: Calibration, *, branching: int, tau: float) -> None:
        self._calibration = calibration
        self._branching = branching
        self._unlikely = math.exp(-tau)
        self._ways: list[Way] | None = None  # those that `look` saw last; None: settled
        self._reach = 0  # tokens of each

    def look(self, places: Sequence[Occurrence], reach: int) -> list[Way]:
        """The ways the text may take if it goes on as the places did, `reach` tokens far; those to settle next.

        Places that go on alike are taken for one. A place weighs twice what one does whose match is a token shorter,
        all along a draft: its match grows, but so do those of the others.
        """
        ways: dict[tuple[int, ...], Way] = {}
        for place in places:
            tokens = place.continuation(reach)
            way = ways.get(tokens)
            if way is None:
                ways[tokens] = Way(tokens, 2.0**place.length, place.length)
            else:
                way.weight += 2.0**place.length
                way.length = max(way.length, place.length)
        self._ways, self._reach = list(ways.values()), reach
        return self._ways

    def grow(self, places: Sequence[Occurrence], budget: int) -> DraftTree:
        """The `budget` likeliest candidates: best first, a node's continuations guessed when the node is taken.

        The chance of the i-th guess is what the guesses before it leave over, times how often a guess of its
        class is right once they are wrong; so the chances of siblings add up to less than 1.
        """
        tokens, parents, log_probs = list[int](), list[int](), list[float]()
        waiting = list[_Offer]()
        self._offer(waiting, ROOT, 0, 1.0, self.look(places, budget + 1), LEAST)
        least = max(LEAST, -waiting[0][0] * self._unlikely) if waiting else 1.0
        while waiting and len(tokens) < budget and -waiting[0][0] >= least:
            cost, parent, _, depth, chance, token, ways = heappop(waiting)
            path, node = -cost, len(tokens)
            tokens.append(token)
            parents.append(parent)
            log_probs.append(math.log(chance))
            if len(ways) == 1:  # a lone way is followed at once for as long as no other candidate is likelier
                floor = max(least, -waiting[0][0]) if waiting else least
                while len(tokens) < budget:
                    chance = self._calibration.chance(_lone_cell(ways[0], depth + 1))
                    if path * chance < floor:
                        break
                    path, depth = path * chance, depth + 1
                    tokens.append(ways[0].tokens[depth])
                    parents.append(node)
                    log_probs.append(math.log(chance))
                    node += 1
            self._offer(waiting, node, depth + 1, path, ways, least)
        return DraftTree(tuple(tokens), tuple(parents), tuple(log_probs))

    def settle(self, tokens: Sequence[int]) -> int:
        """`tokens` came where the ways that `look` saw last begin: learns what the guesses along them were worth.

        Returns of how many tokens they spoke: of none if settled already, else of each up to the first that had not
        been guessed.
        """
        ways, self._ways = self._ways, None
        for depth, token in enumerate(tokens):
            if ways is None or depth == self._reach:
                return depth
            followed = None
            for guess, cell, like in self._fork(ways, depth):
                self._calibration.count(cell, guess == token)
                if guess == token:
                    followed = like
                    break
            ways = followed
        return len(tokens)

    def _fork(self, ways: list[Way], depth: int) -> list[Guess]:
        """How the ways go on at this depth, the heaviest continuation first.

        Of equally heavy ones the one that comes first, that is the newest, leads. The share of a guess is taken
        among the places that no guess before it has claimed.
        """
        if len(ways) == 1:
            return [(ways[0].tokens[depth], _lone_cell(ways[0], depth), ways)]
        groups: dict[int, list[Way]] = {}
        for way in ways:
            groups.setdefault(way.tokens[depth], []).append(way)
        if len(groups) == 1:
            length = max([way.length for way in ways])
            return [(ways[0].tokens[depth], cell_of(depth, 0, length + depth, 1.0), ways)]
        weighed = [(sum([way.weight for way in group]), token, group) for token, group in groups.items()]
        weighed.sort(key=lambda one: one[0], reverse=True)
        left = sum([weight for weight, _, _ in weighed])
        guesses = []
        for rank, (weight, token, group) in enumerate(weighed[: self._branching]):
            length = max([way.length for way in group])
            guesses.append((token, cell_of(depth, rank, length + depth, weight / left), group))
            left -= weight
        return guesses

    def _offer(
        self, waiting: list[_Offer], parent: int, depth: int, path: float, ways: list[Way], least: float
    ) -> None:
        """Queue the guesses behind a node, but for those whose path would be below `least`."""
        left = 1.0
        for rank, (token, cell, like) in enumerate(self._fork(ways, depth)):
            chance = left * self._calibration.chance(cell)
            left -= chance
            if path * chance >= least:
                heappush(waiting, (-path * chance, parent, rank, depth, chance, token, like))


def _lone_cell(way: Way, depth: int) -> int:
    return cell_of(depth, 0, way.length + depth, 1.0)
