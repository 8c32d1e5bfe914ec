"""Which bucket a pass runs in, what is prepared at the start, and the memory that passes share."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import chain, random_tree

from specla.kernels.gpu.factor_pool import PoolTable
from specla.kernels.gpu.pass_batch import PassBatch
from specla.kernels.gpu.selector import Choice
from specla.kernels.gpu.upload import Upload
from specla.kernels.topology import Topology
from specla.verifier_service.gpu.arena import Layout
from specla.verifier_service.gpu.buckets import (
    MOST_PENDING,
    PENDING,
    TREE_ROWS,
    bucket_of,
    chain_rows,
    usual_batches,
    worth_waiting,
)
from specla.verifier_service.gpu.pass_run import PassKey
from specla.verifier_service.gpu.store import pool_rows


@given(st.lists(st.integers(1, 129), min_size=1, max_size=40), st.integers(129, 400))
def test_a_bucket_holds_its_pass_and_is_one_of_few(sizes: list[int], most_rows: int) -> None:
    bucket = bucket_of([chain(size) for size in sizes], most_rows, 4, 1)
    total = sum(sizes)
    assert bucket.sessions >= len(sizes) > bucket.sessions // 2
    assert bucket.tree_rows == min(size for size in TREE_ROWS if size >= max(sizes))
    assert bucket.rows >= total
    assert bucket.rows <= max(2 * total, bucket.tree_rows, bucket.sessions)
    if total <= most_rows:
        assert bucket.rows <= max(most_rows, bucket.sessions)


@pytest.mark.parametrize("serial", [True, False])
@given(st.integers(0, 1 << 30), st.sampled_from([1, 16, 64, 129]), st.integers(1, 12))
def test_a_pool_has_rows_for_every_pass(serial: bool, seed: int, max_rows: int, taps: int) -> None:
    """Trees of any sizes in any order: once the states that many rows wait for are written, a pass finds its rows."""
    drawn, slots = random.Random(seed), np.arange(2, dtype=np.int32)
    table = PoolTable(2, pool_rows(max_rows, MOST_PENDING, taps), taps)
    batch = PassBatch(bucket_of([chain(max_rows)] * 2, 2 * max_rows, taps, 1), "cpu")
    for _ in range(40):
        trees = tuple(random_tree(drawn, min(max_rows, drawn.choice(TREE_ROWS))) for _ in slots)
        if not batch.put(trees, slots, table, MOST_PENDING, worth_waiting(serial=serial)):
            for pool in table.slots:
                if len(pool.pending) > MOST_PENDING:
                    pool.flushed()
            assert batch.put(trees, slots, table, MOST_PENDING, worth_waiting(serial=serial))
        batch.stored(table)
        assert all(len(pool.pending) <= PENDING for pool in table.slots)
        table.accept(slots, [range(drawn.randint(1, len(tree.levels))) for tree in trees])


def test_usual_batches_are_all_sizes_that_fit() -> None:
    batches = usual_batches(16, 65, 337)
    assert all(sum(map(len, batch)) <= 337 for batch in batches)
    assert {(len(batch), len(batch[0])) for batch in batches if len({*map(len, batch)}) == 1} >= {
        (1, 1),
        (16, 1),
        (1, 16),
        (16, 16),
        (1, 65),
        (4, 65),
    }
    assert [Topology.root_only()] in batches
    assert [list(map(len, batch)) for batch in usual_batches(3, 1, 16)] == [[1], [1, 1], [1, 1, 1], [16]]
    assert usual_batches(1, 8, 16)[-1] == [chain(16)]
    assert [chain_rows(rows) for rows in (1, 16, 40, 129)] == [16, 16, 40, 64]


@given(st.integers(1, 40), st.integers(1, 129))
def test_every_number_of_sessions_decodes_in_a_usual_bucket(sessions: int, max_rows: int) -> None:
    most_rows = max(256, sessions)
    usual = {bucket_of(batch, most_rows, 4, 1) for batch in usual_batches(sessions, max_rows, most_rows)}
    for count in range(1, sessions + 1):
        assert bucket_of([Topology.root_only()] * count, most_rows, 4, 1) in usual
    assert bucket_of([chain(chain_rows(max_rows))], most_rows, 4, 1) in usual


def key_of(batch: Sequence[Topology], most_rows: int) -> PassKey:
    return PassKey(bucket_of(batch, most_rows, 4, 1), Choice("serial"), True, ())


@given(st.sampled_from([1, 2, 3, 4, 8, 16, 64]), st.sampled_from([1, 2, 7, 8, 16, 33, 64, 65, 129]), st.data())
def test_every_pass_runs_in_a_usual_bucket(sessions: int, max_rows: int, data: st.DataObject) -> None:
    """Whatever its sessions have drafted, nothing is captured for it while they wait."""
    most_rows = max(256, sessions)
    usual = {key_of(batch, most_rows) for batch in usual_batches(sessions, max_rows, most_rows)}
    sizes = data.draw(st.lists(st.integers(1, max_rows), min_size=1, max_size=sessions))
    while sum(sizes) > most_rows:  # as the verifier keeps fewer candidates
        sizes[sizes.index(max(sizes))] //= 2
    asked = key_of([chain(size) for size in sizes], most_rows)
    assert asked in usual or any(asked.can_run_as(other) for other in usual)
    assert len(usual) <= 60


def test_layouts_share_memory_from_where_they_part() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    layout = Layout(memory)
    first = layout.take(3, dtype=torch.float32)
    beside = layout.beside()
    a, b = layout.take(8, dtype=torch.int32), beside.take(16, dtype=torch.int16)
    a.fill_(7)
    assert b[0] == 7
    assert not first.any()
    assert first.data_ptr() % 4 == 0
    assert (a.data_ptr() - memory.data_ptr()) % 256 == 0
    counted = Layout(None)
    counted.take(3, dtype=torch.float32)
    counted.take(8, dtype=torch.int32)
    assert counted.nbytes == layout.nbytes
    with pytest.raises(ValueError, match="do not fit"):
        layout.take(4096, dtype=torch.float32)


def test_parts_of_an_upload_go_together() -> None:
    whole = Upload(Upload.room(3, 5), "cpu")
    parts = [Upload(size, "cpu", within=whole) for size in (3, 5)]
    for i, part in enumerate(parts):
        part.words()[:] = i + 1
        part.send()
        assert not part.buffer.any()
    whole.send()
    assert [part.buffer.tolist() for part in parts] == [[1] * 3, [2] * 5]
    with pytest.raises(ValueError, match="do not fit"):
        Upload(5, "cpu", within=whole)
