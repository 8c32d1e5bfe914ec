"""The verifier's engine: sessions in, verified tokens out. Synchronous, owned by one thread, knows no protocol.

    session = engine.open(...)                         # takes a slot
    while not engine.prefill(session, budget): ...     # bounded pieces
    result, = engine.run_pass([PassItem(session, topology, draft_tokens)])
    engine.release(session)

A pass runs the root and the candidates of any number of sessions, each with its own topology; plain decoding is the
topology of the root alone. It leaves the stored states as they are: what was accepted is applied when the session
runs again. Where the model runs, and how, is the backend's matter. Between `begin_pass` and `end_pass`, the two halves
of `run_pass`, sessions may be opened and released.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service import prefilling
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.backend import Backend, RunningChunks
from specla.verifier_service.backends import backend_for, memory_of
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.devices import device_of
from specla.verifier_service.features import FeatureRing, FeatureSlice, FeatureWindow
from specla.verifier_service.inference import without_gradients
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.passes import (
    PassInputs,
    PassItem,
    PassResult,
    RunningPass,
    conclude,
    inputs_of,
)
from specla.verifier_service.prefilling import RunningPrefill
from specla.verifier_service.session import Session, check_opening, sampling_state
from specla.verifier_service.target import Target

MOST_THREADS = 8  # PyTorch's own choice may be more cores than one token's products gain from
MEASURED_ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65)  # on both sides of the sizes that a GPU's passes come in


class GreedyChoice(NamedTuple):
    """The most likely token, and by how much its logit is above the next one's."""

    token: int
    margin: float


class Engine:
    """A target and the sessions it runs.

    Attributes:
        config: as given.
        target: the loaded model and what it is called.
        memory: what it takes.
        max_sessions: slots, after the memory limit.
        backend: where the model runs.
    """

    def __init__(self, config: VerifierConfig, backend: Backend | None = None, target: Target | None = None) -> None:
        """Load the target and prove that device and build keep exact mode's promise. On CPUs, sets the thread count.

        `backend` stands in for the one that the configuration's device has, `target` for a checkpoint that is loaded
        already.

        Raises:
            UnsupportedModelError: a checkpoint or a device that cannot be run.
            InvalidRequestError: a device that is not there, a memory limit that holds no session.
            InternalError: exact mode's promise is not kept here.
        """
        if device_of(config) == "cpu":
            torch.set_num_threads(config.threads or min(torch.get_num_threads(), MOST_THREADS))
        self.config = config
        self.target = target or Target.load(config)
        self.memory = memory_of(config, self.target)
        self.max_sessions = self.memory.slots(config.max_sessions, config.max_rows, config.memory_mib)
        self.backend: Backend = backend or backend_for(config, self.target, self.max_sessions)
        self._sessions: set[Session] = set()
        self._inputs: PassInputs | None = None
        self._under_way: RunningChunks | None = None

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return self.backend.free_slots

    @property
    def overlaps(self) -> bool:
        """Whether a pass that has begun runs by itself, on a device other than the thread's own."""
        return self.backend.overlaps

    def open(
        self,
        session_id: bytes,
        prompt_ids: Sequence[int],
        resumed_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: Stopping,
        keep: FeatureWindow | None = None,
    ) -> Session:
        """Take a slot for a new generation; `prefill` comes next.

        Args:
            session_id: kept, not looked at.
            prompt_ids: at least one token.
            resumed_ids: tokens of the output so far; they are run as decoding would have run them.
            sampling: how tokens are chosen.
            stopping: when the text ends.
            keep: hidden states to keep for drafters.

        Raises:
            InvalidRequestError: an empty prompt, ids outside the vocabulary, parameters or layers that make no sense,
                resumed tokens that already end the text.
            PromptTooLongError: more prompt tokens than max_prompt_tokens.
            CapacityError: no slot is free.
        """
        model = self.target.config
        check_opening(prompt_ids, resumed_ids, stopping, model.vocab_size, self.config.max_prompt_tokens)
        state = sampling_state(sampling, model.vocab_size, prompt_ids, resumed_ids)
        ring = None
        if keep is not None:
            keep.validate(model.num_hidden_layers)
            if keep.layers and keep.window:
                ring = FeatureRing(keep, model.hidden_size)
        slot = self.backend.acquire()
        session = Session(session_id, slot, prompt_ids, resumed_ids, state, stopping, ring)
        self._sessions.add(session)
        return session

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the usual passes and chunks of prompts ready, which may mean compiling and capturing; later ones are
        made as they come.

        `progress` is told how many are done, of how many.
        """
        backend = self.backend
        steps = [partial(backend.prepare_chunk, tokens) for tokens in backend.usual_chunks()]
        steps += [partial(backend.prepare, topologies) for topologies in backend.usual_batches()]
        for done, step in enumerate(steps, 1):
            step()
            if progress is not None:
                progress(done, len(steps))

    def prefill(self, session: Session, budget_tokens: int) -> bool:
        """Run more of the tokens given at opening; at least one piece, at most about budget_tokens.

        Returns:
            Whether the session is ready for passes.
        """
        while not session.ready and budget_tokens > 0:
            budget_tokens -= self.end_prefill(self.begin_prefill([session]))
        return session.ready

    @torch.inference_mode()
    def begin_prefill(self, sessions: Sequence[Session]) -> RunningPrefill:
        """Start the next bounded piece of the first of these sessions, none of which is ready, and those of the others
        that may go with it. `end_prefill` is next, but for `release`."""
        assert all(session.slot is not None for session in sessions), "a released session cannot be prefilled"
        return prefilling.begin(self.backend, sessions, self.config.chunk_tokens)

    @torch.inference_mode()
    def end_prefill(self, running: RunningPrefill) -> int:
        """Wait for what was begun and move its sessions on. Returns how many tokens have run.

        Where no session decodes, a chunk that others follow is not waited for: the next is then begun while it runs.
        """
        waits = not self.overlaps or any(session.ready for session in self._sessions)
        if not waits and not running.is_read:
            self._under_way = running.chunks
        return prefilling.end(running, wait=waits)

    def settle(self) -> None:
        """Wait for chunks under way: what they take is none of the next pass's time. `begin_pass` does it, too."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def run_pass(self, items: Sequence[PassItem]) -> list[PassResult]:
        """Run roots and candidates of all items in one pass: draft tokens in, committed tokens out.

        Args:
            items: at least one, each of another session.

        Returns:
            A result an item, in their order; see `end_pass`.
        """
        return self.end_pass(self.begin_pass(items))

    @without_gradients
    def begin_pass(self, items: Sequence[PassItem]) -> RunningPass:
        """Start a pass; `end_pass` is next, but for `open` and `release`. No session moves on before."""
        self.settle()
        started = time.perf_counter()
        self._inputs = inputs = inputs_of(items, self.config.max_rows, self._inputs)
        _, lineup, row_tokens, lengths = inputs
        return RunningPass(items, lineup.batch, self.backend.run(lineup, row_tokens, lengths), started)

    @without_gradients
    def end_pass(self, running: RunningPass) -> list[PassResult]:
        """Wait for a pass and move its sessions on.

        A session whose logits are not numbers fails alone: its result holds the error and nothing was committed. So
        does one that was released meanwhile.

        Returns:
            A result an item, in their order.
        """
        items, batch, out, started = running
        walks = out.walks  # waits
        results, cut = conclude(items, batch, out, walks, time.perf_counter() - started)
        out.take_walks(cut)
        return results

    def features(self, session: Session, from_position: int, to_position: int) -> FeatureSlice:
        """Hidden states kept of positions in [from_position, to_position), all below committed_len - 1.

        Returns:
            The first position and float32 [positions, layers, hidden], layers in the order of the session's
            FeatureWindow; possibly fewer positions than asked for, or none.
        """
        if session.feature_ring is None:
            return FeatureSlice(from_position, torch.zeros(0, 0, self.target.config.hidden_size))
        return session.feature_ring.read(from_position, min(to_position, session.committed_len - 1))

    def measure_pass_times(self, rows: Sequence[int] = MEASURED_ROWS, repeats: int = 3) -> dict[int, float]:
        """Shortest duration in seconds of one session's pass, by number of rows, over a chain of candidates.

        Costs `repeats` passes a size, in a slot that is free before and after.

        Raises:
            CapacityError: no slot is free.
        """
        chains = {count: Topology.from_wire(range(-1, count - 2)) for count in rows if count <= self.config.max_rows}
        for chain in chains.values():
            self.backend.prepare([chain])
        best: dict[int, float] = {}
        with self._own_session() as session:
            for _ in range(repeats):
                for count, chain in chains.items():
                    (result,) = self.run_pass([PassItem(session, chain, [0] * (count - 1))])
                    best[count] = min(best.get(count, result.seconds), result.seconds)
        return best

    @torch.inference_mode()
    def greedy_choices(self, text: Sequence[int], rows: int) -> list[GreedyChoice]:
        """What greedy decoding would choose after each token of a text that stands fixed, in passes of `rows` rows.

        In a slot that is free before and after.

        Raises:
            CapacityError: no slot is free.
        """
        assert 1 <= rows <= self.config.max_rows
        found = list[GreedyChoice]()
        with self._own_session() as session:
            slot = session.slot
            assert slot is not None
            for start in range(0, len(text), rows):
                tokens = text[start : start + rows]
                chain = Topology.from_wire(range(-1, len(tokens) - 2))
                out = self.backend.run(Lineup([slot], pack([chain]), [session.sampling_state]), tokens, [start + 1])
                for row, token in enumerate(out.tokens.tolist()):
                    second, first = np.partition(out.logits(row), -2)[-2:]
                    found.append(GreedyChoice(token, float(first - second)))
                out.take(0, range(len(tokens)))
        return found

    def release(self, session: Session) -> None:
        """Free a session's slot and everything else it holds; harmless twice."""
        if session.slot is None:
            return
        self._sessions.discard(session)
        session.feature_ring = None
        slot, session.slot = session.slot, None
        self.backend.release(slot)

    def close(self) -> None:
        """Release all sessions; harmless twice."""
        for session in list(self._sessions):
            self.release(session)

    @contextmanager
    def _own_session(self) -> Iterator[Session]:
        """A session without end, for the engine's own measurements."""
        sampling = SessionSampling(SamplingParams(temperature=0.0), self.target.config.vocab_size)
        session = Session(b"", self.backend.acquire(), [0], [], sampling, Stopping(max_tokens=1 << 31), None)
        try:
            yield session
        finally:
            self.release(session)
