"""Who runs together in a pass, on which trees: what a backend is given besides tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from specla.kernels.sampling import RowSampling, SessionSampling
from specla.kernels.tree import TreeBatch


@dataclass(frozen=True, eq=False)
class Lineup:
    """The sessions of a pass, B of them with R rows in all.

    Passes of the same sessions with the same trees share one object, so that what follows from it alone is done once.

    Attributes:
        slots: [B], all different.
        batch: which row follows which.
        states: [B], how the sessions sample; None if nobody wants the rows' tokens or logits.
        layers: whose streams will be asked for.
    """

    slots: Sequence[int]
    batch: TreeBatch
    states: Sequence[SessionSampling] | None = None
    layers: Sequence[int] = ()

    def sampling(self, row_tokens: Sequence[int], lengths: Sequence[int]) -> RowSampling | None:
        """How the rows sample, if they do.

        Args:
            row_tokens: [R], the rows' own tokens.
            lengths: [B], of the sessions' texts, their roots included.
        """
        if self.states is None:
            return None
        batch = self.batch
        parents = () if batch.roots_only else batch.parents
        return RowSampling(self.states, batch.row_sessions, batch.positions(lengths), parents, row_tokens)
