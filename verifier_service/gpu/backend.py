"""A target on a GPU: passes of buckets, whose states, factors and windows never leave the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.gpu.adjusting import NO_CHANGES, LogitEntries
from specla.kernels.gpu.product import product
from specla.kernels.gpu.selector import LayerShape, Mode, Selector
from specla.kernels.sampling import RowLogprobs, check_row, row_logprobs
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Walks
from specla.verifier_service.backend import Chunk
from specla.verifier_service.features import FINAL_NORM
from specla.verifier_service.gpu.buckets import (
    MOST_PENDING,
    PENDING,
    bucket_of,
    chain_rows,
    largest_bucket,
    usual_batches,
)
from specla.verifier_service.gpu.buffers import MOST_ENTRIES, PassBuffers
from specla.verifier_service.gpu.chunk_buffers import prefill_bytes
from specla.verifier_service.gpu.forward import why_one_row_apart
from specla.verifier_service.gpu.pass_run import PassKey, PassRun
from specla.verifier_service.gpu.prefill import LaunchedChunks, Prefill
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup

_BATCHES = 1024  # batches of trees for which it is remembered what they run on
_MOST_KEEPING = 64  # captured passes that keep streams: which layers, and so how many kinds, is for clients to say

log = structlog.get_logger("specla.verifier")


class GpuBackend:
    """See `Backend`.

    A pass first commits what its sessions accepted before, inside the verification kernels; sessions that sit out keep
    their factors in their pools, for as long as they like.
    """

    def __init__(
        self,
        weights: GpuWeights,
        mode: Mode,
        selector: Selector,
        *,
        slots: int,
        max_rows: int,
        max_batch_rows: int = 256,
        prefill_chunk: int = 128,
    ) -> None:
        """Room for `slots` sessions of up to `max_rows` rows a pass.

        Args:
            weights: the model.
            mode: whose kernels are used.
            selector: which of them.
            slots: sessions at once.
            max_rows: rows of one session in one pass.
            max_batch_rows: rows of all sessions in one pass, where there are more than roots.
            prefill_chunk: tokens of one chunk at the most.
        """
        self.chain_rows, self._max_rows = chain_rows(max_rows), max_rows
        rows = max(max_rows, self.chain_rows)
        config, device = weights.config, weights.device
        self.weights, self.mode, self._selector = weights, mode, selector
        self.overlaps = device.type == "cuda"
        self._shape = LayerShape(config.head_dim, config.head_v_dim, config.value_heads)
        self._most_rows = max(max_batch_rows, rows, slots)
        self.store = GpuStore(config, slots, rows, MOST_PENDING, weights.dtype, device)
        reason = why_one_row_apart(weights, self.store)
        if reason is not None:
            log.info("one_row_in_separate_launches", reason=reason)
        largest = largest_bucket(slots, rows, self._most_rows, config.conv_size)
        nbytes = PassBuffers.nbytes(config, weights.dtype, largest, serial=mode == "exact")
        nbytes = max(nbytes, prefill_bytes(config, prefill_chunk, weights.dtype))
        self._arena = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory_of_graphs = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._prefill = Prefill(weights, self.store, prefill_chunk, self._arena, self._memory_of_graphs)
        most_entries = min(MOST_ENTRIES, slots * config.vocab_size)
        self._entries = LogitEntries(largest.rows, config.vocab_size, most_entries, device)
        self._changes_stand = False
        self._lineup: Lineup | None = None
        self._run: PassRun | None = None
        self._run_for = lru_cache(maxsize=_BATCHES)(self._find_run)
        self._runs: dict[PassKey, PassRun] = {}

    @property
    def free_slots(self) -> int:
        """How many sessions could still be opened."""
        return self.store.free_slots

    def acquire(self) -> int:
        """Take a slot."""
        return self.store.acquire()

    def clear(self, slot: int) -> None:
        """Set a slot to an empty text."""
        self.store.clear(slot)

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self.store.release(slot)

    def run(self, lineup: Lineup, row_tokens: Sequence[int], lengths: Sequence[int]) -> GpuPassRows:
        """Run all rows; the sessions' earlier factors are committed on the way."""
        if lineup is not self._lineup or self._run is None:
            self._run = self._run_for(lineup.batch.topologies, lineup.states is not None, tuple(lineup.layers))
            self._lineup = lineup
        run, store = self._run, self.store
        changes = run.host.put(lineup, row_tokens, lengths)
        if changes is None:
            store.write_states([slot for slot in lineup.slots if len(store.rows[slot].pending) > MOST_PENDING])
            changes = run.host.put(lineup, row_tokens, lengths)
            assert changes is not None, "states were written"
        stood, self._changes_stand = self._changes_stand, True  # a launch that fails may have put some
        run.launch(None if changes is NO_CHANGES and not stood else changes)
        self._changes_stand = changes.any
        run.buffers.batch.stored(store.in_use)
        return GpuPassRows(self, run, lineup, adjusted=changes.any)

    def goes_together(self, tokens: Sequence[int]) -> bool:
        """As many as a chunk has rows for, where products are the same in company."""
        return self._prefill.goes_together(tokens)

    def run_chunks(self, chunks: Sequence[Chunk]) -> LaunchedChunks:
        """In the chunked form, which advances the stored states itself."""
        return self._prefill.run(chunks)

    def usual_chunks(self) -> list[int]:
        """Of every size that is captured, where no chain takes its place."""
        return [size for size in self._prefill.sizes if size > self.chain_rows]

    @torch.inference_mode()
    def prepare_chunk(self, tokens: int) -> None:
        """Compile and capture what a chunk needs, before one comes."""
        self._prefill.prepare(tokens)

    def usual_batches(self) -> list[list[Topology]]:
        """Plain decoding and drafts of every size, for one session and twice as many over and over, up to all."""
        return usual_batches(self.store.free_slots, self._max_rows, self._most_rows)

    @torch.inference_mode()
    def prepare(self, topologies: Sequence[Topology]) -> None:
        """Compile and capture what a pass of such trees needs, before one comes."""
        self.store.prepare()
        self._run_made_for(tuple(topologies), samples=True)
        if len(topologies) == 1 and len(topologies[0]) == len(topologies[0].levels):
            self._run_made_for(tuple(topologies), samples=False)  # known tokens run as one session's chain

    def pass_of(self, topologies: Sequence[Topology]) -> PassRun:
        """What plain passes of such trees run on at best; captured now if they are the first of their kind."""
        return self._run_made_for(tuple(topologies), samples=True)

    def _find_run(self, topologies: tuple[Topology, ...], samples: bool, layers: tuple[int, ...]) -> PassRun:
        """What passes of these trees run on: what was made for their kind, or will do; made now if nothing will.

        To compile and capture takes longer than many passes.
        """
        key = self._key(topologies, samples, layers)
        if key not in self._runs:
            will_do = [other for other in self._runs if key.can_run_as(other)]
            key = min(will_do, key=key.apart_from) if will_do else key
        return self._run_of(key)

    def _run_made_for(self, topologies: tuple[Topology, ...], *, samples: bool) -> PassRun:
        """What passes of these trees run on fastest."""
        return self._run_of(self._key(topologies, samples, ()))

    def _key(self, topologies: tuple[Topology, ...], samples: bool, layers: tuple[int, ...]) -> PassKey:
        choice = self._selector.choose(self.mode, self._shape, topologies, pending=PENDING, dtype=self.weights.dtype)
        bucket = bucket_of(topologies, self._most_rows, self.weights.config.conv_size, choice.groups)
        return PassKey(bucket, choice, samples, tuple(layer for layer in layers if layer != FINAL_NORM))

    def _run_of(self, key: PassKey) -> PassRun:
        """Captured now if it is the first of its kind."""
        if key not in self._runs:
            if key.layers:
                self._forget_oldest_keeping()
            arena = self._arena_for(key)
            self._runs[key] = PassRun(self.weights, self.store, key, arena, self._entries, self._memory_of_graphs)
            self._run_for.cache_clear()  # it may name what will do for this kind
        return self._runs[key]

    def _arena_for(self, key: PassKey) -> Tensor:
        """Memory for a key's passes: where they need more than all before (kept streams, many programs that share
        trees), a larger arena, which later ones share; those before stay where they were captured."""
        needed = key.arena_bytes(self.weights.config, self.weights.dtype)
        if needed > len(self._arena):
            nbytes = max(needed, len(self._arena) * 5 // 4)  # so that there are few
            log.info("pass_memory_grown", bytes=nbytes, sessions=key.bucket.sessions, rows=key.bucket.rows)
            self._arena = torch.empty(nbytes, dtype=torch.uint8, device=self.weights.device)
        return self._arena

    def _forget_oldest_keeping(self) -> None:
        """Makes room for one more pass that keeps streams."""
        keeping = [key for key in self._runs if key.layers]
        if len(keeping) >= _MOST_KEEPING:
            self._run_for.cache_clear()
            self._run = None
            self._runs.pop(keeping[0]).wait()  # its pinned memory may be on its way to the device


class GpuPassRows:
    """See `PassRows`: views of a bucket's buffers, until the next pass writes there."""

    def __init__(
        self,
        backend: GpuBackend,
        run: PassRun,
        lineup: Lineup,
        *,
        adjusted: bool,
    ) -> None:
        """While the rows run; `adjusted` says whether logits are changed before rows sample."""
        self._backend, self._run, self._buffers, self._lineup = backend, run, run.buffers, lineup
        self._adjusted = adjusted

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens that the rows sampled."""
        self._run.wait()
        tokens, _ = self._buffers.results()
        return tokens

    @property
    def walks(self) -> Walks:
        """The way down each session's tree."""
        self._run.wait()
        return self._run.host.walks(self._lineup.batch)

    def error(self, row: int) -> str:
        """What was wrong with a row's logits."""
        return check_row(self.logits(row)) or "every token has been ruled out"

    def logprobs(self, row: int) -> RowLogprobs:
        """Of the token that a row sampled."""
        states = self._lineup.states
        assert states is not None, "the pass was run without sampling"
        count = states[self._lineup.batch.row_sessions[row]].params.top_logprobs
        assert count is not None, "its session asks for none"
        return row_logprobs(self.logits(row), int(self.tokens[row]), count)

    def logits(self, row: int) -> NDArray[np.float32]:
        """A row's logits, before penalties: where those have changed them, or other rows' have taken their place, the
        head is multiplied again."""
        x = self._buffers.activations
        if self._adjusted or len(self._buffers.parts) > 1:
            out, one = torch.empty_like(x.logits[:1]), torch.ones(1, dtype=torch.int32, device=x.logits.device)
            product(x.final[row : row + 1].clone(), self._backend.weights.head, out, one)  # a row may begin anywhere
        else:
            out = x.logits[row : row + 1]
        values: NDArray[np.float32] = out[0].cpu().numpy()
        return values

    def hidden(self, layer: int, rows: Sequence[int]) -> Tensor:
        """The stream after a layer."""
        x = self._buffers.activations
        source = x.final if layer == FINAL_NORM else x.hidden[self._buffers.layers.index(layer)]
        return source[torch.tensor(rows, device=source.device)].float().cpu()

    def take(self, index: int, rows: Sequence[int]) -> None:
        """The rows' factors stay in the pool until the session's next pass commits them."""
        self._backend.store.in_use.accept(self._run.host.slots[index : index + 1], [rows])

    def take_walks(self, cut: Mapping[int, int]) -> None:
        """Likewise."""
        self._run.host.take_walks(cut)
