"""A target on CPUs: `tree_pass` over stored states, whose changes wait until a session runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.sampling import RowLogprobs, sample
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Walks, walk, walk_words
from specla.verifier_service.backend import Chunk
from specla.verifier_service.features import FINAL_NORM
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.state import PendingPath, StateStore
from specla.verifier_service.targets.gated_deltanet import PassFactors, TargetWeights, TreePass, prefill_chunk
from specla.verifier_service.targets.tree_pass import tree_pass


class CpuBackend:
    """See `Backend`."""

    chain_rows = 32  # up to here a chain beats the chunked form
    overlaps = False  # the thread that asks is the one that runs

    def __init__(self, weights: TargetWeights, store: StateStore) -> None:
        """For prepared weights and the sessions' states."""
        self.weights, self.store = weights, store
        self._pending: dict[int, PendingPath] = {}
        self._last_factors: PassFactors | None = None

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return self.store.free_slots

    def acquire(self) -> int:
        """Take a slot."""
        return self.store.acquire()

    def clear(self, slot: int) -> None:
        """Set a slot to an empty text."""
        self._pending.pop(slot, None)
        self.store.clear(slot)

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._pending.pop(slot, None)
        self.store.release(slot)

    def usual_batches(self) -> list[list[Topology]]:
        """None: every pass runs as it comes."""
        return []

    def prepare(self, topologies: Sequence[Topology]) -> None:
        """Nothing: every pass runs as it comes."""

    def usual_chunks(self) -> list[int]:
        """None: every chunk runs as it comes."""
        return []

    def prepare_chunk(self, tokens: int) -> None:
        """Nothing: every chunk runs as it comes."""

    def run(self, lineup: Lineup, row_tokens: Sequence[int], lengths: Sequence[int]) -> CpuPassRows:
        """Commit what these slots wait for, then run the rows."""
        self._commit(lineup.slots)
        store = self.store
        out = tree_pass(
            self.weights,
            torch.tensor(row_tokens),
            lineup.batch,
            store.recurrent_state,
            store.conv_state,
            lineup.slots,
            lineup.states is not None or FINAL_NORM in lineup.layers,
        )
        self._last_factors = out.factors
        return CpuPassRows(self, lineup, row_tokens, lengths, out)

    def goes_together(self, tokens: Sequence[int]) -> bool:
        """One at a time."""
        return len(tokens) == 1

    def run_chunks(self, chunks: Sequence[Chunk]) -> FinishedChunks:
        """In the chunked form, which advances the stored state itself."""
        return FinishedChunks([self._run_chunk(*chunk) for chunk in chunks])

    def _run_chunk(self, slot: int, tokens: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
        assert slot not in self._pending, "a chunk must follow what is stored"
        hidden = prefill_chunk(
            self.weights,
            torch.tensor(tokens),
            self.store.recurrent_state[slot],
            self.store.conv_state[slot],
            want_final_norm=FINAL_NORM in layers,
        )
        return [hidden[layer] for layer in layers]

    def wait(self, slot: int, factors: PassFactors, rows: tuple[int, ...]) -> None:
        """Note an accepted path, to be applied when the slot runs again."""
        self._pending[slot] = PendingPath(factors, rows)

    def _commit(self, slots: Sequence[int]) -> None:
        """Apply the pending paths of slots that run now, and those older than the last pass, so that the factors of
        two passes are kept at most."""
        stale = [slot for slot, path in self._pending.items() if path.factors is not self._last_factors]
        groups: dict[int, list[int]] = {}
        for slot in dict.fromkeys([*slots, *stale]):
            if slot in self._pending:
                groups.setdefault(id(self._pending[slot].factors), []).append(slot)
        for due in groups.values():
            self.store.apply(due, [self._pending.pop(slot) for slot in due])


class FinishedChunks(NamedTuple):
    """See `RunningChunks`."""

    streams: list[list[Tensor]]

    def wait(self) -> list[list[Tensor]]:
        """They have run."""
        return self.streams


class CpuPassRows:
    """See `PassRows`."""

    def __init__(
        self,
        backend: CpuBackend,
        lineup: Lineup,
        row_tokens: Sequence[int],
        lengths: Sequence[int],
        out: TreePass,
    ) -> None:
        """Samples at once."""
        self._backend, self._lineup, self._row_tokens, self._out = backend, lineup, row_tokens, out
        sampling = lineup.sampling(row_tokens, lengths)
        self._sampled = sample(out.logits, sampling) if sampling is not None and out.logits is not None else None

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens that the rows sampled."""
        assert self._sampled is not None, "the pass was run without sampling"
        return self._sampled.tokens

    @cached_property
    def walks(self) -> Walks:
        """The way down each session's tree."""
        batch, row_tokens = self._lineup.batch, np.array(self._row_tokens, np.int32)
        return walk(batch, row_tokens, self.tokens.astype(np.int32), np.empty(walk_words(batch.rows), np.int32))

    def error(self, row: int) -> str:
        """What was wrong with a row's logits."""
        assert self._sampled is not None, "the pass was run without sampling"
        return self._sampled.errors[row]

    def logprobs(self, row: int) -> RowLogprobs:
        """Of the token that a row sampled."""
        assert self._sampled is not None, "the pass was run without sampling"
        return self._sampled.logprobs[row]

    def logits(self, row: int) -> NDArray[np.float32]:
        """A row's logits."""
        assert self._out.logits is not None
        values: NDArray[np.float32] = self._out.logits[row].numpy()
        return values

    def hidden(self, layer: int, rows: Sequence[int]) -> Tensor:
        """The stream after a layer."""
        return self._out.hidden[layer].index_select(0, torch.tensor(rows))

    def take(self, index: int, rows: Sequence[int]) -> None:
        """Note the path; it is applied when the session runs again."""
        offset = self._lineup.batch.offsets[index]
        self._backend.wait(self._lineup.slots[index], self._out.factors, tuple(offset + row for row in rows))

    def take_walks(self, cut: Mapping[int, int]) -> None:
        """Likewise."""
        firsts, rows, _ = self.walks
        for index, (first, last) in enumerate(pairwise(firsts)):
            taken = rows[first : first + cut[index]] if index in cut else rows[first:last]
            if taken:
                self.take(index, taken)
