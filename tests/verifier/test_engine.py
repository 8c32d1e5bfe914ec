"""The engine's sessions: text against a full recompute, ends of text, failures, features, limits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generations import (
    GREEDY,
    Text,
    drafter_from,
    engine_of,
    generate,
    no_draft,
    open_ready,
    random_prompt,
    step,
)
from reference_model import ReferenceModel

from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.rpc.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModelError,
)
from specla.verifier_service.acceptance import Finish, FinishReason, Stopping
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FeatureWindow
from specla.verifier_service.passes import PassItem, PassResult
from specla.verifier_service.session import Session

VOCAB = 320


@pytest.fixture
def engine(tiny_target: Path, device: str) -> Engine:
    return engine_of(tiny_target, device=device)


def right_chain(answer: list[int], session: Session) -> tuple[list[int], list[int]]:
    tokens = answer[session.completion_len :][:6]
    return list(range(-1, len(tokens) - 1)), tokens


def one(engine: Engine, session: Session, parents: list[int], tokens: list[int], top_k: int = 0) -> PassResult:
    (result,) = engine.run_pass([PassItem(session, Topology.from_wire(parents, tokens), tokens, top_k)])
    return result


def spoil_state(engine: Engine, slot: int) -> None:
    """One number of the first layer's state is none any more."""
    store = engine.backend.store  # type: ignore[attr-defined]
    first = store.recurrent_state[slot, 0] if engine.config.device != "cuda" else store.states[0, slot]
    first[0, 0, 0] = float("nan")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_greedy_text_equals_a_full_recompute(tiny_target_of: Callable[..., Path], numerics: str, device: str) -> None:
    target = tiny_target_of(v_heads=4, expand_v=2.0, neg_eigval=True)
    prompt = random_prompt(VOCAB, 40, seed=1)
    text = generate(engine_of(target, numerics, device=device), prompt)
    reference = ReferenceModel(target)
    logits = reference.logits([*prompt, *text.tokens])[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == text.tokens
    logprobs = torch.log_softmax(logits, -1)
    for row, found in zip(logprobs, text.logprobs, strict=True):
        assert found.chosen == pytest.approx(float(row.max()), abs=2e-5 if device == "cpu" else 1e-4)


def test_fast_mode_gives_the_same_text_with_drafts(tiny_target_of: Callable[..., Path], device: str) -> None:
    engine = engine_of(tiny_target_of(v_heads=4), "fast", device=device)
    prompt = random_prompt(VOCAB, 30, seed=2)
    plain = generate(engine, prompt)
    drafted = generate(engine, prompt, drafter_from(plain.tokens, VOCAB, 1, 0.7))
    assert drafted.tokens == plain.tokens
    assert drafted.accepted > 4
    gaps = [abs(a.chosen - b.chosen) for a, b in zip(plain.logprobs, drafted.logprobs, strict=True)]
    assert max(gaps) < 1e-4


def test_nothing_beyond_the_end_of_the_text(engine: Engine) -> None:
    """Accepted candidates behind max_tokens, a stop id or end-of-text are neither sent nor counted."""
    prompt = random_prompt(VOCAB, 12, seed=3)
    answer = generate(engine, prompt).tokens
    stop = answer[4]
    first = answer.index(stop)
    for how, length, finish in (
        ({"max_tokens": 3}, 3, Finish(FinishReason.LENGTH)),
        ({"stop_ids": [stop]}, first + 1, Finish(FinishReason.STOP_ID, stop)),
    ):
        for drafts in (no_draft, lambda s: right_chain(answer, s)):
            session, text = open_ready(engine, prompt, **how), Text()  # type: ignore[arg-type]
            while session.finish is None:
                step(engine, [session], [text], [drafts])
            assert text.tokens == answer[:length]
            assert session.finish == finish
            assert text.accepted <= length
            engine.release(session)


def test_the_last_accepted_candidate_may_end_the_text(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 12, seed=3)
    answer = generate(engine, prompt).tokens
    session = open_ready(engine, prompt, max_tokens=2)
    result = one(engine, session, *right_chain(answer, session))
    assert result.tokens == tuple(answer[:2])
    assert result.drafted == (True, True)
    assert result.accepted_nodes == (0, 1)
    assert not session.ready
    engine.release(session)


def test_end_of_text_ids(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 12, seed=4)
    bias = SamplingParams(temperature=0.0, logit_bias={0: 100.0})
    assert generate(engine, prompt, sampling=bias, ignore_eos=False).tokens == [0]
    assert generate(engine, prompt, sampling=bias, max_tokens=3).tokens == [0, 0, 0]


def test_a_session_whose_logits_are_no_numbers_fails_alone(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 12, seed=5)
    expected = generate(engine, prompt)
    sick, well, text = open_ready(engine, prompt), open_ready(engine, prompt), Text()
    assert sick.slot is not None
    spoil_state(engine, sick.slot)
    committed = list(sick.tokens)
    results = engine.run_pass([PassItem(s, Topology.root_only(), (), VOCAB) for s in (sick, well)])
    assert isinstance(results[0].error, InternalError)
    assert "NaN" in results[0].error.message
    assert results[0].tokens == ()
    assert sick.tokens == committed
    text.add(results[1])
    engine.release(sick)
    while well.finish is None:
        step(engine, [well], [text], [no_draft])
    engine.release(well)
    assert (text.tokens, text.logprobs) == (expected.tokens, expected.logprobs)
    assert generate(engine, prompt).tokens == expected.tokens  # in the slot that held the NaN


def test_features_are_those_of_the_committed_text(engine: Engine) -> None:
    """Whatever was rejected on the way; one position a token, right layer."""
    keep = FeatureWindow(layers=(1, 0, -1), window=16)
    prompt = random_prompt(VOCAB, 30, seed=6)
    answer = generate(engine, prompt).tokens
    kept = []
    for drafter in (no_draft, drafter_from(answer, VOCAB, 1, 0.6)):
        session = open_ready(engine, prompt, keep=keep)
        assert engine.features(session, 0, 100).from_position == 29 - 16
        while session.finish is None:
            step(engine, [session], [Text()], [drafter])
        kept.append(engine.features(session, 0, 1000))
        engine.release(session)
    plain, drafted = kept
    last = len(prompt) + len(answer) - 2  # positions below committed_len - 1
    assert plain.from_position + len(plain.values) == last + 1
    assert plain.values.shape == (16, 3, 64)
    start = max(plain.from_position, drafted.from_position)
    assert drafted.from_position + len(drafted.values) == last + 1
    assert torch.equal(plain.values[start - plain.from_position :], drafted.values[start - drafted.from_position :])
    logits = ReferenceModel(engine.config.target).logits([*prompt, *answer])
    head = engine.target.weights.embeddings.cpu().double()
    assert torch.allclose(plain.values[:, 2].double() @ head.T, logits[plain.from_position : last + 1], atol=1e-4)


def test_features_of_a_long_prompt_are_those_of_its_end(tiny_target: Path, device: str) -> None:
    """Chunks that lie before the window keep nothing."""
    engine, prompt = engine_of(tiny_target, prefill_chunk=48, device=device), random_prompt(VOCAB, 200, seed=9)
    found = []
    for window in (1000, 60):
        session = open_ready(engine, prompt, resumed=[5, 6], keep=FeatureWindow(layers=(0, -1), window=window))
        found.append(engine.features(session, 0, 1000))
        engine.release(session)
    assert [len(x.values) for x in found] == [201, 60]
    assert found[1].from_position == 141
    assert torch.equal(found[0].values[141:], found[1].values)


def test_features_of_a_session_that_keeps_none(engine: Engine) -> None:
    session = open_ready(engine, [1, 2, 3])
    assert engine.features(session, 0, 2).values.shape == (0, 0, 64)
    engine.release(session)


def test_log_probabilities_on_request(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 12, seed=7)
    answer = generate(engine, prompt).tokens
    session = open_ready(engine, prompt, sampling=SamplingParams(temperature=0.0, top_logprobs=2))
    result = one(engine, session, *right_chain(answer, session), top_k=3)
    assert result.logprobs is not None
    assert result.top is not None
    assert [x.top[0][0] for x in result.logprobs] == list(result.tokens)
    assert [len(x.top) for x in result.logprobs] == [2] * 7
    assert [len(x.top) for x in result.top] == [3] * 7
    engine.release(session)
    session = open_ready(engine, prompt)
    result = one(engine, session, [], [])
    assert result.logprobs is None
    assert result.top is None
    engine.release(session)


def test_slots_run_out_and_come_back(tiny_target: Path, device: str) -> None:
    engine = engine_of(tiny_target, max_sessions=2, device=device)
    first, second = (open_ready(engine, [1, 2, 3]) for _ in range(2))
    with pytest.raises(CapacityError) as error:
        open_ready(engine, [1])
    assert error.value.retry_after_s > 0
    engine.release(first)
    engine.release(first)
    assert engine.free_slots == 1
    third = open_ready(engine, [4])
    assert third.slot != second.slot
    engine.close()
    engine.close()
    assert engine.free_slots == 2


@pytest.mark.parametrize(
    ("prompt", "resumed", "how", "field"),
    [
        ([], [], {}, "prompt_ids"),
        ([1, VOCAB], [], {}, "prompt_ids"),
        ([1, -1], [], {}, "prompt_ids"),
        ([1], [VOCAB], {}, "resumed_ids"),
        ([1], [5, 0], {"ignore_eos": False}, "resumed_ids"),
        ([1], [5, 6], {"max_tokens": 2}, "resumed_ids"),
        ([1] * 65, [], {}, "prompt_ids"),
        ([1], [], {"max_tokens": 0}, "stopping.max_tokens"),
        ([1], [], {"stop_ids": [VOCAB]}, "stopping.stop_ids"),
        ([1], [], {"sampling": SamplingParams(top_p=0.0)}, "sampling.top_p"),
        ([1], [], {"sampling": SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ([1], [], {"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "sampling.logit_bias"),
        ([1], [], {"keep": FeatureWindow((2,), 4)}, "keep.layers"),
        ([1], [], {"keep": FeatureWindow((0, 0), 4)}, "keep.layers"),
        ([1], [], {"keep": FeatureWindow((0,), -1)}, "keep.window"),
    ],
)
def test_openings_that_are_refused(
    tiny_target: Path, prompt: list[int], resumed: list[int], how: dict[str, object], field: str
) -> None:
    engine = engine_of(tiny_target, max_prompt_tokens=64)
    free = engine.free_slots
    with pytest.raises(InvalidRequestError) as error:
        open_ready(engine, prompt, resumed=resumed, **how)  # type: ignore[arg-type]
    assert error.value.field == field
    assert error.value.hint
    assert isinstance(error.value, PromptTooLongError) == (len(prompt) > 64)
    assert engine.free_slots == free


def test_a_memory_limit_cuts_the_slots(tiny_target: Path) -> None:
    unlimited = Engine(VerifierConfig(target=tiny_target, threads=1, max_sessions=50))
    one_session = unlimited.memory.session_bytes(unlimited.config.max_rows)
    limited = Engine(VerifierConfig(target=tiny_target, threads=1, max_sessions=50, memory_mib=3))
    assert unlimited.max_sessions == 50
    assert limited.max_sessions == (3 << 20) // one_session < 50
    with pytest.raises(InvalidRequestError, match="hold no session"):
        limited.memory.slots(50, max_rows=100_000, limit_mib=1)


def test_memory_that_holds_no_session_is_refused_before_the_weights_are_read(tiny_target: Path, tmp_path: Path) -> None:
    large = json.loads((tiny_target / "config.json").read_text()) | {"num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(large))
    (tmp_path / "tokenizer.json").write_bytes((tiny_target / "tokenizer.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InvalidRequestError, match="1 MiB hold no session") as refused:
        Engine(VerifierConfig(target=tmp_path, threads=1, max_rows=129, memory_mib=1))
    assert refused.value.field == "memory_mib"
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        Engine(VerifierConfig(target=tmp_path, threads=1, max_rows=129, memory_mib=100))


def test_pass_times_are_measured_beside_open_sessions(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 12, seed=8)
    expected = generate(engine, prompt)
    session, text = open_ready(engine, prompt), Text()
    step(engine, [session], [text], [no_draft])
    times = engine.measure_pass_times(rows=(1, 5, 100), repeats=1)
    assert set(times) == {1, 5}  # 100 rows are more than max_rows
    assert all(0 < seconds < 10 for seconds in times.values())
    while session.finish is None:
        step(engine, [session], [text], [no_draft])
    engine.release(session)
    assert text.logprobs == expected.logprobs


def test_a_measurement_that_fails_leaves_its_slot_free(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    free = engine.free_slots
    monkeypatch.setattr(engine.backend, "run", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.measure_pass_times(rows=(1,), repeats=1)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.greedy_choices([1, 2, 3], 1)
    assert engine.free_slots == free


def test_names_of_a_target(tiny_target: Path, tiny_target_of: Callable[..., Path], device: str) -> None:
    exact, fast = (engine_of(tiny_target, numerics, device=device).target for numerics in ("exact", "fast"))
    other = engine_of(tiny_target_of(seed=1), device=device).target
    assert len({exact.numerics_id, fast.numerics_id, other.numerics_id}) == 3
    assert exact.numerics_id.startswith(f"{device}/")
    assert "/float32/exact/" in exact.numerics_id  # the tiny target's own numbers
    assert exact.tokenizer_hash == other.tokenizer_hash
    assert len(exact.tokenizer_hash) == 64
    assert exact.model_name == tiny_target.name


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(InvalidRequestError, match="there is no folder") as refused:
        Engine(VerifierConfig(target=tmp_path / "nowhere", device=device))  # type: ignore[arg-type]
    assert refused.value.field == "target"


def test_a_prompt_of_one_token_needs_no_prefill(engine: Engine) -> None:
    stopping = Stopping(max_tokens=4, ignore_eos=True)
    session = engine.open(b"x" * 16, [7], [], GREEDY, stopping)
    assert session.ready
    assert engine.prefill(session, 1)
    engine.release(session)
    text = generate(engine, [7], max_tokens=4)
    logits = ReferenceModel(engine.config.target).logits([7, *text.tokens])[:-1]
    assert logits.argmax(-1).tolist() == text.tokens
