"""Which bucket a pass runs in: the least of a few sizes that holds it, so that few graphs serve all passes."""

from __future__ import annotations

from collections.abc import Sequence

from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.topology import Topology

TREE_ROWS = (1, 16, 32, 64, 129)
"""Rows of one session that buckets are made for."""

FEW_ROWS = 64
"""Passes of fewer rows take hardly less, so what is made for so many serves them, too."""

PENDING = 16
"""Places for a session's pending factors; kernels are compiled for that many."""

MOST_PENDING = 8
"""Accepted rows for which a session's pool has room beside any pass; each costs it 1.2% of its state (K = V = 256)."""

_FEW_PENDING = 4
"""Accepted rows that are worth waiting where each is applied by itself."""

_FEWEST_CHAIN_ROWS, _MOST_CHAIN_ROWS = 16, 64


def chain_rows(max_rows: int) -> int:
    """Up to how many known tokens run as one chain, where a pass has `max_rows` rows of one session."""
    return min(_MOST_CHAIN_ROWS, max(_FEWEST_CHAIN_ROWS, max_rows))


def worth_waiting(*, serial: bool) -> int:
    """With how many accepted rows waiting a pass does not store a session's state yet, if there is room.

    The factorised kernel applies a few or many in the same product, the serial ones each by itself: from the fifth on
    that costs more than storing the state less often saves (see docs/decisions.md).
    """
    return _FEW_PENDING if serial else PENDING


def bucket_of(topologies: Sequence[Topology], most_rows: int, taps: int, groups: int) -> Bucket:
    """The bucket for these trees.

    Args:
        topologies: one a session.
        most_rows: rows of all sessions together, at most.
        taps: of the convolution.
        groups: programs that share a tree in the serial kernels.
    """
    total, largest = sum(map(len, topologies)), max(map(len, topologies))
    return _bucket(len(topologies), total, largest, most_rows, taps, groups)


def largest_bucket(sessions: int, tree_rows: int, most_rows: int, taps: int) -> Bucket:
    """The bucket with the most rows: all sessions, as many rows as there may be, a program a tree."""
    return _bucket(sessions, min(sessions * tree_rows, most_rows), tree_rows, most_rows, taps, 1)


def usual_batches(sessions: int, max_rows: int, most_rows: int) -> list[list[Topology]]:
    """Batches of trees whose buckets are made at the start: every number of sessions and size of tree that fits, where
    some sessions have no more than their root as well, and the longest chain of known tokens.

    With these every pass finds a bucket of its sessions and trees that has no more than twice its rows, or FEW_ROWS.

    Args:
        sessions: the most at once.
        max_rows: of one session.
        most_rows: of all together.
    """
    found = []
    counts = [*(1 << i for i in range((sessions - 1).bit_length())), sessions]
    for rows in dict.fromkeys(min(size, max_rows) for size in TREE_ROWS):
        shapes = [_binary(rows)] if rows < 3 else [_binary(rows), _chain(rows)]
        for count in counts:
            if count * rows <= most_rows:
                found += [[shape] * count for shape in shapes]
            found += [_mixed(count, rows, total) for total in _totals(count, rows, most_rows)]
    if chain_rows(max_rows) > max_rows:  # known tokens have longer chains than drafts
        found.append([_chain(chain_rows(max_rows))])
    return found


def _totals(count: int, rows: int, most_rows: int) -> list[int]:
    """Rows of the mixed batches to make for so many sessions and trees of so many rows, beside a batch of trees alone:
    each for passes of at least half as many, the least for all below."""
    tree_rows = next(size for size in TREE_ROWS if size >= rows)
    enough = max(FEW_ROWS, 2 * tree_rows, 2 * _power_of_two(count))
    most = min(_power_of_two(count * rows), most_rows)
    totals = [most] if count * rows > most_rows else []
    while most > enough:
        most = max(most // 4, _power_of_two(rows + count - 1))
        totals.append(most)
    return [total for total in totals if 0 < _trees_of(count, rows, total) < count]


def _trees_of(count: int, rows: int, total: int) -> int:
    return (total - count) // (rows - 1) if rows > 1 else 0


def _mixed(count: int, rows: int, total: int) -> list[Topology]:
    """As many trees as fit into so many rows of all sessions, the other sessions with their root."""
    trees = _trees_of(count, rows, total)
    return [_binary(rows)] * trees + [Topology.root_only()] * (count - trees)


def _chain(rows: int) -> Topology:
    return Topology.from_wire(range(-1, rows - 2))


def _binary(rows: int) -> Topology:
    """Every row has two children, as far as rows go: about as deep as a drafter's tree."""
    return Topology.from_wire([(row - 1) // 2 - 1 for row in range(1, rows)])


def _bucket(sessions: int, total: int, largest: int, most_rows: int, taps: int, groups: int) -> Bucket:
    tree_rows = next(size for size in TREE_ROWS if size >= largest)
    places = _power_of_two(sessions)
    rows = tree_rows if total <= tree_rows else max(total, min(_power_of_two(total), most_rows))
    return Bucket(
        sessions=places, rows=max(rows, places), tree_rows=tree_rows, pending=PENDING, taps=taps, groups=groups
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
