"""What a session brings to a pass and what it takes away: the functions before and behind the forward pass."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specla.kernels.sampling import FAILED_TOKEN, RowLogprobs, RowSampling, row_logprobs
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch, pack
from specla.rpc.errors import InternalError, SessionCancelledError, SpeclaError
from specla.verifier_service.acceptance import Finish, accept
from specla.verifier_service.backend import PassRows
from specla.verifier_service.prefilling import move_on
from specla.verifier_service.session import Session

_RELEASED = SessionCancelledError("the session was released while its pass ran")


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


class PassInputs(NamedTuple):
    """What a backend is given of a pass's items."""

    sessions: list[Session]
    slots: list[int]
    """[B]."""
    batch: TreeBatch
    row_tokens: list[int]
    """[R], the rows' own tokens."""
    sampling: RowSampling
    layers: list[int]
    """Whose streams some session keeps."""


def inputs_of(items: Sequence[PassItem], max_rows: int, before: PassInputs | None = None) -> PassInputs:
    """The device waits for this, so what the same sessions with the same trees had `before` is taken over.

    Anything wrong here is a fault of the caller.
    """
    sessions, batch = [item.session for item in items], pack([item.topology for item in items])
    if before is not None and before.batch is batch and before.sessions == sessions:
        slots, states, layers = before.slots, before.sampling.sessions, before.layers
    else:
        assert max(map(len, batch.topologies)) <= max_rows, "more rows than max_rows"
        assert len(set(sessions)) == len(sessions), "a pass takes each session once"
        slots = [session.slot for session in sessions if session.slot is not None]
        states = [session.sampling_state for session in sessions]
        rings = [session.feature_ring for session in sessions if session.feature_ring is not None]
        layers = sorted({layer for ring in rings for layer in ring.spec.layers})
    row_tokens, lengths = list[int](), list[int]()
    for session, topology, tokens, _ in items:
        assert session.ready, "a session in a pass must be ready"
        assert len(tokens) + 1 == len(topology.parent_rows), "one token a candidate"
        row_tokens.append(session.tokens[-1])
        row_tokens += tokens
        lengths.append(len(session.tokens))
    parents = () if batch.roots_only else batch.parents
    sampling = RowSampling(states, batch.row_sessions, batch.positions(lengths), parents, row_tokens)
    return PassInputs(sessions, slots, batch, row_tokens, sampling, layers)


class EndedPass(NamedTuple):
    """What all rows of a pass gave; see `Sampled`."""

    out: PassRows
    tokens: Sequence[int]
    errors: Mapping[int, str]
    seconds: float


def conclude(item: PassItem, offset: int, ended: EndedPass) -> tuple[PassResult, Sequence[int]]:
    """Accept an item's tokens, whose rows begin at `offset` of the batch, and move its session on: the only place where
    a pass changes a session.

    Returns:
        The result, and the rows of the item that are part of the text now. There are none where the session was
        released meanwhile or the way down its tree met unusable logits.
    """
    session, topology, candidates, top_k = item
    base_len = len(session.tokens)
    if session.slot is None:
        return PassResult(session, base_len, error=_RELEASED, seconds=ended.seconds), ()
    own = ended.tokens[offset : offset + len(candidates) + 1]
    acceptance = accept(topology, candidates, own, session.stopping, base_len - session.prompt_len)
    rows, tokens, finish = acceptance
    if tokens[-1] == FAILED_TOKEN:
        reason = ended.errors[offset + rows[-1]]
        error = InternalError(f"the target gave no usable logits: {reason}", hint="Other sessions are not affected")
        return PassResult(session, base_len, error=error, seconds=ended.seconds), ()
    logprobs = top = None
    if top_k or session.sampling_state.params.top_logprobs is not None:
        of_batch = [offset + row for row in rows[: len(tokens)]]  # token i was sampled after row i of the walk
        logprobs, top = _logprobs(item, of_batch, tokens, ended.out)
    result = PassResult(
        session, base_len, acceptance.accepted_nodes, tokens, acceptance.drafted, finish, logprobs, top, None,
        ended.seconds,
    )  # fmt: skip
    move_on(session, ended.out, offset, rows)
    session.tokens += tokens
    session.sampling_state.extend(tokens)
    session.finish = finish
    return result, rows


_Entries = tuple[RowLogprobs, ...]


def _logprobs(
    item: PassItem, rows: Sequence[int], tokens: Sequence[int], out: PassRows
) -> tuple[_Entries | None, _Entries | None]:
    """Of tokens sampled after these rows: those that the session's sampling asks for, and those that the item does."""
    logprobs = top = None
    if item.session.sampling_state.params.top_logprobs is not None:
        logprobs = tuple(out.sampled.logprobs[row] for row in rows)
    if item.top_k:
        top = tuple(row_logprobs(out.logits(row), token, item.top_k) for row, token in zip(rows, tokens, strict=True))
    return logprobs, top
