"""What is timed, the goals' cases first: shapes, sessions, trees and rivals."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from specla.benchmarks.kernels.drift import STEPS
from specla.benchmarks.kernels.sampler import CONFIGS, DEFAULT
from specla.benchmarks.kernels.shapes import NARROW, PAPER, WIDE, Shape
from specla.benchmarks.kernels.topologies import chain, eagle_like, tree
from specla.kernels.topology import Topology

DEEP, WIDE_TREE = "tree (2, 12, 16)", "tree (4, 4, 32)"

_SIZES = (
    *((2, 12, 16), (4, 4, 32)),
    # for the selector's table alone
    *((8, 2, 12), (4, 3, 10), (4, 5, 15), (2, 12, 24), (8, 3, 28), (2, 8, 22)),
    *((8, 3, 48), (4, 10, 40), (3, 8, 44), (8, 5, 56), (8, 4, 100), (4, 12, 100), (3, 8, 80)),
)

TREES: dict[str, Callable[[], Topology]] = {
    **{f"chain of {n}": partial(chain, n) for n in (1, 4, 8, 16, 24, 40, 80)},
    **{f"tree {sizes}": partial(tree, *sizes) for sizes in _SIZES},
    **{f"EAGLE-like tree of {n}": partial(eagle_like, n) for n in (8, 16, 20, 32, 40, 64, 96, 128, 129)},
}
"""Trees are named (branching, depth, rows); all sizes are rows, root included."""

GOAL_ROUNDS, SHORT_ROUNDS, GRID_ROUNDS = 25, 15, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table of rivals.

    Attributes:
        shape: of the layers.
        sessions: of the pass; all have the same tree.
        tree: a key of TREES.
        rounds: samples of each.
        goal: whether a goal hangs on it.
        replay: which of the library's kernels replay paths; none for no such rivals.
    """

    shape: Shape
    sessions: int
    tree: str
    rounds: int = GRID_ROUNDS
    goal: bool = False
    replay: tuple[str, ...] = ("recurrent",)

    @property
    def name(self) -> str:
        """As in the tables."""
        sessions = f"{self.sessions} session{'s' if self.sessions > 1 else ''}"
        extra = ", with the chunked kernel" if "chunked" in self.replay else ""
        return f"{self.shape.name}, {sessions}, {self.tree}{extra}"

    @property
    def topology(self) -> Topology:
        """The tree of every session."""
        return TREES[self.tree]()

    @property
    def is_chain(self) -> bool:
        """Whether rivals that know chains alone can run it."""
        return self.tree.startswith("chain")


def _eagle(rows: int) -> str:
    return f"EAGLE-like tree of {rows}"


GOAL_CASES = (
    *(Case(shape=PAPER, sessions=1, tree=t, rounds=GOAL_ROUNDS, goal=True) for t in (DEEP, WIDE_TREE)),
    *(Case(shape=PAPER, sessions=1, tree=_eagle(n), rounds=GOAL_ROUNDS, goal=True) for n in (16, 32, 64)),
    *(Case(shape=PAPER, sessions=s, tree=_eagle(16), rounds=GOAL_ROUNDS, goal=True) for s in (16, 64)),
    Case(shape=WIDE, sessions=1, tree=_eagle(129), rounds=GOAL_ROUNDS, goal=True),
)

_GRID_TREES = (_eagle(64), "chain of 8", WIDE_TREE, DEEP, "chain of 16", _eagle(128), "chain of 4")


def all_cases() -> list[Case]:
    """Goals first; then the grid, each shape and number of sessions with its commonest trees before the rare ones."""
    cases = [*GOAL_CASES]
    seen = {(c.shape, c.sessions, c.tree) for c in cases}
    for trees in (_GRID_TREES[:3], _GRID_TREES[3:5], _GRID_TREES[5:]):
        for shape in (PAPER, WIDE, NARROW):
            for sessions in (1, 16, 4, 64):
                cases += [
                    Case(shape=shape, sessions=sessions, tree=t) for t in trees if (shape, sessions, t) not in seen
                ]
        if trees[0] == _GRID_TREES[0]:
            # The library tunes its chunked kernels for a minute a shape: the paper's shape, and after the first grid.
            cases += [Case(shape=PAPER, sessions=1, tree=t, replay=("recurrent", "chunked")) for t in (DEEP, WIDE_TREE)]
    return cases


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place of the selector's grid.

    Attributes:
        shape: of the layers.
        sessions: of the pass; all have the same tree.
        rows: of the bucket.
        trees: keys of TREES, over which a choice's time is fitted.
    """

    shape: Shape
    sessions: int
    rows: int
    trees: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.shape.name}, {self.sessions} session{'s' if self.sessions > 1 else ''}, up to {self.rows} rows"

    @property
    def topologies(self) -> dict[str, Topology]:
        """The trees by name."""
        return {name: TREES[name]() for name in self.trees}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a run does.

    Attributes:
        cases: in the order in which they are timed.
        samplers: configurations of the sampler (see sampler.py).
        places: what the selector's table is made from.
        drift_steps: committed tokens of the drift curves; 0 leaves them out.
        others: whether convolution, penalties and the host's part are timed, too.
        device: where to run.
        processes: that prepare side by side; one a core if unset.
    """

    cases: tuple[Case, ...] = ()
    samplers: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    drift_steps: int = STEPS
    others: bool = False
    device: str = "cuda"
    processes: int | None = None


def full_plan() -> Plan:
    """The goals, then the whole grid."""
    return Plan(cases=tuple(all_cases()), samplers=tuple(CONFIGS), others=True)


def goals_plan() -> Plan:
    """What the goals hang on and nothing else: fewer rounds, replay where a goal compares with it."""
    cases = [
        replace(case, rounds=SHORT_ROUNDS, replay=case.replay if case.tree in (DEEP, WIDE_TREE) else ())
        for case in GOAL_CASES
    ]
    return Plan(cases=tuple(cases), samplers=(DEFAULT,))


TUNING_TREES = {
    1: ("chain of 1",),
    16: (
        *(_eagle(16), "chain of 4", "chain of 8", "chain of 16", DEEP, "tree (8, 2, 12)", "tree (4, 3, 10)"),
        *("tree (4, 5, 15)", _eagle(8)),
    ),
    32: (_eagle(32), "chain of 24", WIDE_TREE, "tree (2, 12, 24)", "tree (8, 3, 28)", "tree (2, 8, 22)", _eagle(20)),
    64: (
        _eagle(64),
        "chain of 40",
        "tree (8, 3, 48)",
        "tree (4, 10, 40)",
        "tree (3, 8, 44)",
        "tree (8, 5, 56)",
        _eagle(40),
    ),
    129: (_eagle(129), "chain of 80", "tree (8, 4, 100)", "tree (4, 12, 100)", "tree (3, 8, 80)", _eagle(96)),
}
"""Trees by the bucket that runs them: chains, deep and wide ones and EAGLE-like, of different rows. With too few kinds
the costs of steps, groups and blocks could not be told apart."""


def tuning_plan(only: Collection[int] = ()) -> Plan:
    """What a selector's table is made from: every shape and number of sessions, trees of every bucket.

    A bucket of 128 rows takes what one of 129 does. `only` names buckets by their rows, and leaves the others out.
    """
    places = [
        Place(shape=shape, sessions=sessions, rows=rows, trees=trees)
        for shape in (PAPER, WIDE, NARROW)
        for rows, trees in TUNING_TREES.items()
        for sessions in (1, 16, 4, 64)
        if not only or rows in only
    ]
    return Plan(places=tuple(places), drift_steps=0)
