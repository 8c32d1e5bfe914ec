"""What a session brings to a pass and what it takes away: the functions before and behind the forward pass."""

from collections.abc import Sequence
from typing import NamedTuple

from specla.kernels.sampling import FAILED_TOKEN, RowLogprobs, row_logprobs
from specla.kernels.topology import Topology
from specla.kernels.tree import TreeBatch, pack
from specla.rpc.errors import InternalError, SessionCancelledError, SpeclaError
from specla.verifier_service.acceptance import Finish, Walks
from specla.verifier_service.backend import PassRows
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.prefilling import record_rows
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
        rows: rows of its tree whose tokens stand in the text now, root to leaf, no further than the end of the text.
        tokens: new tokens: accepted candidates, then the bonus token; cut at the end of the text.
        finish: the end of the text, if it was reached.
        logprobs: for each of `tokens`, if the session's sampling asks for them.
        top: for each of `tokens`, if the item asked for them.
        error: why the session failed; then nothing was committed.
        seconds: duration of the whole pass, sampling included.
    """

    session: Session
    base_len: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[RowLogprobs, ...] | None = None
    top: tuple[RowLogprobs, ...] | None = None
    error: SpeclaError | None = None
    seconds: float = 0.0

    @property
    def accepted_nodes(self) -> tuple[int, ...]:
        """Indices of the accepted candidates, root to leaf."""
        return tuple([row - 1 for row in self.rows[1:]])

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For each of `tokens` whether it was a candidate."""
        accepted = max(0, len(self.rows) - 1)
        return (True,) * accepted + (False,) * (len(self.tokens) - accepted)


class PassInputs(NamedTuple):
    """What a backend is given of a pass's items, and whose they are."""

    sessions: list[Session]
    lineup: Lineup
    row_tokens: list[int]
    """[R], the rows' own tokens."""
    lengths: list[int]
    """[B], of the sessions' texts."""


def inputs_of(items: Sequence[PassItem], max_rows: int, before: PassInputs | None = None) -> PassInputs:
    """The device waits for this, so what the same sessions with the same trees had `before` is taken over.

    Anything wrong here is a fault of the caller.
    """
    sessions: list[Session] = []
    topologies: list[Topology] = []
    row_tokens: list[int] = []
    lengths: list[int] = []
    for session, topology, tokens, _ in items:
        assert session.ready, "a session in a pass must be ready"
        assert len(tokens) + 1 == len(topology.parent_rows), "one token a candidate"
        sessions.append(session)
        topologies.append(topology)
        text = session.tokens
        row_tokens.append(text[-1])
        row_tokens += tokens
        lengths.append(len(text))
    batch = pack(topologies)
    if before is not None and before.lineup.batch is batch and before.sessions == sessions:
        return PassInputs(sessions, before.lineup, row_tokens, lengths)
    assert max(map(len, topologies)) <= max_rows, "more rows than max_rows"
    assert len(set(sessions)) == len(sessions), "a pass takes each session once"
    slots = [session.slot for session in sessions if session.slot is not None]
    rings = [session.feature_ring for session in sessions if session.feature_ring is not None]
    layers = sorted({layer for ring in rings for layer in ring.spec.layers})
    lineup = Lineup(slots, batch, [session.sampling_state for session in sessions], layers)
    return PassInputs(sessions, lineup, row_tokens, lengths)


def conclude(
    items: Sequence[PassItem], batch: TreeBatch, out: PassRows, walks: Walks, seconds: float
) -> tuple[list[PassResult], dict[int, int]]:
    """Accept what was sampled down each item's tree and move its session on: the only place where a pass changes a
    session. The next pass waits for this.

    Returns:
        A result an item, and how many rows of a walk are part of the text, for the items where not all are: the text
        has ended, or, with none at all, the session was released meanwhile or its walk met unusable logits.
    """
    firsts, all_rows, all_tokens = walks
    results: list[PassResult] = []
    cut: dict[int, int] = {}
    for index, ((session, _, _, top_k), first, last) in enumerate(zip(items, firsts, firsts[1:], strict=False)):
        rows, tokens, base_len, finish = all_rows[first:last], all_tokens[first:last], len(session.tokens), None
        stopping, sampling = session.stopping, session.sampling_state
        done = base_len - session.prompt_len
        if done + last - first >= stopping.max_tokens or not stopping.ends.isdisjoint(tokens):
            count, finish = stopping.cut(tokens, done)
            rows, tokens = rows[: count + 1], tokens[:count]  # with the last token's own row, if it has one
            cut[index] = len(rows)
        if session.slot is None or tokens[-1] == FAILED_TOKEN:
            error = _RELEASED if session.slot is None else _unusable(out.error(batch.offsets[index] + rows[-1]))
            results.append(PassResult(session, base_len, error=error, seconds=seconds))
            cut[index] = 0
            continue
        logprobs = top = None
        if top_k or sampling.params.top_logprobs is not None:
            logprobs, top = _logprobs(
                items[index], [batch.offsets[index] + row for row in rows[: len(tokens)]], tokens, out
            )
        results.append(PassResult(session, base_len, rows, tokens, finish, logprobs, top, None, seconds))
        session.run_len += len(rows)
        if session.feature_ring is not None:
            record_rows(session.feature_ring, out, batch.offsets[index], rows)
        session.tokens += tokens
        sampling.extend(tokens)
        session.finish = finish
    return results, cut


def _unusable(reason: str) -> InternalError:
    return InternalError(f"the target gave no usable logits: {reason}", hint="Other sessions are not affected")


_Entries = tuple[RowLogprobs, ...]


def _logprobs(
    item: PassItem, rows: Sequence[int], tokens: Sequence[int], out: PassRows
) -> tuple[_Entries | None, _Entries | None]:
    """Of tokens sampled after these rows: those that the session's sampling asks for, and those that the item does."""
    logprobs = top = None
    if item.session.sampling_state.params.top_logprobs is not None:
        logprobs = tuple(out.logprobs(row) for row in rows)
    if item.top_k:
        top = tuple(row_logprobs(out.logits(row), token, item.top_k) for row, token in zip(rows, tokens, strict=True))
    return logprobs, top
