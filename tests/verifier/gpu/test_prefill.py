"""Prefill in chunks on the GPU's kernels: what chains give, wherever a chunk ends, slot by slot."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tree_cases import chain

from specla.kernels.gpu.selector import Selector
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FINAL_NORM, FeatureWindow
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.prefill import Prefill, prefill_bytes
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.passes import PassItem
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import load_checkpoint

CHUNK = 128
TOLERANCE = 2e-3
LAYERS = (1, 0, FINAL_NORM)
PROMPT = [(7 * i * i + 3 * i + 5) % 320 for i in range(200)]


def backend_of(folder: Path, slots: int = 2, chunk: int = CHUNK) -> GpuBackend:
    model = GatedDeltaNetConfig.from_folder(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = GpuWeights.load(model, load_checkpoint(folder, model).tensors, torch.float32, device)
    selector = Selector.for_device("NVIDIA H200")
    return GpuBackend(weights, "exact", selector, slots=slots, max_rows=8, prefill_chunk=chunk)


@pytest.fixture(scope="module")
def backend(tiny_target: Path) -> GpuBackend:
    return backend_of(tiny_target)


def chains(backend: GpuBackend, slot: int, tokens: Sequence[int]) -> list[torch.Tensor]:
    """These tokens as chains of accepted rows; the streams of LAYERS."""
    found = []
    for start in range(0, len(tokens), backend.chain_rows):
        part = tokens[start : start + backend.chain_rows]
        out = backend.run([slot], pack([chain(len(part))]), part, None, LAYERS)
        found.append([out.hidden(layer, range(len(part))) for layer in LAYERS])
        out.take(0, range(len(part)))
    return [torch.cat(streams) for streams in zip(*found, strict=True)]


def chunks(backend: GpuBackend, slot: int, tokens: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
    """These tokens in chunks of these sizes; the streams of LAYERS."""
    found, start = [], 0
    for size in sizes:
        found.append(backend.run_chunk(slot, tokens[start : start + size], LAYERS))
        start += size
    return [torch.cat(streams) for streams in zip(*found, strict=True)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    assert got.device.type == "cpu"
    assert float((got - want).abs().max() / want.abs().max()) < TOLERANCE


def text_of(backend: GpuBackend, slot: int) -> torch.Tensor:
    """The state that holds all of a slot's text."""
    backend.store.write_states([slot])
    return backend.store.states[:, slot].cpu()


@pytest.mark.parametrize("sizes", [(128, 37), (64,), (1, 2, 90), (65, 128)])
def test_chunks_then_passes_are_chains_then_passes(backend: GpuBackend, sizes: tuple[int, ...]) -> None:
    tokens, slots = PROMPT[: sum(sizes)], [backend.acquire() for _ in range(2)]
    for got, want in zip(chunks(backend, slots[0], tokens, sizes), chains(backend, slots[1], tokens), strict=True):
        assert got.shape == (len(tokens), 64)
        close(got, want)
    assert not backend.store.rows[slots[0]].pending
    for got, want in zip(*(chains(backend, slot, [11, 12, 13, 14, 15]) for slot in slots), strict=True):
        close(got, want)
    close(*(text_of(backend, slot) for slot in slots))
    for slot in slots:
        backend.release(slot)


def test_a_chunk_behind_a_chain_takes_its_factors_and_window(backend: GpuBackend) -> None:
    slots = [backend.acquire() for _ in range(2)]
    chains(backend, slots[0], PROMPT[:6])
    assert backend.store.rows[slots[0]].pending
    chunks(backend, slots[0], PROMPT[6:], [90])
    chains(backend, slots[1], PROMPT[:96])
    close(*(text_of(backend, slot) for slot in slots))
    for slot in slots:
        backend.release(slot)


def test_a_chunk_leaves_other_slots_alone_and_its_bits_know_no_slot(backend: GpuBackend) -> None:
    first, second = backend.acquire(), backend.acquire()
    alone = chunks(backend, first, PROMPT, [100, 70])
    state, pools = text_of(backend, first), [x[:, first].clone() for x in backend.store.pools]
    beside = chunks(backend, second, PROMPT, [100, 70])
    assert torch.equal(backend.store.states[:, first].cpu(), state)
    for x, before in zip(backend.store.pools, pools, strict=True):
        assert torch.equal(x[:, first].nan_to_num(), before.nan_to_num())
    assert all(torch.equal(*pair) for pair in zip(alone, beside, strict=True))
    assert torch.equal(text_of(backend, second), state)
    assert backend.run_chunk(first, PROMPT[:80], ()) == []  # where nothing is kept, less runs: the same state
    again = backend.run_chunk(second, PROMPT[:80], LAYERS)
    assert [x.shape for x in again] == [(80, 64)] * 3
    assert torch.equal(text_of(backend, first), text_of(backend, second))
    for slot in (first, second):
        backend.release(slot)


def test_grouped_values_and_no_gate(tiny_target_of: Callable[..., Path]) -> None:
    backend = backend_of(tiny_target_of(v_heads=4, tied=False, gate=False, neg_eigval=True))
    slots = [backend.acquire() for _ in range(2)]
    tokens = PROMPT[:70]
    for got, want in zip(chunks(backend, slots[0], tokens, [70]), chains(backend, slots[1], tokens), strict=True):
        close(got, want)
    close(*(text_of(backend, slot) for slot in slots))


@pytest.mark.parametrize("chunk", [CHUNK, 96])
def test_an_engine_gives_the_text_and_features_of_the_cpu(tiny_target: Path, chunk: int) -> None:
    config = VerifierConfig(target=tiny_target, numerics="exact", max_sessions=1, max_rows=8, prefill_chunk=chunk)
    found = []
    for engine in (Engine(config), Engine(config, backend_of(tiny_target, 1, chunk))):
        keep = FeatureWindow((0, FINAL_NORM), 256)
        session = engine.open(b"", PROMPT, [], SamplingParams(temperature=0.0), Stopping(max_tokens=6), keep)
        while not engine.prefill(session, 64):
            pass
        while session.finish is None:
            (result,) = engine.run_pass([PassItem(session, Topology.root_only())])
            assert result.error is None
        found.append((session.tokens, engine.features(session, 0, 256).values))
    assert found[0][0] == found[1][0]
    close(found[1][1], found[0][1])


def test_more_tokens_than_there_is_room_for_are_refused(backend: GpuBackend) -> None:
    slot = backend.acquire()
    with pytest.raises(ValueError, match="129 tokens in a chunk: give 1 to 128"):
        backend.run_chunk(slot, [1] * 129, ())
    with pytest.raises(ValueError, match="0 tokens"):
        backend.run_chunk(slot, [], ())
    backend.release(slot)


def test_buffers_take_what_is_counted(backend: GpuBackend) -> None:
    config, dtype = backend.weights.config, backend.weights.dtype
    counted = prefill_bytes(config, 100, dtype)
    assert counted == prefill_bytes(config, 128, dtype) < prefill_bytes(config, 129, dtype)
    memory = torch.empty(counted, dtype=torch.uint8, device=backend.weights.device)
    Prefill(backend.weights, backend.store, 100, memory)
    with pytest.raises(ValueError, match="do not fit"):
        Prefill(backend.weights, backend.store, 129, memory)
