"""Prefill in chunks on the GPU's kernels: what the CPU's prefill gives, wherever a chunk ends, slot by slot."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tree_cases import chain

from specla.kernels.gpu.chunk_batch import ChunkText
from specla.kernels.gpu.selector import Selector
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.backend import Backend, Chunk
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cpu_backend import CpuBackend
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FINAL_NORM, FeatureWindow
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.chunk_buffers import prefill_bytes
from specla.verifier_service.gpu.prefill import Prefill, chunk_sizes
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.passes import PassItem
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import prepare
from specla.verifier_service.targets.weights import load_checkpoint

pytestmark = pytest.mark.any_device

CHUNK = 96
TOLERANCE = 2e-3
LAYERS = (1, 0, FINAL_NORM)
PROMPT = [(7 * i * i + 3 * i + 5) % 320 for i in range(100)]


class Pair:
    """The same slots on the CPU and on the GPU's kernels, which run in the interpreter where there is no GPU."""

    def __init__(self, folder: Path) -> None:
        config = GatedDeltaNetConfig.from_folder(folder)
        tensors = load_checkpoint(folder, config).tensors
        self.cpu = CpuBackend(prepare(config, tensors, "fast", "torch"), StateStore(config, 2))
        weights = GpuWeights.load(config, tensors, torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
        selector = Selector.for_device("NVIDIA H200")
        self.gpu = GpuBackend(weights, "exact", selector, slots=2, max_rows=8, prefill_chunk=CHUNK)

    def chunk(self, slot: int, tokens: Sequence[int]) -> None:
        """A chunk on both, with the same streams."""
        wanted = run_chunk(self.cpu, slot, tokens, LAYERS)
        for found, want in zip(run_chunk(self.gpu, slot, tokens, LAYERS), wanted, strict=True):
            close(found, want)
        assert not self.gpu.store.rows[slot].pending

    def chain(self, slot: int, tokens: Sequence[int]) -> None:
        """A chain of accepted rows on both, with the same streams."""
        for found, want in zip(*(run_chain(side, slot, tokens) for side in (self.gpu, self.cpu)), strict=True):
            close(found, want)

    def check_state(self, slot: int) -> None:
        close(text_of(self.gpu, slot), self.cpu.store.recurrent_state[slot])


def run_chunk(backend: Backend, slot: int, tokens: Sequence[int], layers: Sequence[int] = ()) -> list[torch.Tensor]:
    (streams,) = backend.run_chunks([Chunk(slot, tokens, layers)]).wait()
    return streams


def run_chain(backend: Backend, slot: int, tokens: Sequence[int]) -> list[torch.Tensor]:
    rows = range(len(tokens))
    out = backend.run(Lineup([slot], pack([chain(len(tokens))]), layers=LAYERS), tokens, [0])
    found = [out.hidden(layer, rows) for layer in LAYERS]
    out.take(0, rows)
    return found


def text_of(backend: GpuBackend, slot: int) -> torch.Tensor:
    """The state that holds all of a slot's text."""
    backend.store.write_states([slot])
    return backend.store.states[:, slot].cpu()


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.shape == want.shape
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    assert float((found - want).abs().max() / want.abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def pair(tiny_target: Path) -> Pair:
    return Pair(tiny_target)


@pytest.mark.parametrize("sizes", [(66, 15), (1, 2, 18)])
def test_chunks_and_the_passes_behind_them_are_the_cpus(pair: Pair, sizes: tuple[int, ...]) -> None:
    slot, start = pair.gpu.acquire(), 0
    assert slot == pair.cpu.acquire()
    for size in sizes:
        pair.chunk(slot, PROMPT[start : start + size])
        start += size
    pair.check_state(slot)
    pair.chain(slot, PROMPT[start : start + 3])
    for side in (pair.cpu, pair.gpu):
        side.release(slot)


def test_a_chunk_takes_the_factors_and_the_window_before_it(pair: Pair) -> None:
    slot = pair.gpu.acquire()
    assert slot == pair.cpu.acquire()
    run_chain(pair.gpu, slot, PROMPT[:5])
    assert pair.gpu.store.rows[slot].pending
    run_chunk(pair.cpu, slot, PROMPT[:5])
    pair.chunk(slot, PROMPT[5:30])
    pair.check_state(slot)
    for side in (pair.cpu, pair.gpu):
        side.release(slot)


def test_a_chunk_leaves_other_slots_alone_and_its_bits_know_no_slot(pair: Pair) -> None:
    backend, tokens = pair.gpu, PROMPT[:20]
    first, second = backend.acquire(), backend.acquire()
    alone = run_chunk(backend, first, tokens, LAYERS)
    state, pools = text_of(backend, first), [x[:, first].clone() for x in backend.store.pools]
    beside = run_chunk(backend, second, tokens, LAYERS)
    assert torch.equal(backend.store.states[:, first].cpu(), state)
    for x, before in zip(backend.store.pools, pools, strict=True):
        assert torch.equal(x[:, first].nan_to_num(), before.nan_to_num())
    assert all(torch.equal(*both) for both in zip(alone, beside, strict=True))
    backend.clear(second)
    assert run_chunk(backend, second, tokens, ()) == []  # less runs where no stream is wanted
    assert torch.equal(text_of(backend, second), state)
    for slot in (first, second):
        backend.release(slot)


def test_rows_behind_a_chunk_touch_nothing(pair: Pair) -> None:
    """A chunk takes more rows than it has tokens: its bits are the same whatever lies in them."""
    backend, found = pair.gpu, []
    slot = backend.acquire()
    for poison in (float("nan"), 0.0):
        backend.clear(slot)
        backend._arena.view(torch.float32)[:] = poison
        streams = [*run_chunk(backend, slot, PROMPT[:66], LAYERS), *run_chunk(backend, slot, PROMPT[66:84], LAYERS)]
        history = backend.store.pools.x[:, slot, backend.store.rows[slot].history].cpu()
        found.append([*streams, text_of(backend, slot).clone(), history])
    assert all(torch.isfinite(x).all() for x in found[0])
    for again in found[1:]:
        assert all(torch.equal(*both) for both in zip(found[0], again, strict=True))
    backend.release(slot)


def test_chunks_that_go_together_have_the_bits_of_chunks_alone(pair: Pair) -> None:
    """Of two sessions, one behind other text and asked for its streams, one new and not; then the other way round."""
    backend, found = pair.gpu, []
    assert backend.goes_together([64, 64])
    assert not backend.goes_together([65, 64])
    chunks = {0: (PROMPT[10:40], LAYERS), 1: (PROMPT[:64], ())}
    for together in ((0, 1), (1, 0), (0,), (1,)):
        slots = {which: backend.acquire() for which in together}
        if 0 in slots:
            run_chain(backend, slots[0], PROMPT[:10])
        parts = [Chunk(slots[which], *chunks[which]) for which in together]
        streams = dict(zip(together, backend.run_chunks(parts).wait(), strict=True))
        for which in together:
            rows = backend.store.rows[slots[which]]
            raw = backend.store.pools.x[:, slots[which], rows.history].cpu()
            found.append((which, [*streams[which], text_of(backend, slots[which]).clone(), raw]))
            backend.release(slots[which])
    for which in chunks:
        first, *others = [parts for of, parts in found if of == which]
        assert len(first) == len(chunks[which][1]) + 2
        assert len(others) == 2
        for again in others:
            assert all(torch.equal(*both) for both in zip(first, again, strict=True)), which


def test_chunks_that_could_not_be_started_leave_their_texts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, rows = pair.gpu, pair.gpu.store.rows
    slots = [backend.acquire(), backend.acquire()]
    for slot in slots:
        run_chunk(backend, slot, PROMPT[:5])
    before = [(rows[slot].history, rows[slot].pending) for slot in slots]

    def fails(texts: Sequence[ChunkText], rows: int) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(backend._prefill._inputs, "put", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            backend.run_chunks([Chunk(slot, PROMPT[5:10], ()) for slot in slots])
    assert [(rows[slot].history, rows[slot].pending) for slot in slots] == before
    for slot in slots:
        backend.release(slot)


def test_few_sizes_serve_all_chunks() -> None:
    assert chunk_sizes(2048) == [192, 256, 384, 512, 768, 1024, 1536, 2048]
    assert chunk_sizes(16) == [64]
    assert chunk_sizes(192) == [192]
    assert chunk_sizes(1000)[-2:] == [768, 1024]


def test_chunks_that_chains_do_not_replace_are_made_ready(pair: Pair) -> None:
    assert pair.gpu.chain_rows == 16
    assert pair.gpu.usual_chunks() == [128]
    for tokens in pair.gpu.usual_chunks():
        pair.gpu.prepare_chunk(tokens)


def test_grouped_values_and_no_gate(tiny_target_of: Callable[..., Path]) -> None:
    pair = Pair(tiny_target_of(v_heads=4, tied=False, gate=False, neg_eigval=True))
    pair.chunk(0, PROMPT[:21])
    pair.check_state(0)


def test_an_engine_gives_the_text_and_features_of_the_cpu(tiny_target: Path, pair: Pair) -> None:
    config = VerifierConfig(target=tiny_target, numerics="exact", max_sessions=2, max_rows=8, prefill_chunk=CHUNK)
    found = []
    for engine in (Engine(config), Engine(config, pair.gpu)):
        keep = FeatureWindow((0, FINAL_NORM), 256)
        session = engine.open(b"", PROMPT, [], SamplingParams(temperature=0.0), Stopping(max_tokens=3), keep)
        while not engine.prefill(session, 64):
            pass
        while session.finish is None:
            (result,) = engine.run_pass([PassItem(session, Topology.root_only())])
            assert result.error is None
        found.append((session.tokens, engine.features(session, 0, 256).values))
        engine.release(session)
    assert found[0][0] == found[1][0]
    close(found[1][1], found[0][1])


def test_more_tokens_than_there_is_room_for_are_refused(pair: Pair) -> None:
    for tokens in ([1] * (CHUNK + 1), []):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens in a chunk: give 1 to {CHUNK}"):
            run_chunk(pair.gpu, 0, tokens, ())


def test_buffers_take_what_is_counted(pair: Pair) -> None:
    config, dtype = pair.gpu.weights.config, pair.gpu.weights.dtype
    counted = prefill_bytes(config, 100, dtype)
    assert counted == prefill_bytes(config, 128, dtype) < prefill_bytes(config, 129, dtype)
    memory = torch.empty(counted, dtype=torch.uint8, device=pair.gpu.weights.device)
    Prefill(pair.gpu.weights, pair.gpu.store, 100, memory, None)
    with pytest.raises(ValueError, match="do not fit"):
        Prefill(pair.gpu.weights, pair.gpu.store, 129, memory, None)
