"""The drafts of one session that wait for a pass: one for its present length, a few for lengths it may reach."""

from collections.abc import Sequence
from typing import NamedTuple

from specla.rpc.errors import InvalidRequestError
from specla.v1 import verifier_pb2
from specla.verifier_service.intake import Draft

MAX_AHEAD = 4  # drafts on assumptions that have yet to come true


class Answer(NamedTuple):
    """What became of a draft that got no pass."""

    seq: int
    outcome: verifier_pb2.Outcome


class DraftBox:
    """Holds the latest draft for each length; changed by the scheduler's thread alone.

    Attributes:
        current: the draft that the next pass may verify, or None.
    """

    def __init__(self) -> None:
        self.current: Draft | None = None
        self._ahead: list[Draft] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self.current is None and not self._ahead

    def put(self, draft: Draft, tokens: Sequence[int]) -> list[Answer]:
        """Take a draft in; `tokens` is prompt and output.

        Returns:
            Answers due now: for the draft itself if it is stale, or for one it takes the place of.

        Raises:
            InvalidRequestError: a root that is not the session's, or assumed tokens that leave a gap.
        """
        first = draft.base_len - len(draft.assumed)
        if draft.base_len > len(tokens) and first > len(tokens):
            raise InvalidRequestError(
                "topology.assumed",
                f"base_len {draft.base_len} with {len(draft.assumed)} assumed tokens, but {len(tokens)} are committed",
                hint="Assume every token from the committed length to base_len",
            )
        if draft.base_len < len(tokens) or not _comes_true(draft, tokens):
            return [Answer(draft.seq, verifier_pb2.OUTCOME_STALE)]
        if draft.base_len == len(tokens):
            if draft.root_token != tokens[-1]:
                raise InvalidRequestError(
                    "topology.root_token",
                    f"the root is not the token at position {draft.base_len - 1}",
                    hint="Take it from the last verdict",
                )
            answers = self._supersede(self.current)
            self.current = draft
            return answers
        return self._put_ahead(draft)

    def advance(self, tokens: Sequence[int]) -> list[Answer]:
        """Sort the drafts anew after the session grew; returns answers for those that missed.

        The current draft has had its pass by now, or missed it.
        """
        answers = []
        if self.current is not None and self.current.base_len < len(tokens):
            answers.append(Answer(self.current.seq, verifier_pb2.OUTCOME_STALE))
            self.current = None
        waiting, self._ahead = self._ahead, []
        for draft in waiting:
            if draft.base_len < len(tokens) or not _comes_true(draft, tokens):
                answers.append(Answer(draft.seq, verifier_pb2.OUTCOME_STALE))
            elif draft.base_len == len(tokens):
                answers += self._supersede(self.current)
                self.current = draft
            else:
                self._ahead.append(draft)
        return answers

    def take(self) -> Draft | None:
        """The draft for the pass that is about to run; it leaves the box."""
        draft, self.current = self.current, None
        return draft

    def _put_ahead(self, draft: Draft) -> list[Answer]:
        rivals = [other for other in self._ahead if other.base_len == draft.base_len]
        self._ahead = [other for other in self._ahead if other.base_len != draft.base_len]
        if len(self._ahead) == MAX_AHEAD:
            rivals.append(self._ahead.pop(0))
        self._ahead.append(draft)
        return [Answer(other.seq, verifier_pb2.OUTCOME_SUPERSEDED) for other in rivals]

    @staticmethod
    def _supersede(draft: Draft | None) -> list[Answer]:
        return [] if draft is None else [Answer(draft.seq, verifier_pb2.OUTCOME_SUPERSEDED)]


def _comes_true(draft: Draft, tokens: Sequence[int]) -> bool:
    """Whether the assumed tokens agree with the committed ones as far as these reach."""
    first = draft.base_len - len(draft.assumed)
    return all(token == draft.assumed[i] for i, token in enumerate(tokens[first : draft.base_len]))
