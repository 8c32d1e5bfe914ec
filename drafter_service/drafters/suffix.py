"""`suffix`: what has followed contexts of every length, in this text and, if allowed, in earlier outputs.

A suffix trie over the texts, of which only the paths a draft needs are ever drawn up: the places where the end
of the text has stood before are the trie's node, grouping them by their next token gives its children.
"""

from collections.abc import Callable, Sequence

from specla.drafter_service.calibration import Calibration
from specla.drafter_service.continuations import Continuations
from specla.drafter_service.matching import MatchState
from specla.drafter_service.occurrences import MAX_MATCH, Occurrence, OccurrenceIndex
from specla.v1 import common_pb2

ORDERS = (1, 2, 4, 8)  # where one of the longest occurs, shorter contexts say nothing that counts beside it
PLACES = 8  # looked at for one draft, in each text


class History:
    """Earlier outputs, the oldest half forgotten whenever they exceed their bound.

    Args:
        tokens: how many are kept at most.
    """

    def __init__(self, tokens: int) -> None:
        self._half = max(tokens // 2, 1)
        self._recent = OccurrenceIndex(ORDERS)
        self._older = OccurrenceIndex(ORDERS)

    def add(self, output: Sequence[int]) -> None:
        """Keep an output; of one longer than half the bound, its end."""
        output = output[-self._half :]
        if len(self._recent) + len(output) > self._half:
            self._older, self._recent = self._recent, OccurrenceIndex(ORDERS)
        self._recent.begin_document()
        self._recent.extend(output)

    def find(self, context: Sequence[int]) -> list[Occurrence]:
        """Places in the outputs kept, the recent ones first."""
        return [
            place
            for index in (self._recent, self._older)
            for place in index.find(context, limit=PLACES, enough=ORDERS[-1])
        ]


class SuffixState(MatchState):
    """A session whose output may go to the history at its end."""

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        index: OccurrenceIndex,
        find: Callable[[int], list[Occurrence]],
        continuations: Continuations,
        history: History | None,
    ) -> None:
        super().__init__(tokens, index=index, find=find, continuations=continuations)
        self._history = history
        self._output_begin = len(tokens)

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """Leave what was put out since the session was attached to the history, if there is one."""
        if self._history is not None:
            self._history.add([*self.text[self._output_begin :], *tokens])


class SuffixDrafter:
    """Drafts from all contexts of the text and of earlier outputs.

    Args:
        branching: continuations considered behind one node, >= 1.
        tau: nats a path may be less likely than the best one's.
        history_tokens: how many tokens of earlier outputs to learn from, whoever asked for them; 0: none.
            Outputs never reach another session's text, but the speed of a text can tell whether another
            session has produced the like: leave it 0 where sessions must not learn of each other.
    """

    name = "suffix"

    def __init__(self, *, branching: int = 3, tau: float = 4.0, history_tokens: int = 0) -> None:
        self._branching = branching
        self._tau = tau
        self._history = History(history_tokens) if history_tokens else None
        self._calibration = Calibration(trust=4.0, memory=1024.0)

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> SuffixState:
        """Begin a session."""
        index, history = OccurrenceIndex(ORDERS), self._history

        def find(end: int) -> list[Occurrence]:
            places = index.find_own(end, limit=PLACES, enough=ORDERS[-1])
            return places if history is None else places + history.find(index.text[max(end - MAX_MATCH, 0) : end])

        continuations = Continuations(Calibration(self._calibration), branching=self._branching, tau=self._tau)
        return SuffixState(tokens, index=index, find=find, continuations=continuations, history=history)
