"""`lookup`: what followed the last places in this text where its end has stood before (prompt n-gram lookup)."""

from collections.abc import Sequence

from specla.drafter_service.calibration import Calibration
from specla.drafter_service.continuations import Continuations
from specla.drafter_service.matching import MatchState
from specla.drafter_service.occurrences import OccurrenceIndex
from specla.v1 import common_pb2

PLACES = 8  # looked at for one draft


def _orders(least: int, most: int) -> list[int]:
    """Lengths to index, each twice the one before it: what is found is measured anyway."""
    orders = []
    while least < most:
        orders.append(least)
        least *= 2
    return [*orders, most]


class LookupDrafter:
    """Drafts from the session's own text, from the longest match alone.

    Args:
        min_ngram: shortest context worth a match, >= 1.
        max_ngram: where the search for the longest match begins, >= min_ngram.
        branching: continuations considered behind one node, >= 1.
        tau: nats a path may be less likely than the best one's.
    """

    name = "lookup"

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 8, branching: int = 3, tau: float = 4.0) -> None:
        self._orders = _orders(min_ngram, max_ngram)
        self._branching = branching
        self._tau = tau
        self._calibration = Calibration(trust=4.0, memory=1024.0)

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> MatchState:
        """Begin a session."""
        index = OccurrenceIndex(self._orders)
        return MatchState(
            tokens,
            index=index,
            find=lambda end: index.find_own(end, limit=PLACES, enough=1),
            continuations=Continuations(Calibration(self._calibration), branching=self._branching, tau=self._tau),
        )
