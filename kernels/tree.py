"""The rows of one pass: several sessions' topologies side by side, with the indices that the PyTorch forms need.

Rows are numbered session by session, root first, as the sessions' topologies number them. The recurrence walks them
level by level, so a second order, *cells*, sorts them by depth and inside a depth by parent; for one session whose
candidates come breadth first, siblings together, both orders are the same and nothing is moved.

A batch depends on shapes alone and is cached: everything here is computed once a shape, not once a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from specla.kernels.topology import Topology

_CACHED_BATCHES = 256


@dataclass(frozen=True, eq=False)
class Level:
    """The cells of one depth and how they find their parents' states.

    `parents` P counts the states that the level reads: all sessions at depth 0, later the cells with children of the
    level above. Cells are in P groups of siblings, of `width` cells at most. `inner` are the level's own cells that
    have children, counted from the level's start.
    """

    start: int
    stop: int
    parents: int
    width: int
    groups: tuple[tuple[int, ...], ...]
    """For each parent its cells, counted from the batch's first."""
    inner: tuple[int, ...]
    parent_of_inner: tuple[int, ...]
    """For each inner cell the index, below P, of its parent's state."""
    _indices: dict[tuple[str, int, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def even(self) -> bool:
        """Whether every parent has the same number of children."""
        return len(self.groups) * self.width == self.stop - self.start

    def qk_index(self, heads: int, value_heads: int) -> Tensor:
        """int64 [P * HV * width * 2]: rows of qk, seen as [R * 2 * H, K], that the level's product multiplies.

        Groups shorter than `width` repeat their first cell; what comes of it is dropped by `result_index`.
        """
        key = ("qk", heads, value_heads)
        if key not in self._indices:
            cells = torch.tensor([(*g, *([g[0]] * (self.width - len(g)))) for g in self.groups])  # [P, width]
            head = torch.arange(value_heads) // (value_heads // heads)
            pair = cells[:, None, :, None] * 2 + torch.arange(2)  # [P, 1, width, 2]
            self._indices[key] = (pair * heads + head[None, :, None, None]).reshape(-1)
        return self._indices[key]

    def result_index(self, value_heads: int) -> Tensor:
        """int64 [2 * n * HV]: rows of the product, seen as [P * HV * width * 2, V], that hold the n cells' results."""
        key = ("result", 0, value_heads)
        if key not in self._indices:
            place = torch.tensor([(p, i) for p, g in enumerate(self.groups) for i in range(len(g))])  # [n, 2]
            head = torch.arange(value_heads)
            row = (place[:, :1] * value_heads + head) * self.width + place[:, 1:]  # [n, HV]
            self._indices[key] = (row[None] * 2 + torch.arange(2)[:, None, None]).reshape(-1)
        return self._indices[key]

    @cached_property
    def inner_index(self) -> Tensor:
        """`inner` as int64 [m]."""
        return torch.tensor(self.inner, dtype=torch.int64)

    @cached_property
    def inner_slice(self) -> slice | None:
        """`inner` as a slice of the level's cells where it is one."""
        return _as_slice(self.inner)

    @cached_property
    def parent_of_inner_index(self) -> Tensor:
        """`parent_of_inner` as int64 [m]."""
        return torch.tensor(self.parent_of_inner, dtype=torch.int64)

    @cached_property
    def same_parents(self) -> bool:
        """Whether the inner cells' parents are simply the P states in their order."""
        return self.parent_of_inner == tuple(range(self.parents))


@dataclass(frozen=True, eq=False)
class PaddedTrees:
    """Sessions of one batch padded to N rows each; padding rows are nobody's ancestors and have none.

    Attributes:
        width: N, the rows of the largest session.
        rows: int64 [B * N], the batch's row of each place, padding repeating the session's root; None without padding.
        places: int64 [R], the place of each row; None without padding.
        path: float32 [B, 1, N, N], 1 where the column's row is the row itself or above it.
        below: float32 [B, 1, N, N + 1], 1 where the row is strictly below the column; column 0 stands before the root.
        off_path: float32 [B, 1, N, N + 1], -inf where the column is neither the row itself nor above it, else 0.
    """

    width: int
    rows: Tensor | None
    places: Tensor | None
    path: Tensor
    below: Tensor
    off_path: Tensor


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The rows of B sessions, R in all.

    Attributes:
        topologies: the sessions' topologies.
        offsets: [B + 1], session b's rows are offsets[b] to offsets[b + 1].
        parents: [R], each row's parent in the batch's numbering, -1 for roots.
        depths: [R].
    """

    topologies: tuple[Topology, ...]
    offsets: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def sessions(self) -> int:
        """B, the number of sessions."""
        return len(self.topologies)

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return self.offsets[-1]

    @property
    def roots_only(self) -> bool:
        """Whether no session has candidates."""
        return self.rows == self.sessions

    @cached_property
    def row_session(self) -> Tensor:
        """int64 [R], the session of each row."""
        counts = torch.tensor([len(t) for t in self.topologies])
        return torch.repeat_interleave(torch.arange(self.sessions), counts)

    @cached_property
    def parent_row(self) -> Tensor:
        """int64 [R], `parents` as a tensor."""
        return torch.tensor(self.parents, dtype=torch.int64)

    @cached_property
    def depth(self) -> Tensor:
        """int64 [R], `depths` as a tensor: add a session's position to get its rows' positions."""
        return torch.tensor(self.depths, dtype=torch.int64)

    def path(self, session: int, row: int) -> list[int]:
        """The batch's rows from the session's root to its row `row` (in the topology's own numbering)."""
        offset = self.offsets[session]
        return [offset + r for r in self.topologies[session].path(row)]

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """[R], the row of each cell: by depth, then by parent, then by row."""
        cells: list[int] = []
        level = [o for o in self.offsets[:-1]]
        children: list[list[int]] = [[] for _ in range(self.rows)]
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(row)
        while level:
            cells += level
            level = [child for row in level for child in children[row]]
        return tuple(cells)

    @cached_property
    def cell_rows(self) -> Tensor | None:
        """int64 [R], `cells` as a tensor; None where cells and rows are the same."""
        return None if _is_identity(self.cells) else torch.tensor(self.cells)

    @cached_property
    def row_cells(self) -> Tensor | None:
        """int64 [R], the cell of each row; None where cells and rows are the same."""
        return None if self.cell_rows is None else torch.argsort(self.cell_rows)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The cells by depth."""
        cell_of = {row: cell for cell, row in enumerate(self.cells)}
        parent_cells = [cell_of[self.parents[row]] if self.parents[row] >= 0 else -1 for row in self.cells]
        has_children = set(parent_cells)
        levels = []
        start = 0
        states: list[int] = []  # cells whose states the level reads
        while start < self.rows:
            depth = self.depths[self.cells[start]]
            stop = start
            while stop < self.rows and self.depths[self.cells[stop]] == depth:
                stop += 1
            level = range(start, stop)
            group_of = {cell: i for i, cell in enumerate(states)}
            slots = [group_of[parent_cells[cell]] if depth else cell for cell in level]
            groups: list[list[int]] = [[] for _ in range(len(states) or self.sessions)]
            for cell, slot in zip(level, slots, strict=True):
                groups[slot].append(cell)
            inner = [cell for cell in level if cell in has_children]
            levels.append(
                Level(
                    start=start,
                    stop=stop,
                    parents=len(groups),
                    width=max(map(len, groups)),
                    groups=tuple(map(tuple, groups)),
                    inner=tuple(cell - start for cell in inner),
                    parent_of_inner=tuple(slots[cell - start] for cell in inner),
                )
            )
            states, start = inner, stop
        return tuple(levels)

    @cached_property
    def padded(self) -> PaddedTrees:
        """The same trees as rectangles, for the factorised form."""
        return _padded(self)

    @cached_property
    def _taps(self) -> dict[int, tuple[Tensor, tuple[Tensor, ...]]]:
        return {}

    def taps(self, width: int) -> Tensor:
        """int64 [width * R]: where the rows' convolution inputs lie, all rows' oldest first, the rows themselves last.

        Indices are into the B windows of width - 1 inputs, session after session, followed by the R rows.
        """
        return self._width(width)[0]

    def window_after(self, width: int, row: int) -> Tensor:
        """int64 [width - 1]: where the window after the batch's row `row` lies, indexed as in `taps`."""
        return self._width(width)[1][row]

    def _width(self, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        if width not in self._taps:
            before = width - 1
            inputs: list[list[int]] = []
            base = self.sessions * before
            for session, topology in enumerate(self.topologies):
                window = list(range(session * before, (session + 1) * before))
                first = len(inputs)
                for row, parent in enumerate(topology.parent_rows):
                    above = window if parent < 0 else inputs[first + parent][1:]
                    inputs.append([*above, base + first + row])
            table = torch.tensor(inputs)  # [R, width]
            self._taps[width] = table.T.reshape(-1), tuple(table[:, 1:].contiguous().unbind(0))
        return self._taps[width]


def pack(topologies: Sequence[Topology]) -> TreeBatch:
    """The batch of these sessions' rows, in their order; the same object for the same topologies.

    Raises:
        ValueError: no topology is given.
    """
    return _pack(tuple(topologies))


@lru_cache(maxsize=_CACHED_BATCHES)
def _pack(topologies: tuple[Topology, ...]) -> TreeBatch:
    if not topologies:
        raise ValueError("a batch of no sessions has no rows: run a pass only when a session is due")
    offsets, parents, depths = [0], [], []
    for topology in topologies:
        offset = offsets[-1]
        parents += [offset + p if p >= 0 else -1 for p in topology.parent_rows]
        depths += topology.depth.tolist()
        offsets.append(offset + len(topology))
    return TreeBatch(topologies, tuple(offsets), tuple(parents), tuple(depths))


def _padded(batch: TreeBatch) -> PaddedTrees:
    sizes = [len(t) for t in batch.topologies]
    width = max(sizes)
    path = torch.zeros(batch.sessions, width, width)
    for session, topology in enumerate(batch.topologies):
        bits = np.unpackbits(topology.ancestors.view(np.uint8), axis=1, bitorder="little")
        path[session, : sizes[session], : sizes[session]] = torch.from_numpy(
            bits[:, : sizes[session]].astype(np.float32)
        )
    before_root = torch.ones(batch.sessions, width, 1)
    strict = path - torch.eye(width) * path
    off_path = torch.log(torch.cat((before_root, path), 2))
    rows = places = None
    if min(sizes) < width:
        starts = batch.offsets[:-1]
        rows = torch.tensor([o + (i if i < n else 0) for o, n in zip(starts, sizes, strict=True) for i in range(width)])
        places = torch.tensor([b * width + i for b, n in enumerate(sizes) for i in range(n)])
    below = torch.cat((before_root, strict), 2)
    return PaddedTrees(width, rows, places, *(x.unsqueeze(1) for x in (path, below, off_path)))


def _is_identity(order: Sequence[int]) -> bool:
    return all(i == x for i, x in enumerate(order))


def _as_slice(indices: Sequence[int]) -> slice | None:
    """The indices as a slice, if they are consecutive."""
    if not indices or indices[-1] - indices[0] + 1 != len(indices):
        return None
    return slice(indices[0], indices[-1] + 1)
