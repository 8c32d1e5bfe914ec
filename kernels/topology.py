"""The shape of one session's candidates: who follows whom, and the orders in which kernels may walk it.

A `Topology` is made once, when a draft arrives, and is the only description of a tree that later stages read. It needs
numpy alone, so that drafters and the coordinator can use it without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

MAX_ROWS = 129
"""Rows of one session in one pass: the root and at most 128 candidates."""

_CACHED_SHAPES = 1024
_Scalar = TypeVar("_Scalar", bound=np.generic)


class TopologyError(ValueError):
    """A draft that is no tree. `index` is the faulty candidate, or None where the lists as a whole are at fault."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True, eq=False)
class Topology:
    """A validated tree of N rows. Row 0 is the root, row r > 0 is candidate r - 1; a parent precedes its children.

    Two topologies are equal only if they are the same object; equal shapes usually are (`from_wire` caches), which
    lets everything derived from a shape be cached by identity.

    Attributes:
        parents: int32 [N], the parent's row; -1 for row 0.
        depth: int32 [N], steps from the root; 0 for row 0.
        ancestors: uint64 [N, ceil(N / 64)], bit a of row r (word a // 64, bit a % 64) is set where a is r or above it.
    """

    parents: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    ancestors: npt.NDArray[np.uint64]
    parent_rows: tuple[int, ...]
    """`parents` as Python integers, for loops on the host."""

    @classmethod
    def from_wire(
        cls, parents: Sequence[int], tokens: Sequence[int] | None = None, *, max_rows: int = MAX_ROWS
    ) -> Topology:
        """Checks a draft's parent pointers and returns its topology, shared by all drafts of that shape.

        Args:
            parents: one entry a candidate: the index of its parent among the candidates, -1 for the root.
            tokens: the candidates' token ids, to check their number and that siblings differ.
            max_rows: the most rows allowed, root included.

        Raises:
            TopologyError: wrong lengths, too many nodes, a parent below -1, itself or after its child, equal siblings.
        """
        shape = tuple(parents)
        if len(shape) >= max_rows:
            raise TopologyError(
                f"{len(shape)} candidates are too many: at most {max_rows - 1} are allowed; prune the draft",
                max_rows - 1,
            )
        if tokens is not None:
            if len(tokens) != len(shape):
                raise TopologyError(
                    f"{len(tokens)} tokens but {len(shape)} parents: send one parent pointer for each token"
                )
            _refuse_equal_siblings(shape, tokens)
        return _build(shape)

    @classmethod
    def root_only(cls) -> Topology:
        """The one-row topology of plain decoding."""
        return _build(())

    def __len__(self) -> int:
        """N, the number of rows, root included."""
        return len(self.parent_rows)

    def path(self, row: int) -> list[int]:
        """The rows from the root down to `row`, both included."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.parent_rows[row]
        return rows[::-1]

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Rows by depth, ascending inside a level."""
        levels: list[list[int]] = [[] for _ in range(int(self.depth.max()) + 1)]
        for row, depth in enumerate(self.depth.tolist()):
            levels[depth].append(row)
        return tuple(tuple(level) for level in levels)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each row's children, ascending."""
        children: list[list[int]] = [[] for _ in self.parent_rows]
        for row, parent in enumerate(self.parent_rows[1:], start=1):
            children[parent].append(row)
        return tuple(tuple(rows) for rows in children)

    @cached_property
    def leaves(self) -> int:
        """How many rows have no children."""
        return len(self) + 1 - len(set(self.parent_rows))  # -1, the root's parent, is in the set

    @cached_property
    def chains(self) -> tuple[npt.NDArray[np.int32], ...]:
        """Heavy-light chains, each a list of rows from its head down, ordered by head: chain 0 starts at the root.

        A chain goes on with the child of the largest subtree, ties to the lowest row; every other child heads a chain.
        """
        size = [1] * len(self)
        for row in range(len(self) - 1, 0, -1):
            size[self.parent_rows[row]] += size[row]
        heavy = [max(rows, key=lambda r: (size[r], -r), default=-1) for rows in self.children]
        chains = []
        for row, parent in enumerate(self.parent_rows):
            if parent >= 0 and heavy[parent] == row:
                continue
            chain = [row]
            while heavy[chain[-1]] >= 0:
                chain.append(heavy[chain[-1]])
            chains.append(_frozen(np.array(chain, dtype=np.int32)))
        return tuple(chains)

    @cached_property
    def chain_of(self) -> npt.NDArray[np.int32]:
        """int32 [N], the chain that holds each row."""
        chain_of = np.empty(len(self), dtype=np.int32)
        for index, chain in enumerate(self.chains):
            chain_of[chain] = index
        return _frozen(chain_of)

    @cached_property
    def waves(self) -> tuple[tuple[int, ...], ...]:
        """Chain indices by dependency wave: a chain can run once the chain that holds its head's parent has run."""
        wave_of: list[int] = []
        waves: list[list[int]] = []
        for index, chain in enumerate(self.chains):
            parent = self.parent_rows[int(chain[0])]
            wave = 0 if parent < 0 else wave_of[int(self.chain_of[parent])] + 1
            wave_of.append(wave)
            if wave == len(waves):
                waves.append([])
            waves[wave].append(index)
        return tuple(tuple(wave) for wave in waves)


def _frozen(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    array.setflags(write=False)
    return array


def _refuse_equal_siblings(parents: tuple[int, ...], tokens: Sequence[int]) -> None:
    seen: dict[tuple[int, int], int] = {}
    for index, key in enumerate(zip(parents, tokens, strict=True)):
        first = seen.setdefault(key, index)
        if first != index:
            raise TopologyError(
                f"candidates {first} and {index} are siblings (parent {key[0]}) with the same token {key[1]}: "
                "merge their subtrees",
                index,
            )


def _refuse_bad_parent(index: int, parent: object) -> None:
    """Says what is wrong with one parent pointer that is not an integer in [-1, index)."""
    where = f"parents[{index}] = {parent!r}"
    mend = "order the candidates so that every parent precedes its children"
    if not isinstance(parent, (int, np.integer)):
        raise TopologyError(f"{where} is not an integer: send a candidate's index, or -1 for the root", index)
    if parent < -1:
        raise TopologyError(f"{where} is below -1: send a candidate's index, or -1 for the root", index)
    if parent == index:
        raise TopologyError(f"{where} is the candidate itself, a cycle: {mend}", index)
    raise TopologyError(f"{where} points forward, to a later candidate or out of the list: {mend}", index)


@lru_cache(maxsize=_CACHED_SHAPES)
def _build(wire_parents: tuple[int, ...]) -> Topology:
    rows = len(wire_parents) + 1
    parents, depth, bits = [-1], [0], [1]
    for index, wire_parent in enumerate(wire_parents):
        if not isinstance(wire_parent, (int, np.integer)) or not -1 <= wire_parent < index:
            _refuse_bad_parent(index, wire_parent)
        parent = int(wire_parent) + 1
        parents.append(parent)
        depth.append(depth[parent] + 1)
        bits.append(bits[parent] | 1 << (index + 1))
    words = (rows + 63) // 64
    packed = b"".join([row.to_bytes(8 * words, "little") for row in bits])
    return Topology(
        parents=_frozen(np.array(parents, dtype=np.int32)),
        depth=_frozen(np.array(depth, dtype=np.int32)),
        ancestors=np.frombuffer(packed, dtype="<u8").astype(np.uint64, copy=False).reshape(rows, words),
        parent_rows=tuple(parents),
    )
