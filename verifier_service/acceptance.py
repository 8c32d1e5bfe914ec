"""From the tokens that a pass sampled to the text it commits: the walk down the tree, and where the text ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specla.kernels.jit import compiled_where_numba_is
from specla.kernels.tree import TreeBatch
from specla.rpc.errors import InvalidRequestError

Ints = NDArray[np.int32]


class FinishReason(Enum):
    """Why a text ended."""

    LENGTH = "length"
    EOS = "eos"
    STOP_ID = "stop_id"


@dataclass(frozen=True)
class Finish:
    """The end of a text; `matched_stop_id` is the stop id that ended it, for STOP_ID."""

    reason: FinishReason
    matched_stop_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """When a text ends.

    Attributes:
        max_tokens: tokens of the completion, resumed ones included.
        stop_ids: the text ends with the first of them.
        ignore_eos: whether the model's end-of-text ids are tokens like others.
        eos_ids: the model's end-of-text ids.
    """

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    eos_ids: frozenset[int] = frozenset()

    def validate(self, vocab_size: int) -> None:
        """Refuse what cannot be meant.

        Raises:
            InvalidRequestError: max_tokens below 1 or a stop id outside the vocabulary.
        """
        if self.max_tokens < 1:
            raise InvalidRequestError(
                "stopping.max_tokens", f"max_tokens is {self.max_tokens}", hint="Give 1 or more, or leave it unset"
            )
        for token in self.stop_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    "stopping.stop_ids", f"stop id {token} is no token", hint=f"Give ids from 0 to {vocab_size - 1}"
                )

    def finish_of(self, token: int, completion_len: int) -> Finish | None:
        """Whether a text ends with this token, the completion_len-th of its completion."""
        if token in self.stop_ids:
            return Finish(FinishReason.STOP_ID, token)
        if token in self.eos_ids and not self.ignore_eos:
            return Finish(FinishReason.EOS)
        if completion_len >= self.max_tokens:
            return Finish(FinishReason.LENGTH)
        return None

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | self.eos_ids

    def cut(self, tokens: Sequence[int], completion_len: int) -> tuple[int, Finish | None]:
        """How many of these tokens stand in a text whose completion has completion_len before them: up to the first
        that ends it, and how it does."""
        for count, token in enumerate(tokens, 1):
            finish = self.finish_of(token, completion_len + count)
            if finish is not None:
                return count, finish
        return len(tokens), None


class Walks(NamedTuple):
    """The ways down the trees of a pass, to be cut where a text ends.

    Sampling is a function of (logits, seed, position), so a candidate is accepted exactly where plain decoding would
    have produced it; its probability under the drafter plays no part.

    Attributes:
        firsts: [B + 1], session b's part of the other lists is firsts[b] to firsts[b + 1].
        rows: of each session the rows that hold the token sampled after the row before, root first.
        tokens: what was sampled after each of them.
    """

    firsts: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...]


def walk_words(rows: int) -> int:
    """int32 words that `walk` writes at most, of so many rows."""
    return 1 + 4 * rows


def walk(batch: TreeBatch, row_tokens: Ints, sampled: Ints, out: Ints) -> Walks:
    """Goes from each root to the child that holds the token sampled there, as long as there is one.

    Args:
        batch: the trees, R rows.
        row_tokens: int32 [R] or more, the rows' own tokens; the roots' are not looked at.
        sampled: int32 [R] or more, the target's choice after each row.
        out: int32 [walk_words(R)] or more, overwritten: `firsts`, the length of each session's walk, `rows`, `tokens`.
    """
    end = _walk(batch.parent_array, batch.offset_array, row_tokens, sampled, out)
    told, first = tuple(out[:end].tolist()), 2 * len(batch.topologies) + 1
    middle = (first + end) // 2
    return Walks(told[: (first + 1) // 2], told[first:middle], told[middle:])


@compiled_where_numba_is
def _walk(parents: Any, offsets: Any, row_tokens: Any, sampled: Any, out: Any) -> int:
    """See `walk`; returns how many words were written. A child's row is behind its parent's."""
    sessions = len(offsets) - 1
    first = 2 * sessions + 1
    count = 0
    for b in range(sessions):
        out[b] = count
        row = offsets[b]
        out[first + count] = 0
        count += 1
        for child in range(offsets[b] + 1, offsets[b + 1]):
            if parents[child] == row and row_tokens[child] == sampled[row]:
                row = child
                out[first + count] = child - offsets[b]
                count += 1
        out[sessions + 1 + b] = count - out[b]
    out[sessions] = count
    for b in range(sessions):
        for i in range(out[b], out[b + 1]):
            out[first + count + i] = sampled[offsets[b] + out[first + i]]
    return first + 2 * count
