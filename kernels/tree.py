"""The rows of one pass: several sessions' topologies side by side, with the indices that the PyTorch forms need.

Rows are numbered session by session, root first, as the sessions' topologies number them. The serial
recurrence wants siblings side by side, so a second order, *cells*, takes each session's rows breadth first; where all
candidates come in that order already, both are the same and nothing is moved.

A batch depends on shapes alone and is cached: everything here is computed once a shape, not once a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.topology import Topology

_CACHED_BATCHES = 256


class Step(NamedTuple):
    """Cells that read one state: a session's root, or all children of one cell."""

    session: int
    """Whose stored state is read; -1 where a step forms its own."""
    parent: int
    """The cell whose state is formed and read; -1 for a root."""
    source: int
    """The step that `parent` itself belongs to, whose state its own is formed from; -1 for a root."""
    size: int
    """How many cells: steps cover the cells in their order."""
    last_use: bool
    """Whether no later step forms a state from `source`'s."""


class Walk(NamedTuple):
    """The rows as the compiled form walks them: int64 NumPy arrays."""

    offsets: NDArray[np.int64]
    """[B + 1], `TreeBatch.offsets`."""
    parents: NDArray[np.int64]
    """[R], `TreeBatch.parents`."""
    kept: NDArray[np.int64]
    """[R], the place among its session's kept states of the state of each row that others continue, else -1."""
    places: int
    """The most states that one session keeps."""


@dataclass(frozen=True, eq=False)
class PaddedTrees:
    """Sessions of one batch padded to N rows each; padding rows are nobody's ancestors and have none.

    Attributes:
        width: N, the rows of the largest session.
        rows: int64 [B * N], the batch's row of each place, padding repeating the session's root; None without padding.
        places: int64 [R], the place of each row; None without padding.
        path: float32 [B, 1, N, N], 1 where the column's row is the row itself or above it.
        below: float32 [B, N, N + 1], 1 where the row is strictly below the column; column 0 stands before the root.
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
    def row_sessions(self) -> tuple[int, ...]:
        """[R], the session of each row."""
        return tuple(np.repeat(np.arange(self.sessions), np.diff(self.offsets)).tolist())

    @cached_property
    def _depth_array(self) -> NDArray[np.int64]:
        return np.array(self.depths)

    @cached_property
    def _session_array(self) -> NDArray[np.int64]:
        return np.array(self.row_sessions)

    def positions(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        """int64 [R], where the token after each row stands; `lengths` is of each session's text, its root included."""
        before = np.array(lengths)[self._session_array] if len(lengths) > 1 else lengths[0]
        positions: NDArray[np.int64] = self._depth_array + before
        return positions

    @cached_property
    def parent_array(self) -> NDArray[np.int32]:
        """int32 [R], `parents` as an array."""
        return np.array(self.parents, np.int32)

    @cached_property
    def offset_array(self) -> NDArray[np.int32]:
        """int32 [B + 1], `offsets` as an array."""
        return np.array(self.offsets, np.int32)

    @cached_property
    def row_session(self) -> Tensor:
        """int64 [R], `row_sessions` as a tensor."""
        return torch.tensor(self.row_sessions, dtype=torch.int64)

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
    def levels(self) -> tuple[Tensor, ...]:
        """The rows of each depth, ascending: int64."""
        deepest = max(self.depths)
        return tuple(torch.nonzero(self.depth == depth).flatten() for depth in range(deepest + 1))

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """[R], the row of each cell: session by session, breadth first, siblings together."""
        cells: list[int] = []
        for offset, topology in zip(self.offsets, self.topologies, strict=False):
            first = len(cells)
            cells.append(offset)
            for place in range(len(topology)):
                cells += [offset + child for child in topology.children[cells[first + place] - offset]]
        return tuple(cells)

    @cached_property
    def cell_rows(self) -> Tensor | None:
        """int64 [R], `cells` as a tensor; None where cells and rows are the same."""
        return None if self.cells == tuple(range(self.rows)) else torch.tensor(self.cells)

    @cached_property
    def row_cells(self) -> Tensor | None:
        """int64 [R], the cell of each row; None where cells and rows are the same."""
        return None if self.cell_rows is None else torch.argsort(self.cell_rows)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The order in which states are read."""
        reads: list[tuple[int, int, int, int]] = []  # session, parent, source and size of each step
        step_of: list[int] = []  # for each cell so far
        for session, (offset, topology) in enumerate(zip(self.offsets, self.topologies, strict=False)):
            first = len(step_of)
            step_of.append(len(reads))
            reads.append((session, -1, -1, 1))
            for cell in range(first, first + len(topology)):
                children = len(topology.children[self.cells[cell] - offset])
                if children:
                    step_of += [len(reads)] * children
                    reads.append((-1, cell, step_of[cell], children))
        last_use = {source: index for index, (_, _, source, _) in enumerate(reads)}
        return tuple(Step(*read, last_use[read[2]] == index) for index, read in enumerate(reads))

    @cached_property
    def padded(self) -> PaddedTrees:
        """The same trees as rectangles, for the factorised form."""
        return _padded(self)

    @cached_property
    def walk(self) -> Walk:
        """The same trees for the compiled form."""
        kept = np.full(self.rows, -1)
        places = 0
        for offset, topology in zip(self.offsets, self.topologies, strict=False):
            continued = [row for row, children in enumerate(topology.children) if children]
            kept[[offset + row for row in continued]] = range(len(continued))
            places = max(places, len(continued))
        return Walk(np.array(self.offsets), np.array(self.parents), kept, places)

    @cached_property
    def _taps(self) -> dict[int, Tensor]:
        return {}

    def taps(self, width: int) -> Tensor:
        """int64 [width * R]: where the rows' convolution inputs lie, all rows' oldest first, the rows themselves last.

        Indices are into the B windows of width - 1 inputs, session after session, followed by the R rows.
        """
        if width not in self._taps:
            before = width - 1
            base = self.sessions * before
            inputs: list[list[int]] = []
            for session, topology in enumerate(self.topologies):
                window = list(range(session * before, (session + 1) * before))
                first = len(inputs)
                for row, parent in enumerate(topology.parent_rows):
                    above = window if parent < 0 else inputs[first + parent][1:]
                    inputs.append([*above, base + first + row])
            self._taps[width] = torch.tensor([index for tap in zip(*inputs, strict=True) for index in tap])
        return self._taps[width]

    def window_after(self, width: int, row: int) -> Tensor:
        """int64 [width - 1]: where the window after the batch's row `row` lies, indexed as in `taps`."""
        return self.taps(width)[row + self.rows :: self.rows]


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
    return PaddedTrees(width, rows, places, path.unsqueeze(1), below, off_path.unsqueeze(1))
