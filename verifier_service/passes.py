"""What a session brings to a pass and what it takes away: pure functions around the forward pass."""

from collections.abc import Sequence
from typing import NamedTuple

from specla.kernels.sampling import FAILED_TOKEN, RowLogprobs, RowSampling, Sampled, row_logprobs
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch
from specla.rpc.errors import InternalError, SpeclaError
from specla.verifier_service.acceptance import Acceptance, Finish, accept
from specla.verifier_service.backend import PassRows
from specla.verifier_service.session import Session


class PassItem(NamedTuple):
    """One session's part of a pass.

    Attributes:
        session: a session that is ready.
        topology: its rows, row 0 the root.
        tokens: the candidates, rows 1 and up; empty for plain decoding.
        top_k: how many of the target's best tokens to report at each new position, 0 for none.
    """

    session: Session
    topology: Topology
    tokens: Sequence[int] = ()
    top_k: int = 0


class RunningPass(NamedTuple):
    """A pass that has begun."""

    items: Sequence[PassItem]
    batch: TreeBatch
    out: PassRows
    started: float


class PassResult(NamedTuple):
    """What one session got out of a pass.

    Attributes:
        session: whose it is.
        base_len: committed length before the pass; the first of `tokens` has this position.
        accepted_nodes: indices of the accepted candidates, root to leaf, no further than the end of the text.
        tokens: new tokens: accepted candidates, then the bonus token; cut at the end of the text.
        drafted: for each of `tokens` whether it was a candidate.
        finish: the end of the text, if it was reached.
        logprobs: for each of `tokens`, if the session's sampling asks for them.
        top: for each of `tokens`, if the item asked for them.
        error: why the session failed; then nothing was committed.
        seconds: duration of the whole pass, sampling included.
    """

    session: Session
    base_len: int
    accepted_nodes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[RowLogprobs, ...] | None = None
    top: tuple[RowLogprobs, ...] | None = None
    error: SpeclaError | None = None
    seconds: float = 0.0


def row_sampling(items: Sequence[PassItem], batch: TreeBatch, row_tokens: Sequence[int]) -> RowSampling:
    """Which token each row of the batch samples; `row_tokens` are the rows' own tokens, [R]."""
    return RowSampling(
        sessions=[item.session.sampling_state for item in items],
        row_session=batch.row_sessions,
        positions=batch.positions([item.session.committed_len for item in items]),
        parent_row=() if batch.roots_only else batch.parents,
        row_tokens=row_tokens,
    )


def accept_item(item: PassItem, offset: int, sampled: Sampled) -> Acceptance | InternalError:
    """Walk one item's tree, whose rows begin at `offset` of the batch; an error if the way meets unusable logits."""
    session = item.session
    tokens = sampled.tokens[offset : offset + len(item.topology)].tolist()
    acceptance = accept(item.topology, item.tokens, tokens, session.stopping, session.completion_len)
    if acceptance.tokens[-1] != FAILED_TOKEN:
        return acceptance
    reason = sampled.errors[offset + acceptance.rows[-1]]
    return InternalError(f"the target gave no usable logits: {reason}", hint="Other sessions are not affected")


def result_of(item: PassItem, offset: int, acceptance: Acceptance, out: PassRows, seconds: float) -> PassResult:
    """What to report of an accepted walk, before the session moves on."""
    session, (accepted, tokens, finish) = item.session, acceptance
    wants_logprobs = session.sampling_state.params.top_logprobs is not None
    logprobs = top = None
    if wants_logprobs or item.top_k:
        rows = [offset + row for row in accepted[: len(tokens)]]  # token i was sampled after row i of the walk
        if wants_logprobs:
            logprobs = tuple(out.sampled.logprobs[row] for row in rows)
        if item.top_k:
            top = tuple(
                row_logprobs(out.logits(row), token, item.top_k) for row, token in zip(rows, tokens, strict=True)
            )
    return PassResult(
        session,
        session.committed_len,
        acceptance.accepted_nodes,
        tokens,
        acceptance.drafted,
        finish,
        logprobs,
        top,
        None,
        seconds,
    )
