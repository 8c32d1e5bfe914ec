"""Known tokens on their way into sessions, piece by piece: which piece is next, and which go through together.

The prompt but for its last token goes in chunks on a grid from position 0. A short last chunk, and what is resumed, run
as decoding would have run them: as chains of accepted rows. Where a session's pieces begin and end depends on its text
alone, and pieces that go through together do not see each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.backend import Backend, Chunk, PassRows, RunningChunks
from specla.verifier_service.features import FeatureRing
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.session import Session


class Piece(NamedTuple):
    """Consecutive tokens of a session that is not ready."""

    session: Session
    start: int
    stop: int
    chunked: bool
    layers: tuple[int, ...]
    """Whose streams are kept of it."""
    more: bool
    """Whether another chunk of the session comes after it."""

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""
        return self.session.tokens[self.start : self.stop]


class RunningPrefill(NamedTuple):
    """What `begin` started and `end` waits for: a chain, or chunks."""

    pieces: Sequence[Piece]
    chain: PassRows | None
    chunks: RunningChunks | None

    @property
    def sessions(self) -> list[Session]:
        """Whose tokens run."""
        return [piece.session for piece in self.pieces]

    @property
    def is_read(self) -> bool:
        """Whether anything but the next chunks needs what runs."""
        return any(piece.layers or not piece.more for piece in self.pieces)


def next_piece(session: Session, chunk_tokens: int, chain_rows: int) -> Piece:
    """What comes next of a session that is not ready."""
    start, last, ring = session.run_len, session.prompt_len - 1, session.feature_ring
    layers = () if ring is None else ring.spec.layers
    stop = min(start + chunk_tokens, last)
    if stop - start > chain_rows:
        kept = ring is not None and stop > len(session.tokens) - 1 - ring.spec.window  # else the rest fills the window
        return Piece(session, start, stop, True, layers if kept else (), last - stop > chain_rows)
    stop = min(start + chain_rows, last if start < last else len(session.tokens) - 1)
    return Piece(session, start, stop, False, layers, False)


def begin(backend: Backend, sessions: Sequence[Session], chunk_tokens: int) -> RunningPrefill:
    """Start the first session's next piece, and with a chunk those of the others that may go with it."""
    pieces = [next_piece(session, chunk_tokens, backend.chain_rows) for session in sessions]
    if not pieces[0].chunked:
        tokens, slot = pieces[0].tokens, pieces[0].session.slot
        assert slot is not None
        lineup = Lineup([slot], pack([Topology.from_wire(range(-1, len(tokens) - 2))]), layers=pieces[0].layers)
        return RunningPrefill(pieces[:1], backend.run(lineup, tokens, [0]), None)
    taken = pieces[:1]
    for piece in pieces[1:]:
        if piece.chunked and backend.goes_together([x.stop - x.start for x in (*taken, piece)]):
            taken.append(piece)
    chunks = []
    for piece in taken:
        assert piece.session.slot is not None
        chunks.append(Chunk(piece.session.slot, piece.tokens, piece.layers))
    return RunningPrefill(taken, None, backend.run_chunks(chunks))


def end(running: RunningPrefill, *, wait: bool = True) -> int:
    """Wait, if somebody reads what runs or is told to, and move the sessions on; those released meanwhile stay as they
    are. Returns how many tokens have run, or run before all that is begun later."""
    if running.chain is not None:
        (piece,) = running.pieces
        session, rows = piece.session, range(piece.stop - piece.start)
        if session.slot is not None:
            running.chain.take(0, rows)
            session.run_len += len(rows)
            if session.feature_ring is not None:
                record_rows(session.feature_ring, running.chain, 0, rows)
        return piece.stop - piece.start
    assert running.chunks is not None
    found = running.chunks.wait() if wait or running.is_read else [[] for _ in running.pieces]
    for piece, streams in zip(running.pieces, found, strict=True):
        session, ring = piece.session, piece.session.feature_ring
        if session.slot is None:
            continue
        session.run_len = piece.stop
        if piece.layers and ring is not None:
            ring.record(streams)
        elif ring is not None:
            ring.skip(piece.stop - piece.start)
    return sum(piece.stop - piece.start for piece in running.pieces)


def record_rows(ring: FeatureRing, out: PassRows, offset: int, rows: Sequence[int]) -> None:
    """Keep the streams of these rows of a session's tree, which begins at `offset` of its pass."""
    of_batch = [offset + row for row in rows]
    ring.record([out.hidden(layer, of_batch) for layer in ring.spec.layers])
