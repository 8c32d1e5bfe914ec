"""An engine on the GPU's passes through random operations: every session's text is that of the CPU's engine, which
decodes it alone and plain, with its log-probabilities and features."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from generations import drafter_from
from tree_cases import chain

from specla.kernels.gpu.adjusting import Changes
from specla.kernels.gpu.selector import Selector
from specla.kernels.sampling import RowLogprobs
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Finish, Stopping
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FINAL_NORM, FeatureWindow
from specla.verifier_service.gpu import backend as gpu_backend
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.buckets import MOST_PENDING
from specla.verifier_service.gpu.pass_run import PassRun
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.passes import PassItem
from specla.verifier_service.session import Session
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import load_checkpoint

pytestmark = pytest.mark.any_device

VOCAB, SLOTS, MAX_ROWS, CHUNK, MOST_ENTRIES = 257, 2, 12, 32, 48


class Job(NamedTuple):
    """A generation: prompt and parameters, and how its drafts are made."""

    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    hit_rate: float
    """Of its trees; 1 for chains as long as they may be, of what follows."""
    keep: FeatureWindow | None = None

    def open(self, engine: Engine, resumed: Sequence[int] = ()) -> Session:
        return engine.open(b"", self.prompt, resumed, self.sampling, Stopping(max_tokens=self.max_tokens), self.keep)


class Text(NamedTuple):
    """What a generation gave."""

    tokens: list[int]
    logprobs: list[RowLogprobs]
    features: torch.Tensor
    finish: Finish | None


JOBS = [
    Job(
        [(7 * i * i + 3 * i + 5) % VOCAB for i in range(45)],  # a chunk, then a chain
        SamplingParams(temperature=0.0, repetition_penalty=1.4, banned_ids=frozenset(range(9, 60))),
        12,
        0.7,
        FeatureWindow((0, FINAL_NORM), 128),
    ),
    Job([3, 1, 4], SamplingParams(temperature=0.8, seed=7, top_p=0.95, frequency_penalty=0.7, top_logprobs=2), 10, 0.8),
    Job([11] * 19, SamplingParams(temperature=0.0), 24, 1.0),
    Job([250], SamplingParams(seed=(1 << 63) + 5, min_p=0.01, logit_bias={5: 2.0, 9: -3.0}, top_logprobs=0), 8, 0.0),
]


@pytest.fixture
def engines(tiny_target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Engine]:
    """On the CPU's passes and on the GPU's, in whose launches few logits may change."""
    monkeypatch.setattr(gpu_backend, "MOST_ENTRIES", MOST_ENTRIES)
    folder = tiny_target_of(layers=1, hidden=32, heads=1, vocab=VOCAB)
    config = VerifierConfig(target=folder, max_sessions=SLOTS, max_rows=MAX_ROWS, prefill_chunk=CHUNK, threads=1)
    model = GatedDeltaNetConfig.from_folder(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = GpuWeights.load(model, load_checkpoint(folder, model).tensors, torch.float32, device)
    selector = Selector.for_device("NVIDIA H200")
    backend = GpuBackend(weights, "exact", selector, slots=SLOTS, max_rows=MAX_ROWS, prefill_chunk=CHUNK)
    return Engine(config), Engine(config, backend)


def alone(engine: Engine, job: Job) -> Text:
    session, logprobs = job.open(engine), []
    while not engine.prefill(session, 64):
        pass
    while session.finish is None:
        (result,) = engine.run_pass([PassItem(session, Topology.root_only())])
        logprobs += result.logprobs or ()
    return finished(engine, session, logprobs)


def finished(engine: Engine, session: Session, logprobs: list[RowLogprobs]) -> Text:
    features = engine.features(session, 0, 128).values
    engine.release(session)
    return Text(session.tokens[session.prompt_len :], logprobs, features, session.finish)


def item_of(rng: random.Random, session: Session, job: Job, text: Sequence[int]) -> PassItem:
    following = text[session.completion_len :][: MAX_ROWS - 1]
    if rng.random() < 0.2:
        return PassItem(session, Topology.root_only())
    if job.hit_rate == 1:
        return PassItem(session, chain(len(following) + 1), following)
    parents, tokens = drafter_from(text, VOCAB, rng.randrange(1 << 30), job.hit_rate, most=MAX_ROWS - 1)(session)
    return PassItem(session, Topology.from_wire(parents, tokens), tokens)


def check(found: Text, want: Text) -> None:
    """`found` may lack the log-probabilities of resumed tokens."""
    assert (found.tokens, found.finish) == (want.tokens, want.finish)
    expected = want.logprobs[len(want.logprobs) - len(found.logprobs) :]
    for one, other in zip(found.logprobs, expected, strict=True):
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
        values = [(x.chosen, *(value for _, value in x.top)) for x in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)
    torch.testing.assert_close(found.features, want.features, rtol=2e-3, atol=2e-3)


def counted_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many logits changed in each pass that changed them in rounds, in a list that grows."""
    counts, in_rounds = list[int](), PassRun._launch_in_rounds

    def counting(run: PassRun, changes: Changes) -> None:
        counts.append(len(changes.shared))
        in_rounds(run, changes)

    monkeypatch.setattr(PassRun, "_launch_in_rounds", counting)
    return counts


def test_no_order_of_operations_changes_a_text(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    (cpu, gpu), rng = engines, random.Random(0)
    texts = [alone(cpu, job) for job in JOBS]
    rounds = counted_rounds(monkeypatch)
    waiting, living, longest, given_up = list(range(len(JOBS))), dict[int, tuple[Session, list[RowLogprobs]]](), 0, 0
    while waiting or living:
        if waiting and gpu.free_slots and rng.random() < 0.7:
            index = waiting.pop(0)
            done = rng.choice([0, 0, len(texts[index].tokens) // 2])
            living[index] = JOBS[index].open(gpu, texts[index].tokens[:done]), []
        elif len(living) == SLOTS and not given_up:  # its slot goes to another, and its text begins anew
            given_up += 1
            index = rng.choice(list(living))
            gpu.release(living.pop(index)[0])
            waiting.append(index)
        for session, _ in living.values():
            if not session.ready and rng.random() < 0.7:
                gpu.prefill(session, rng.choice([1, 64]))
        chosen = [index for index, (session, _) in living.items() if session.ready and rng.random() < 0.8]
        rng.shuffle(chosen)
        items = [item_of(rng, living[index][0], JOBS[index], texts[index].tokens) for index in chosen]
        for index, result in zip(chosen, gpu.run_pass(items) if items else (), strict=True):
            session, logprobs = living[index]
            assert result.error is None
            logprobs += result.logprobs or ()
            longest = max(longest, sum(result.drafted))
            assert session.tokens[session.prompt_len :] == texts[index].tokens[: session.completion_len]
            if session.finish is not None:
                check(finished(gpu, *living.pop(index)), texts[index])
    assert gpu.free_slots == SLOTS
    assert longest > MOST_PENDING
    assert given_up
    assert rounds
    assert min(rounds) > MOST_ENTRIES
