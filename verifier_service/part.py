"""One session's part of a pass: its draft, and what of it is verified."""

from collections.abc import Sequence
from typing import NamedTuple

from specla.kernels.topology import Topology
from specla.verifier_service.intake import Draft
from specla.verifier_service.passes import PassItem
from specla.verifier_service.roster import LiveSession

_ROOT = Topology.root_only()


class Part(NamedTuple):
    """One session's part of the pass that is about to run.

    Attributes:
        live: the session.
        draft: what its drafter sent for this length, None if nothing.
        kept: which of its candidates are verified, ascending.
    """

    live: LiveSession
    draft: Draft | None
    kept: Sequence[int]

    def item(self) -> PassItem:
        """What the engine is given."""
        attachment = self.live.attachment
        top_k = attachment.top_k if attachment is not None else 0
        draft = self.draft
        if draft is None or not self.kept:
            return PassItem(self.live.session, _ROOT, (), top_k)
        if len(self.kept) == len(draft.tokens):
            return PassItem(self.live.session, draft.topology, draft.tokens, top_k)
        place = {node: i for i, node in enumerate(self.kept)}
        parents = [place[draft.parents[node]] if draft.parents[node] >= 0 else -1 for node in self.kept]
        tokens = [draft.tokens[node] for node in self.kept]
        return PassItem(self.live.session, Topology.from_wire(parents), tokens, top_k)
