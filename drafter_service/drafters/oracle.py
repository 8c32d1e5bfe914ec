"""`oracle`: knows the text from a recording and is right at a set rate. For tests and benchmarks only."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from specla.drafter_service.tree import EMPTY, ROOT, DraftTree, TreeBuilder
from specla.rpc.errors import InvalidRequestError
from specla.v1 import common_pb2

LEAST = 1e-6  # log_probs stay finite at a rate of 0


class OracleState:
    """Follows one recorded text for as long as the session does."""

    def __init__(self, oracle: "OracleDrafter", tokens: Sequence[int]) -> None:
        self._oracle = oracle
        self._tokens = list(tokens)
        self._text = oracle.text_beginning_with(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Check the tokens against the recording; where they leave it, look for another one."""
        begin = len(self._tokens)
        self._tokens += tokens
        if self._text is not None and list(self._text[begin : len(self._tokens)]) != list(tokens):
            self._text = self._oracle.text_beginning_with(self._tokens)

    def draft(self, budget: int) -> DraftTree:
        """A chain of the tokens to come, each right at the set rate; with siblings where branching asks for them.

        Whether a position is drafted rightly depends on seed and position only, not on where the draft begins.
        Behind a wrong token the chain goes on as if it had been right: worthless, as a real drafter's would be.
        """
        if self._text is None:
            return EMPTY
        oracle, tree, parent = self._oracle, TreeBuilder(), ROOT
        for position in range(len(self._tokens), len(self._text)):
            if len(tree) + oracle.branching > budget:
                break
            draw = random.Random((oracle.seed << 32) + position)
            right = self._text[position]
            wrong = [token for token in draw.sample(range(oracle.ids), oracle.branching + 1) if token != right]
            siblings = wrong[: oracle.branching]
            spine = draw.randrange(oracle.branching)
            if draw.random() < oracle.rate:
                siblings[spine] = right
            nodes = [tree.add(parent, token, oracle.log_prob) for token in siblings]
            parent = nodes[spine]
        return tree.build()

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """Does nothing."""


class OracleDrafter:
    """Drafts from recorded texts.

    Args:
        texts: ids of prompt and output, one list a text.
        rate: chance in [0, 1] that the right token is among the candidates of its position.
        branching: candidates a position; the right one stands at a drawn place among them.
        seed: equal seeds err at the same positions.

    Raises:
        InvalidRequestError: no text, or an empty one.
    """

    name = "oracle"

    def __init__(self, texts: Iterable[Sequence[int]], *, rate: float = 1.0, branching: int = 1, seed: int = 0) -> None:
        self._texts = [tuple(text) for text in texts]
        if not self._texts or not all(self._texts):
            raise InvalidRequestError("oracle_file", "the recording holds no text, or an empty one")
        self.rate, self.branching, self.seed = rate, branching, seed
        self.ids = max(max(max(text) for text in self._texts) + 1, branching + 1)
        self.log_prob = min(math.log(max(rate / branching, LEAST)), 0.0)

    @classmethod
    def from_file(cls, path: str | Path, *, rate: float, branching: int, seed: int) -> "OracleDrafter":
        """Read JSON lines, each {"token_ids": [prompt and output]}.

        Raises:
            InvalidRequestError: the file cannot be read, or a line is not of that form; the error says which.
        """
        texts = []
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise InvalidRequestError("oracle_file", f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                texts.append([int(token) for token in json.loads(line)["token_ids"]])
            except (ValueError, TypeError, KeyError) as error:
                hint = 'each line is {"token_ids": [prompt and output ids]}'
                raise InvalidRequestError("oracle_file", f"{path}: line {number} holds no text", hint=hint) from error
        return cls(texts, rate=rate, branching=branching, seed=seed)

    def text_beginning_with(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The recorded text that goes on behind `tokens`, or None."""
        begin = tuple(tokens)
        return next((text for text in self._texts if len(text) > len(begin) and text[: len(begin)] == begin), None)

    def start(self, tokens: Sequence[int], sampling: common_pb2.Sampling) -> OracleState:
        """Begin a session."""
        return OracleState(self, tokens)
