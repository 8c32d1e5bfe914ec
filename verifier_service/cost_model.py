"""Which candidates are worth a pass: the set with the most expected tokens a second, down to none at all.

With B sessions in a pass and candidates of path probability P_i (the product of calibrated chances from the root
down), verifying the n most likely ones yields B + P_1 + .. + P_n tokens in the time of B + n rows. Path probabilities
never rise on the way down, so the best n are closed under ancestors. What is left out never changes the text.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import NamedTuple

_MEASURE_ROUNDS = 4
_MEASURE_S = 1.0  # no further round is begun after so long
_RECENT = 7  # passes whose median says how loaded the machine is now
_LEAST_SHARE = 0.02  # how far a well-known number of rows goes towards a pass; an unknown one goes halfway, a third ...
_KNOWN = 8  # passes that make a number of rows well known
_FORGET = 0.002  # how far figures of other numbers of rows go back towards the measurement meanwhile
_SHORTEST_S = 1e-6  # a clock may stand still between two readings
_MAX_JUMP = 4.0  # a pass that took longer than so many times the forecast was disturbed
_MAX_SESSIONS = 8  # passes of more sessions share one correction, and what lies between them
_FIRST_BUDGET = 15  # with the root 16 rows: devices multiply by so many at once
_LEAST_BUDGET = 3
LEAST_CHANCE = 0.005  # candidates that are less likely are hardly ever sent
_MEAN_SHARE = 0.125


class PassTimes:
    """Forecasts the duration of a pass from its rows, measured at the start and corrected by every pass since.

    What passes of one row take against the measurement is the machine's load, which all forecasts share; what other
    numbers of rows take beyond that is corrected for each of them. Only well-known ones tell of the load: else a
    wrong measurement of theirs would pass for load, and what drafts really cost would not be seen.

    Between two passes lies what the host does for each, drafting apart: little beside 10 ms, much beside 0.1. A pass
    that need not run saves both, an *iteration*.

    Args:
        table: rows to seconds, at least one entry; between them the forecast is linear, beyond them it goes on at
            the last slope. Fewer rows never take longer: where they did, the measurement was disturbed.
    """

    def __init__(self, table: Mapping[int, float]):
        assert table, "at least one measured pass"
        self._rows = sorted(table)
        self._seconds = [min(table[more] for more in self._rows[i:]) for i in range(len(self._rows))]
        self._load = 1.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._corrections: dict[tuple[int, int], float] = {}  # natural logarithms
        self._seen: Counter[tuple[int, int]] = Counter()
        self._base: list[float] = [0.0]
        self._gaps: dict[int, deque[float]] = {}
        self._between: dict[int, float] = {}

    def predict(self, rows: int, sessions: int = 1) -> float:
        """Seconds that a pass of so many rows of so many sessions takes now."""
        while len(self._base) <= rows:
            self._base.append(self._measured(len(self._base)))
        return self._base[rows] * exp(self._corrections.get(self._key(rows, sessions), 0.0)) * self._load

    def iteration(self, rows: int, sessions: int = 1) -> float:
        """Seconds from the beginning of such a pass to where the next one could begin, if nobody drafts."""
        return self.predict(rows, sessions) + self.between(sessions)

    def between(self, sessions: int) -> float:
        """Seconds between two passes of so many sessions; 0 as long as none followed each other."""
        return self._between.get(min(sessions, _MAX_SESSIONS), 0.0)

    def observe_between(self, sessions: int, seconds: float) -> None:
        """Learn from what lay between two passes of the same number of sessions, drafting apart."""
        key = min(sessions, _MAX_SESSIONS)
        gaps = self._gaps.setdefault(key, deque(maxlen=_RECENT))
        gaps.append(max(seconds, 0.0))
        self._between[key] = median(gaps)

    def observe(self, rows: int, sessions: int, seconds: float) -> float:
        """Learn from a pass; returns its duration as it counts, a disturbed one's being cut."""
        forecast, seconds = self.predict(rows, sessions), max(seconds, _SHORTEST_S)
        key = self._key(rows, sessions)
        self._seen[key] += 1
        if rows == 1 or self._seen[key] > _KNOWN:
            self._recent.append(self._load * seconds / forecast)
            self._load = median(self._recent)
        for other in self._corrections:  # a figure made by one disturbed pass must not stand for ever
            self._corrections[other] *= 1 - _FORGET
        if rows > 1:
            ratio = min(max(seconds / forecast, 1 / _MAX_JUMP), _MAX_JUMP)
            share = max(_LEAST_SHARE, 1 / (1 + self._seen[key]))
            self._corrections[key] = self._corrections.get(key, 0.0) + share * log(ratio)
        return min(seconds, _MAX_JUMP * max(forecast, self.predict(sessions, sessions)))

    def _key(self, rows: int, sessions: int) -> tuple[int, int]:
        place = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        return place, min(sessions, _MAX_SESSIONS)

    def _measured(self, rows: int) -> float:
        if rows <= self._rows[0] or len(self._rows) == 1:
            return self._seconds[0]
        place = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        low, high = self._rows[place - 1], self._rows[place]
        slope = (self._seconds[place] - self._seconds[place - 1]) / (high - low)
        return max(self._seconds[place - 1] + slope * (rows - low), self._seconds[0])


def measure(one_round: Callable[[], Mapping[int, float]], clock: Callable[[], float]) -> PassTimes:
    """Forecasts from the shortest of a few rounds; from one if the machine is too busy to measure anything well.

    Args:
        one_round: runs a pass of each size; rows to seconds.
        clock: seconds.
    """
    until = clock() + _MEASURE_S
    best = dict(one_round())
    for _ in range(_MEASURE_ROUNDS - 1):
        if clock() < until:
            again = one_round()
            best = {rows: min(seconds, again[rows]) for rows, seconds in best.items()}
    return PassTimes(best)


class Prospect(NamedTuple):
    """What one session offers to a pass: the chance of each candidate given its parent, and how deep it may go."""

    parents: Sequence[int]  # candidate index, -1 for the root
    chances: Sequence[float]
    max_depth: int  # candidates deeper than this could not be committed


def choose(prospects: Sequence[Prospect], times: PassTimes, max_rows: int) -> list[list[int]]:
    """For each session of the pass the candidates to verify, ascending; closed under ancestors.

    Args:
        prospects: one a session; empty lists for a session without a draft.
        times: forecasts.
        max_rows: of the whole pass, roots included.
    """
    sessions = len(prospects)
    ranked: list[tuple[float, int, int]] = []  # negative path probability, session, candidate
    for i, (parents, chances, max_depth) in enumerate(prospects):
        reach = path_chances(parents, chances)
        depth: list[int] = []
        for node, parent in enumerate(parents):
            depth.append(1 if parent < 0 else depth[parent] + 1)
            if depth[node] <= max_depth:
                ranked.append((-reach[node], i, node))
    ranked.sort()
    del ranked[max(0, max_rows - sessions) :]
    tokens = float(sessions)
    best_rate, best_count = tokens / times.iteration(sessions, sessions), 0
    for count, (negative, _, _) in enumerate(ranked, start=1):
        tokens -= negative
        rate = tokens / times.iteration(sessions + count, sessions)
        if rate > best_rate:
            best_rate, best_count = rate, count
    kept: list[list[int]] = [[] for _ in prospects]
    for _, i, node in ranked[:best_count]:
        kept[i].append(node)
    for nodes in kept:
        nodes.sort()
    return kept


def path_chances(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Of each candidate, the chance that it and all above it come true."""
    reach: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        reach.append(chance if parent < 0 else reach[parent] * chance)
    return reach


def worth_drafting(parents: Sequence[int], chances: Sequence[float], kept: Sequence[int], price: float) -> int:
    """How many of the candidates that are kept come true at least as often as `price`, which each of a draft has cost,
    in plain passes."""
    reach = path_chances(parents, chances)
    return sum(reach[node] >= price for node in kept)


def keep_all(prospects: Sequence[Prospect], max_rows: int) -> list[list[int]]:
    """All candidates that can be committed and fit into the pass, whatever they cost; as `choose`, but unmeasured."""
    room = max(0, max_rows - len(prospects))
    kept: list[list[int]] = []
    for parents, _, max_depth in prospects:
        depth: list[int] = []
        for parent in parents:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        nodes = [node for node, level in enumerate(depth) if level <= max_depth][:room]
        room -= len(nodes)
        kept.append(nodes)
    return kept


class NodeBudget:
    """How many candidates a drafter should send: room for twice what proved worth drafting and verifying.

    Args:
        most: candidates that fit into one session's pass.

    Attributes:
        nodes: the budget now.
        mean_kept: running mean of the candidates that a drafted pass verifies.
    """

    def __init__(self, most: int):
        self._most = most
        self.nodes = min(_FIRST_BUDGET, most)
        self.mean_kept = float(min(_LEAST_BUDGET, most))

    def observe(self, drafted: int, kept: int, worth: int | None = None) -> None:
        """Learn from a draft, what was kept of it, and how much of that was worth the drafting; all if unset."""
        self.mean_kept += _MEAN_SHARE * (kept - self.mean_kept)
        worth = kept if worth is None else worth
        if worth >= self.nodes:
            self.nodes = min(2 * self.nodes + 1, self._most)
        elif drafted > 0 and worth < self.nodes // 4:
            self.nodes = max(min(_LEAST_BUDGET, self._most), self.nodes - 1)
