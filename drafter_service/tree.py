"""The tree a drafter proposes: candidates behind the root, a parent before its child, siblings distinct."""

from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """N candidates in an order where a parent precedes its child; all three lists have length N.

    Attributes:
        tokens: ids; those of siblings differ.
        parents: index of an earlier candidate, or ROOT.
        log_probs: natural logarithm of the chance that the target emits the token given its parent; finite, <= 0.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    log_probs: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def path_log_probs(self) -> list[float]:
        """Per candidate the sum of log_probs from the root down to it, itself included."""
        sums: list[float] = []
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            sums.append(log_prob + (sums[parent] if parent != ROOT else 0.0))
        return sums


EMPTY = DraftTree()


@dataclass
class TreeBuilder:
    """Grows a DraftTree; a token added twice behind the same parent is one candidate."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    _child: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, log_prob: float) -> int:
        """Put `token` behind `parent`; returns its index. Of two log-probabilities for it the higher one stays.

        Args:
            parent: ROOT, or an index that `add` returned.
            token: an id of the target's vocabulary.
            log_prob: of the token given its parent; finite, <= 0.
        """
        assert ROOT <= parent < len(self.tokens)
        assert log_prob <= 0.0
        index = self._child.get((parent, token))
        if index is not None:
            self.log_probs[index] = max(self.log_probs[index], log_prob)
            return index
        index = self._child[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        return index

    def add_path(self, tokens: Sequence[int], log_probs: Sequence[float], parent: int = ROOT) -> int:
        """Put a chain behind `parent`, sharing what is there already; returns the index of its last token."""
        for token, log_prob in zip(tokens, log_probs, strict=True):
            parent = self.add(parent, token, log_prob)
        return parent

    def build(self) -> DraftTree:
        """The tree as it stands."""
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.log_probs))
