"""From measured times to the costs that the selector predicts with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specla.kernels.gpu.selector import Choice, Cost, features
from specla.kernels.topology import Topology


def fit(choice: Choice, samples: Sequence[tuple[Topology, float]], weights: Sequence[float] | None = None) -> Cost:
    """The cost of a choice from launches that were timed, one topology for all sessions of each.

    Least squares of the relative error, every part at least 0: time never falls with more steps.

    Args:
        choice: what was launched.
        samples: a topology and the microseconds of a launch; at least as many kinds of trees, as the choice sees them,
            as there are costs to tell apart.
        weights: how much each sample's error counts, all alike if None.

    Raises:
        ValueError: too few kinds of trees, or all of as many steps, so that a cost would be a guess; or a time that is
            not positive and finite.
    """
    times = np.array([time for _, time in samples])
    if not len(times) or not np.isfinite(times).all() or (times <= 0).any():
        raise ValueError(f"times {times}: give at least one, all positive and finite")
    counts = np.ones(len(times)) if weights is None else np.sqrt(np.array(weights))
    columns = np.array([[1.0, *features(choice, topology)] for topology, _ in samples])
    if all(len(topology) == 1 for topology, _ in samples):  # plain decoding: there is no other tree
        return Cost(choice, float(np.median(times)), 0.0, 0.0)
    kinds, parts = len(np.unique(columns, axis=0)), np.zeros(3)
    used = [i for i in range(3) if i == 0 or np.ptp(columns[:, i]) > 0]  # what never varies is part of the base
    if kinds < len(used) or 1 not in used:
        raise ValueError(f"{choice}: {kinds} kinds of trees: give at least {len(used)}, of different steps")
    while True:
        weighted = columns[:, used] * (counts / times)[:, None]
        solved, *_ = np.linalg.lstsq(weighted, counts, rcond=None)
        negative = [i for i, value in zip(used, solved, strict=True) if value < 0]
        if not negative:
            parts[used] = solved
            break
        used.remove(min(negative, key=lambda i: solved[used.index(i)]))
    return Cost(choice, *map(float, parts))
