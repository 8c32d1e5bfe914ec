"""An engine on the GPU's passes: the same text with and without drafts, and that of the CPU's passes."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import triton
from structlog.testing import capture_logs
from tree_cases import chain, random_tree

from specla.kernels.gpu.between_mixers import MeetingPlace
from specla.kernels.gpu.factor_pool import PoolTable
from specla.kernels.gpu.selector import Choice, LayerShape, Mode, Selector
from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.acceptance import FinishReason, Stopping
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FeatureWindow
from specla.verifier_service.gpu import backend as gpu_backend
from specla.verifier_service.gpu import buffers, forward, pass_run, store
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.buckets import PENDING
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.passes import PassItem
from specla.verifier_service.session import Session
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import load_checkpoint

pytestmark = pytest.mark.any_device

PROMPT = [5, 9, 250, 17]
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(seed=7, temperature=0.9, top_p=0.95, repetition_penalty=1.2, top_logprobs=2)


@pytest.fixture(scope="module")
def engines(tiny_target: Path) -> tuple[Engine, Engine]:
    """On the CPU's passes and on the GPU's, which run in the interpreter where there is no GPU."""
    config = VerifierConfig(target=tiny_target, numerics="exact", max_sessions=2, max_rows=8)
    return Engine(config), Engine(config, backend_of(tiny_target))


def backend_of(folder: Path) -> GpuBackend:
    model = GatedDeltaNetConfig.from_folder(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = GpuWeights.load(model, load_checkpoint(folder, model).tensors, torch.float32, device)
    return GpuBackend(weights, "exact", Selector.for_device("NVIDIA H200"), slots=2, max_rows=8)


def open_session(
    engine: Engine, sampling: SamplingParams, keep: FeatureWindow | None = None, resumed: Sequence[int] = ()
) -> Session:
    session = engine.open(b"", PROMPT, resumed, sampling, Stopping(max_tokens=6), keep)
    while not engine.prefill(session, 64):
        pass
    return session


def plain(engine: Engine, sampling: SamplingParams) -> tuple[list[int], list[object]]:
    session, logprobs = open_session(engine, sampling), []
    while session.finish is None:
        (result,) = engine.run_pass([PassItem(session, Topology.root_only())])
        assert result.error is None
        logprobs += result.logprobs or ()
    assert session.finish.reason in (FinishReason.LENGTH, FinishReason.EOS)
    engine.release(session)
    return session.tokens[len(PROMPT) :], logprobs


def drafted(engine: Engine, sampling: SamplingParams, text: Sequence[int]) -> tuple[list[int], int]:
    """With trees that hold some of what follows, and much that does not; the passes that it took."""
    rng, session, passes = random.Random(1), open_session(engine, sampling), 0
    while session.finish is None:
        tree = random_tree(rng, 6)
        done = session.completion_len
        tokens = [
            text[done + depth - 1] if done + depth <= len(text) and rng.random() < 0.7 else rng.randrange(320)
            for depth in tree.depth.tolist()[1:]
        ]
        (result,) = engine.run_pass([PassItem(session, tree, tokens)])
        assert result.error is None
        passes += 1
    engine.release(session)
    return session.tokens[len(PROMPT) :], passes


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_drafts_change_no_text_and_devices_agree(engines: tuple[Engine, Engine], sampling: SamplingParams) -> None:
    cpu, gpu = engines
    text, logprobs = plain(gpu, sampling)
    assert text == plain(cpu, sampling)[0]
    assert len(logprobs) == (len(text) if sampling.top_logprobs is not None else 0)
    again, passes = drafted(gpu, sampling, text)
    assert again == text
    assert passes < len(text)


@pytest.mark.parametrize("entries", [gpu_backend.MOST_ENTRIES, 3], ids=["at once", "in rounds"])
def test_rows_that_have_logits_in_turns(
    engines: tuple[Engine, Engine], tiny_target: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """A pass of more rows than there is room for logits: the same tokens, log-probabilities and logits."""
    monkeypatch.setattr(buffers, "MOST_SCORED", 4)
    monkeypatch.setattr(gpu_backend, "MOST_ENTRIES", entries)
    config = VerifierConfig(target=tiny_target, numerics="exact", max_sessions=2, max_rows=8)
    backend = backend_of(tiny_target)
    in_turns, found = Engine(config, backend), []
    for engine in (engines[1], in_turns):
        sessions = [open_session(engine, DRAWN), open_session(engine, replace(DRAWN, seed=8), resumed=[3, 4])]
        for trees in ([chain(8), chain(3)], [chain(2), Topology.root_only()]):
            items = [
                PassItem(session, tree, [7 * i % 320 for i in range(len(tree) - 1)])
                for session, tree in zip(sessions, trees, strict=True)
            ]
            results = engine.run_pass(items)
            assert all(result.error is None for result in results)
        found.append([(session.tokens, result.logprobs) for session, result in zip(sessions, results, strict=True)])
        for session in sessions:
            engine.release(session)
    assert max(len(run.buffers.parts) for run in backend._runs.values()) > 1
    for (tokens, logprobs), (tokens_in_turns, logprobs_in_turns) in zip(*found, strict=True):
        assert tokens == tokens_in_turns
        assert logprobs
        for one, other in zip(logprobs or (), logprobs_in_turns or (), strict=True):
            assert one.top[0][0] == other.top[0][0]
            assert one.chosen == pytest.approx(other.chosen, abs=1e-5)


def test_sessions_beside_each_other_and_features(engines: tuple[Engine, Engine]) -> None:
    """Two sessions in one pass, one of them with a history of its own; the hidden states are the CPU's."""
    keep = FeatureWindow((0, -1), 16)
    found = []
    for engine in engines:
        first, second = open_session(engine, GREEDY, keep), open_session(engine, GREEDY, resumed=[3, 4])
        for _ in range(2):
            items = [PassItem(first, Topology.from_wire([-1, 0]), [1, 2]), PassItem(second, Topology.root_only())]
            results = engine.run_pass(items)
            assert all(result.error is None for result in results)
        features = engine.features(first, 0, 64)
        found.append((first.tokens, second.tokens, features))
        for session in (first, second):
            engine.release(session)
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[1][2].values, found[0][2].values, rtol=2e-3, atol=2e-4)
    assert found[0][2].from_position == found[1][2].from_position


@torch.inference_mode()
def test_passes_that_keep_streams_are_few_and_share_what_memory_grew(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_backend, "_MOST_KEEPING", 2)
    backend = backend_of(tiny_target)
    first = backend._run_for((Topology.root_only(),), True, ())
    small = backend._arena
    assert first.buffers.activations.final.untyped_storage().data_ptr() == small.data_ptr()
    backend._arena = small[:1]  # as if any pass needed more
    runs = [backend._run_for((Topology.root_only(),), True, layers) for layers in ((0, 1), (0,), (1,), (-1, 1))]
    assert runs[2] is runs[3]  # the final norm is kept anyway
    assert [key.layers for key in backend._runs] == [(), (0,), (1,)]
    grown = backend._arena.data_ptr()
    assert [run.buffers.activations.final.data_ptr() for run in runs] == [grown] * 4
    assert backend._run_for((Topology.root_only(),), True, ()) is first
    assert backend._run_for((Topology.root_only(),), True, (0, 1)) is not runs[0]
    assert [key.layers for key in backend._runs] == [(), (1,), (0, 1)]


class ByLeaves(Selector):
    """A program a leaf, up to four."""

    def choose(self, mode: Mode, shape: LayerShape, topologies: Sequence[Topology], **_: object) -> Choice:
        return Choice("serial", min(4, max(topology.leaves for topology in topologies)))


@torch.inference_mode()
def test_what_was_made_ready_serves_trees_of_other_shapes(tiny_target: Path) -> None:
    """Nothing is compiled or captured while sessions wait, and what runs holds the tree."""
    shipped = Selector.for_device("NVIDIA H200")
    weights = backend_of(tiny_target).weights
    backend = GpuBackend(weights, "exact", ByLeaves(shipped.device, shipped.measured), slots=2, max_rows=32)
    for topologies in backend.usual_batches():
        backend.prepare(topologies)
    made = dict(backend._runs)
    assert {key.bucket.groups for key in made if key.bucket.tree_rows == 16} == {1, 4}
    for tree, others in (
        ([-1, -1, -1], []),
        ([-1, 0, 1, -1, 3], [chain(2)]),
        ([-1] * 20, []),
        ([-1, 0, 0], [chain(17)]),
    ):
        topologies = (Topology.from_wire(tree), *others)
        run = backend._run_for(topologies, True, ())
        assert run in made.values()
        bucket = run.buffers.bucket
        assert bucket.rows >= sum(map(len, topologies))
        assert bucket.tree_rows >= max(map(len, topologies))
    assert backend._runs == made
    best = backend.pass_of([Topology.from_wire([-1, -1, -1])])
    assert best.buffers.bucket.groups == 3
    assert backend._run_for((Topology.from_wire([-1, -1, -1]),), True, ()) is best, "what is made for it goes first"
    kept = backend._run_for((chain(3),), True, (0,))
    assert kept not in made.values(), "nothing that was made keeps this stream"


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_nothing_is_compiled_or_captured_once_passes_are_ready(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, numerics: Literal["exact", "fast"]
) -> None:
    """Whatever the prompt's length, the draft's, and how much of it is accepted: a compiler takes half a second."""
    rng, compiled, accepted = random.Random(7), list[str](), set[int]()
    config = VerifierConfig(target=tiny_target, device="cuda", numerics=numerics, max_sessions=2, max_rows=33)
    with closing(Engine(config)) as engine:
        engine.prepare()
        backend = engine.backend
        assert isinstance(backend, GpuBackend)
        runs = len(backend._runs)
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **found: compiled.append(found["repr"]))
        for prompt in (3, 40, 200, 500):
            ids = [rng.randrange(256) for _ in range(prompt)]
            sampling = SamplingParams(temperature=0.0, repetition_penalty=1.1) if prompt == 40 else GREEDY
            text = list[int]()
            for drafts in (False, True):
                session = engine.open(b"", ids, [], sampling, Stopping(max_tokens=160))
                while not engine.prefill(session, 64):
                    pass
                while session.finish is None:
                    draft = text[session.completion_len :][: rng.choice((1, 2, 7, 12, 16, 17, 30, 32)) * drafts]
                    if len(draft) > 2 and rng.random() < 0.3:
                        draft[rng.randrange(len(draft))] ^= 1
                    (result,) = engine.run_pass([PassItem(session, chain(len(draft) + 1), draft)])
                    accepted.add(len(result.tokens))
                if drafts and numerics == "exact":
                    assert session.tokens[prompt:] == text
                text = session.tokens[prompt:]
                engine.release(session)
        assert max(accepted) > PENDING, "there were passes behind which states must be written"
        assert not compiled
        assert len(backend._runs) == runs


@torch.inference_mode()
def test_logits_of_rows_that_are_no_whole_number_of_16_bytes(tiny_target_of: Callable[..., Path]) -> None:
    """What penalties have changed is computed again, from a row that lies anywhere."""
    backend, batch = backend_of(tiny_target_of(hidden=34)), pack([chain(3)])
    slots, found = [backend.acquire(), backend.acquire()], []
    for slot, params in zip(slots, (GREEDY, replace(GREEDY, repetition_penalty=1.5)), strict=True):
        out = backend.run(Lineup([slot], batch, [SessionSampling(params, 320, PROMPT)]), PROMPT[:3], [4])
        found.append(np.stack([out.logits(row) for row in range(3)]))
    tolerance = 0.0 if torch.cuda.is_available() else 1e-5  # the interpreter's products know how many rows they have
    np.testing.assert_allclose(found[1], found[0], rtol=0.0, atol=tolerance)


@torch.inference_mode()
def test_a_pass_that_is_refused_leaves_its_session_as_it_was(tiny_target: Path) -> None:
    backend = backend_of(tiny_target)
    slots = [backend.acquire(), backend.acquire()]
    text = [*PROMPT, *PROMPT]  # as many as may be pending: the next pass stores the state
    for slot in slots:
        backend.run(Lineup([slot], pack([chain(len(text))])), text, [0]).take(0, range(len(text)))
    sick, well = (backend.store.rows[slot] for slot in slots)
    with pytest.raises(ValueError, match="samples of 321 ids"):
        backend.run(plain_of(slots[0], 321), [7], [9])
    assert (sick.pending, sick.history) == (well.pending, well.history)
    assert len(sick.pending) == len(text)
    found = [backend.run(plain_of(slot, 320), [7], [9]).logits(0) for slot in slots]
    assert found[0].tobytes() == found[1].tobytes()
    assert sick.pending == []


@torch.inference_mode()
def test_a_pass_whose_tokens_do_not_come_is_an_error_once_the_device_was_asked(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = backend_of(tiny_target).pass_of([chain(3)]), list[str]()

    class Device:
        def __init__(self, device: torch.device) -> None:
            assert device == run.buffers.batch.device

        def synchronize(self) -> None:
            asked.append("ended")

    class Gone(Device):
        def synchronize(self) -> None:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(run, "replay", lambda: None)
    monkeypatch.setattr(pass_run, "_PATIENCE_S", 0.001)
    monkeypatch.setattr(torch.cuda, "current_stream", Device)
    run.buffers.put_tokens([1, 2, 3])
    run.launch(None)
    run.buffers.sampled[:], run.buffers.errors[:2] = 7, 0  # an error is still on its way
    for _ in range(2):
        with pytest.raises(RuntimeError, match="without giving its tokens"):
            run.wait()
    assert asked == ["ended"] * 2
    monkeypatch.setattr(torch.cuda, "current_stream", Gone)
    with pytest.raises(RuntimeError, match="is gone"):
        run.buffers.batch.put((chain(3),), np.array([0], np.int32), PoolTable(2, 16, 4), 8, 4)
    run.buffers.errors[2] = 0
    run.wait()
    tokens, errors = run.buffers.results()
    assert (tokens.tolist(), errors.tolist()) == ([7] * 3, [0] * 3)


@torch.inference_mode()
def test_one_row_in_separate_launches_is_said_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Path
) -> None:
    """Of a model that does not take one launch between mixers, where its device would."""
    place = MeetingPlace(torch.device("cpu"))
    monkeypatch.setattr(store.MeetingPlace, "of", lambda device: place)
    monkeypatch.setattr(forward, "why_apart", lambda weights, parts: f"{parts} parts are not taken")
    with capture_logs() as logs:
        backend = backend_of(tiny_target)
        slot = backend.acquire()
        for position in range(2):
            backend.run(plain_of(slot, backend.weights.config.vocab_size), [7], [position]).take(0, [0])
    assert logs == [
        {"event": "one_row_in_separate_launches", "reason": "(1, 1) parts are not taken", "log_level": "info"}
    ]


def test_one_row_in_one_launch_needs_no_word(monkeypatch: pytest.MonkeyPatch, tiny_target: Path) -> None:
    place = MeetingPlace(torch.device("cpu"))
    monkeypatch.setattr(store.MeetingPlace, "of", lambda device: place)
    monkeypatch.setattr(forward, "why_apart", lambda weights, parts: None)
    with capture_logs() as logs:
        backend_of(tiny_target)
    assert logs == []


def test_where_nothing_meets_is_said(monkeypatch: pytest.MonkeyPatch, tiny_target: Path) -> None:
    monkeypatch.setattr(store.MeetingPlace, "of", lambda device: None)
    with capture_logs() as logs:
        backend_of(tiny_target)
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("one_row_in_separate_launches", "not a Hopper GPU, or not its default stream")
    ]


def test_nothing_holds_a_backend_that_is_done(tiny_target: Path) -> None:
    backend = backend_of(tiny_target)
    backend.run(Lineup([backend.acquire()], pack([chain(3)]), layers=(0,)), [1, 2, 3], [0]).take(0, range(3))
    held = [weakref.ref(thing) for thing in (backend, backend.store, *backend._runs.values())]
    del backend
    gc.collect()
    assert [thing() for thing in held] == [None] * 3


def plain_of(slot: int, vocab_size: int) -> Lineup:
    """Plain decoding of one session."""
    return Lineup([slot], pack([Topology.root_only()]), [SessionSampling(GREEDY, vocab_size)])
