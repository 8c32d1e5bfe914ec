"""The arrays of a pass and the rows of a pool: what they hold, what they refuse, what a refill leaves behind."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import chain, random_tree

from specla.kernels.gpu.factor_pool import PoolRows, PoolTable
from specla.kernels.gpu.pass_batch import ZEROS, Bucket, PassBatch, SessionPass, stores
from specla.kernels.gpu.schedule import schedule
from specla.kernels.topology import MAX_ROWS, Topology

BUCKET = Bucket(sessions=3, rows=12, tree_rows=6, pending=4, taps=4, groups=2)
FORK = Topology.from_wire([-1, -1, 0, 2])  # rows: 0 root, 1 and 2 below it, 3 below 1, 4 below 3


def one(slot: int = 0, topology: Topology = FORK, **fields: object) -> SessionPass:
    return replace(SessionPass(slot=slot, topology=topology, pool_rows=range(10, 10 + len(topology))), **fields)  # type: ignore[arg-type]


def filled(sessions: Sequence[SessionPass], bucket: Bucket = BUCKET) -> PassBatch:
    batch = PassBatch(bucket, "cpu")
    batch.fill(sessions)
    return batch


@pytest.mark.parametrize(
    "sizes",
    [
        {"sessions": 0, "rows": 1, "tree_rows": 1},
        {"sessions": 3, "rows": 2, "tree_rows": 1},
        {"sessions": 1, "rows": 200, "tree_rows": MAX_ROWS + 1},
        {"sessions": 1, "rows": 4, "tree_rows": 5},
        {"sessions": 1, "rows": 4, "tree_rows": 0},
        {"sessions": 1, "rows": 1, "tree_rows": 1, "pending": -1},
        {"sessions": 1, "rows": 1, "tree_rows": 1, "taps": 0},
        {"sessions": 1, "rows": 1, "tree_rows": 1, "groups": 0},
    ],
)
def test_buckets_that_no_pass_can_have(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="want "):
        Bucket(**sizes)


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        ([one(slot, Topology.root_only()) for slot in range(4)], "4 sessions do not fit a bucket of 3"),
        ([one(slot) for slot in range(3)], "15 rows do not fit a bucket of 12"),
        ([one(1), one(1)], r"slots \[1, 1\]: give every session its own"),
        ([one(-1)], "from 0 on"),
        ([one(topology=chain(7))], "a tree of 7 rows does not fit a bucket of 6"),
        ([one(pending=range(5))], "5 pending factors do not fit a bucket of 4"),
        ([one(pending=[3, 3])], "each once"),
        ([one(pending=[-1])], "from 0 on"),
        ([one(history=[0, 1])], r"history \[0, 1\]: give 3 pool rows"),
        ([one(history=[-2, 0, 1])], "or -1 for zeros"),
        ([one(pool_rows=[1, 2, 3, 4])], "for 5 rows"),
        ([one(pool_rows=[1, 2, 3, 4, 4])], "give each its own"),
        ([one(pool_rows=[-1, 2, 3, 4, 5])], "pool rows"),
        ([one(pending=[12])], r"none of \[12\] still in use"),
        ([one(history=[-1, 14, 2])], r"none of \[2, 14\] still in use"),
    ],
)
def test_sessions_that_are_refused_leave_the_batch_as_it_was(sessions: list[SessionPass], message: str) -> None:
    batch = filled([one(2)])
    before = batch.buffer.clone()
    with pytest.raises(ValueError, match=message):
        batch.fill(sessions)
    assert torch.equal(batch.buffer, before)


def test_what_the_arrays_hold() -> None:
    first = one(5, FORK, pending=[7, 3], history=[ZEROS, 7, 3], write_state=False)
    second = one(1, chain(3), pool_rows=[4, 0, 2])
    batch = filled([first, second])
    assert batch.slot.tolist() == [5, 1, -1]
    assert batch.row_start.tolist() == [0, 5, 8, 8]
    assert batch.pending_len.tolist() == [2, 0, 0]
    assert batch.pending.tolist() == [[7, 3, 0, 0], [0] * 4, [0] * 4]
    assert batch.write_state.tolist() == [0, 1, 0]
    assert batch.history.tolist() == [[-1, 7, 3], [-1] * 3, [-1] * 3]
    assert batch.row_session.tolist() == [0] * 5 + [1] * 3 + [-1] * 4
    assert batch.pool_row.tolist() == [10, 11, 12, 13, 14, 4, 0, 2] + [0] * 4
    assert batch.depth.tolist() == [0, 1, 1, 2, 3, 0, 1, 2] + [0] * 4
    # Ancestors in the session's own numbering, itself included.
    assert batch.ancestors[:8, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011, 0b1, 0b11, 0b111]
    # Taps: rows of the pass, then -1 for the last token before the root.
    assert batch.tap[:8].tolist() == [
        [-1, -2, -3],
        [0, -1, -2],
        [0, -1, -2],
        [1, 0, -1],
        [3, 1, 0],
        [-1, -2, -3],
        [5, -1, -2],
        [6, 5, -1],
    ]
    assert batch.groups.tolist() == [len(schedule(FORK, 2).lengths), 1, 0]
    for b, topology in enumerate((FORK, chain(3))):
        for group, words in enumerate(schedule(topology, 2).by_group()):
            assert batch.schedule_len[b, group] == len(words)
            assert batch.schedule[b, group, : len(words)].tolist() == words.tolist()
    assert batch.schedule_len[2].tolist() == [0, 0]


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("tree_rows", [65, 129])
def test_ancestor_words_of_trees_smaller_and_larger_than_a_word(rows: int, tree_rows: int) -> None:
    rows = min(rows, tree_rows)
    topology = random_tree(random.Random(rows), rows)
    batch = filled([one(0, topology)], Bucket(sessions=1, rows=tree_rows, tree_rows=tree_rows))
    words = batch.ancestors.tolist()
    for row in range(rows):
        bits = [a for a in range(32 * len(words[row])) if words[row][a // 32] >> a % 32 & 1]
        assert bits == topology.path(row)
    assert not batch.ancestors[rows:].any()


@pytest.mark.parametrize("taps", [1, 2, 7])
def test_taps_of_other_widths(taps: int) -> None:
    batch = filled([one(history=range(taps - 1))], replace(BUCKET, taps=taps))
    for row in range(len(FORK)):
        above = FORK.path(row)[-2::-1]
        want = [*above, *range(-1, -taps, -1)][: taps - 1]
        assert batch.tap[row].tolist() == want


def test_a_refill_leaves_nothing_of_the_former() -> None:
    batch = PassBatch(BUCKET, "cpu")
    addresses = {name: getattr(batch, name).data_ptr() for name in BUCKET.shapes()}
    many = [one(3, pending=[1, 2], history=[0, 1, 2]), one(1, chain(6)), one(2, Topology.root_only(), pending=[5])]
    few = [one(0, Topology.root_only(), write_state=False)]
    for sessions in (many, few, [], many):
        batch.fill(sessions)
        assert torch.equal(batch.buffer, filled(sessions).buffer)
    assert addresses == {name: getattr(batch, name).data_ptr() for name in BUCKET.shapes()}
    assert all(address % 16 == 0 for address in addresses.values())


def test_arrays_do_not_overlap() -> None:
    batch = PassBatch(replace(BUCKET, pending=3, rows=13), "cpu")
    for i, name in enumerate(BUCKET.shapes()):
        getattr(batch, name).fill_(100 + i)
    for i, name in enumerate(BUCKET.shapes()):
        assert bool((getattr(batch, name) == 100 + i).all()), name


@pytest.mark.gpu
def test_arrays_on_a_device_are_those_of_the_host(device: torch.device) -> None:
    batch = PassBatch(BUCKET, device)
    for sessions in ([one(3, pending=[1, 2], history=[0, 1, 2]), one(1)], [], [one(2, chain(4))]) * 20:
        batch.fill(sessions)  # the copy before may still be under way
        assert torch.equal(batch.buffer.cpu(), filled(sessions).buffer)


class PlainPool:
    """What a session's pool must remember, as tokens; `where` says on which row each token was put."""

    def __init__(self, taps: int) -> None:
        self.taps, self.committed, self.unwritten = taps, 0, 0
        self.where: list[int] = []

    def history(self) -> list[int]:
        kept = self.where[max(0, self.committed - self.taps + 1) :] if self.taps > 1 else []
        return [ZEROS] * (self.taps - 1 - len(kept)) + kept

    def pending(self) -> list[int]:
        return self.where[self.committed - self.unwritten :]


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 6), st.sampled_from(["keep", "write", "flush"])), max_size=25
    ),
)
def test_rows_of_a_pool_over_many_passes(taps: int, passes: list[tuple[int, int, str]]) -> None:
    """Whatever is accepted and whenever S is written: pending, history and free rows are what the tokens say."""
    size = 24
    rows, plain = PoolRows(size, taps), PlainPool(taps)
    for count, accepted, action in passes:
        in_use = {row for row in (*rows.pending, *rows.history) if row != ZEROS}
        if count > size - len(in_use):
            with pytest.raises(ValueError, match=f"{size - len(in_use)} of {size} are free"):
                rows.take(count)
            rows.flushed()
            plain.unwritten = 0
            continue
        taken = rows.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & in_use
        assert set(taken) <= set(range(size))
        assert rows.take(count) == taken  # nothing is in use before it is accepted
        path = taken[: min(accepted, count)]
        rows.accept(path, state_written=action == "write")
        plain.where += path
        plain.committed += len(path)
        plain.unwritten = len(path) + (0 if action == "write" else plain.unwritten)
        if action == "flush":
            rows.flushed()
            plain.unwritten = 0
        assert rows.pending == plain.pending()
        assert rows.history == plain.history()


def test_a_pass_that_accepted_nothing_changes_only_what_was_written() -> None:
    rows = PoolRows(8, 4)
    rows.accept(rows.take(2), state_written=False)
    rows.accept([], state_written=False)
    assert (rows.pending, rows.history) == ([0, 1], [ZEROS, 0, 1])
    rows.accept([], state_written=True)
    assert (rows.pending, rows.history) == ([], [ZEROS, 0, 1])
    assert rows.take(6) == [2, 3, 4, 5, 6, 7]


def in_use(pool: PoolRows) -> int:
    return len({*pool.pending, *pool.history} - {ZEROS})


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.sampled_from([2, 4, 8]))
def test_what_a_table_of_pools_puts_is_what_is_filled_in(seed: int, taps: int, many: int) -> None:
    """Pass after pass of random sessions: the same words as `fill` makes of their lists, and the same pools."""
    drawn, size, most = random.Random(seed), 15, 4
    bucket = Bucket(sessions=3, rows=24, tree_rows=8, pending=8, taps=taps, groups=2)
    table, plain = PoolTable(5, size, taps), [PoolRows(size, taps) for _ in range(5)]
    put, wanted = PassBatch(bucket, "cpu"), PassBatch(bucket, "cpu")
    for _ in range(12):
        slots = drawn.sample(range(5), drawn.randint(1, 3))
        trees = tuple(random_tree(drawn, drawn.randint(1, 8)) for _ in slots)
        chosen = np.array(slots, np.int32)
        done = put.put(trees, chosen, table, most, many)
        assert done == all(
            len(plain[slot].pending) <= most
            or (len(plain[slot].pending) <= bucket.pending and len(tree) <= size - in_use(plain[slot]))
            for slot, tree in zip(slots, trees, strict=True)
        )
        if not done:
            for slot in slots:
                table.slots[slot].flushed()
                plain[slot].flushed()
            continue
        writes = [
            stores(len(plain[slot].pending), len(tree.levels), len(tree), size, bucket.pending, most, many)
            for slot, tree in zip(slots, trees, strict=True)
        ]
        taken = [plain[slot].take(len(tree)) for slot, tree in zip(slots, trees, strict=True)]
        wanted.fill(
            [
                SessionPass(
                    slot=slot,
                    topology=tree,
                    pool_rows=rows,
                    pending=plain[slot].pending,
                    history=plain[slot].history,
                    write_state=write,
                )
                for slot, tree, rows, write in zip(slots, trees, taken, writes, strict=True)
            ]
        )
        assert torch.equal(put.buffer, wanted.buffer)
        put.stored(table)
        paths = [tree.path(drawn.randrange(len(tree))) if drawn.random() < 0.8 else [] for tree in trees]
        table.accept(chosen, paths)
        for slot, rows, path, write in zip(slots, taken, paths, writes, strict=True):
            plain[slot].accept([rows[row] for row in path], state_written=write)
        for one_of, other in zip(table.slots, plain, strict=True):
            assert (one_of.pending, one_of.history) == (other.pending, other.history)


def test_a_table_without_rows_for_a_pass() -> None:
    table, batch = PoolTable(1, 4, 4), PassBatch(BUCKET, "cpu")
    with pytest.raises(ValueError, match="no rows left"):
        batch.put((FORK,), np.zeros(1, np.int32), table, 4, 4)


@pytest.mark.parametrize(
    ("worth", "rows", "count", "depth", "first"),
    [
        (4, 72, 1, 1, 5),  # more than are worth waiting, although there is room
        (16, 72, 16, 1, 16),  # there are places for 16
        (16, 72, 16, 6, 11),
        (16, 24, 16, 6, 3),  # any tree finds room beside 8
        (16, 24, 10, 6, 9),  # such a tree beside 14
        (16, 16, 16, 6, 3),
    ],
)
def test_from_how_many_waiting_rows_on_a_state_is_stored(
    worth: int, rows: int, count: int, depth: int, first: int
) -> None:
    assert [stores(waiting, depth, count, rows, 16, 8, worth) for waiting in range(17)] == [
        waiting >= first for waiting in range(17)
    ]
