"""From the tokens that a pass sampled to the text it commits: the walk down the tree, and where the text ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from specla.kernels.topology import Topology
from specla.rpc.errors import InvalidRequestError

_ROOT = (0,)


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


class Acceptance(NamedTuple):
    """What one session gets out of a pass.

    Attributes:
        rows: rows whose tokens stand in the text now, root first; the next pass applies their factors.
        tokens: new tokens in order: the candidates among `rows`, then, unless the text ended before it, the bonus.
        finish: the end of the text, if the last of `tokens` is that.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: Finish | None

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For each of `tokens` whether it was a candidate."""
        accepted = len(self.rows) - 1
        return (True,) * accepted + (False,) * (len(self.tokens) - accepted)

    @property
    def accepted_nodes(self) -> tuple[int, ...]:
        """Indices of the accepted candidates, root to leaf."""
        return tuple([row - 1 for row in self.rows[1:]]) if len(self.rows) > 1 else ()


def accept(
    topology: Topology,
    candidates: Sequence[int],
    sampled: Sequence[int],
    stopping: Stopping,
    completion_len: int,
) -> Acceptance:
    """Walk from the root to the child that holds the token sampled there, as long as there is one.

    Sampling is a function of (logits, seed, position), so a candidate is accepted exactly where plain decoding would
    have produced it; its probability under the drafter plays no part. Nothing beyond the end of the text is taken.

    Args:
        topology: N rows, row 0 the root.
        candidates: N - 1 tokens.
        sampled: N tokens, the target's choice after each row.
        stopping: when the text ends.
        completion_len: tokens of the completion before this pass.
    """
    if not candidates:
        token = sampled[0]
        return Acceptance(_ROOT, (token,), stopping.finish_of(token, completion_len + 1))
    row, rows, tokens = 0, [0], []
    while True:
        token = int(sampled[row])
        tokens.append(token)
        finish = stopping.finish_of(token, completion_len + len(tokens))
        for child in topology.children[row]:
            if candidates[child - 1] == token:
                rows.append(child)
                break
        else:
            child = 0
        if finish is not None or not child:
            return Acceptance(tuple(rows), tuple(tokens), finish)
        row = child
