"""How sessions' rows are laid side by side."""

import random

import pytest
import torch
from tree_cases import random_tree

from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch, pack


def random_batch(rng: random.Random) -> TreeBatch:
    return pack([random_tree(rng, rng.randint(1, 14)) for _ in range(rng.randint(1, 5))])


def test_rows_of_two_sessions() -> None:
    batch = pack([Topology.from_wire([-1, 0]), Topology.from_wire([-1, -1])])
    assert (batch.sessions, batch.rows, batch.offsets, batch.roots_only) == (2, 6, (0, 3, 6), False)
    assert batch.parents == (-1, 0, 1, -1, 3, 3)
    assert batch.parent_row.tolist() == [-1, 0, 1, -1, 3, 3]
    assert batch.row_session.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.depth.tolist() == [0, 1, 2, 0, 1, 1]
    assert [level.tolist() for level in batch.levels] == [[0, 3], [1, 4, 5], [2]]
    assert batch.path(1, 2) == [3, 5]


def test_same_shapes_give_the_same_batch() -> None:
    shapes = [[-1, 0], [], [-1, -1]]
    assert pack([Topology.from_wire(s) for s in shapes]) is pack([Topology.from_wire(s) for s in shapes])


def test_no_session_is_refused() -> None:
    with pytest.raises(ValueError, match="no sessions"):
        pack([])


def test_breadth_first_rows_are_not_moved() -> None:
    batch = pack([Topology.from_wire([-1, -1, 0, 0, 1]), Topology.root_only()])
    assert batch.cell_rows is None
    assert batch.row_cells is None


def test_steps_cover_the_cells_in_order() -> None:
    rng = random.Random(3)
    for _ in range(300):
        batch = random_batch(rng)
        assert sorted(batch.cells) == list(range(batch.rows))
        if batch.row_cells is not None:
            assert [batch.cells[c] for c in batch.row_cells.tolist()] == list(range(batch.rows))
        step_of: list[int] = []
        for index, step in enumerate(batch.steps):
            cells = range(len(step_of), len(step_of) + step.size)
            parents = {batch.parents[batch.cells[cell]] for cell in cells}
            if step.parent < 0:
                assert parents == {-1}
                assert batch.cells[cells[0]] == batch.offsets[step.session]
            else:
                assert parents == {batch.cells[step.parent]}
                assert step.source == step_of[step.parent]
                later = [s.source for s in batch.steps[index + 1 :]]
                assert step.last_use == (step.source not in later)
            step_of += [index] * step.size
        assert len(step_of) == batch.rows


def test_taps_are_ancestors_then_window() -> None:
    rng = random.Random(4)
    for width in (2, 4, 6):
        for _ in range(60):
            batch = random_batch(rng)
            before = width - 1
            table = batch.taps(width).view(width, batch.rows).T.tolist()
            for session, topology in enumerate(batch.topologies):
                window = [session * before + i for i in range(before)]
                for row in range(len(topology)):
                    path = [batch.sessions * before + r for r in batch.path(session, row)]
                    global_row = batch.offsets[session] + row
                    assert table[global_row] == [*window, *path][-width:]
                    assert batch.window_after(width, global_row).tolist() == [*window, *path][-before:]


def test_padded_trees() -> None:
    rng = random.Random(6)
    for _ in range(60):
        batch = random_batch(rng)
        trees = batch.padded
        n = trees.width
        path = torch.zeros(batch.sessions, n, n)
        for session, topology in enumerate(batch.topologies):
            for row in range(len(topology)):
                path[session, row, topology.path(row)] = 1
        assert torch.equal(trees.path[:, 0], path)
        strict = path - torch.diag_embed(torch.diagonal(path, dim1=1, dim2=2))
        assert torch.equal(trees.below[:, :, 1:], strict)
        assert torch.equal(trees.off_path[:, 0, :, 1:] == 0, path == 1)
        assert bool((trees.below[:, :, 0] == 1).all())
        assert bool((trees.off_path[:, 0, :, 0] == 0).all())
        if trees.rows is None:
            assert len({len(t) for t in batch.topologies}) == 1
        else:
            assert trees.places is not None
            assert trees.rows[trees.places].tolist() == list(range(batch.rows))
