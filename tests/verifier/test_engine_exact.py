"""Exact mode: whatever is drafted, batched or rejected, every log-probability has the bits of plain decoding."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generations import (
    Drafter,
    Text,
    drafter_from,
    engine_of,
    generate,
    no_draft,
    open_ready,
    random_prompt,
    step,
)

from specla.kernels.sampling_params import SamplingParams
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.engine import Engine
from specla.verifier_service.session import Session

VOCAB = 320
SHAPES = {
    "plain": {},
    "grouped values": {"v_heads": 4, "expand_v": 2.0},
    "no gate, untied": {"gate": False, "tied": False},
    "negative eigenvalues, odd widths": {"hidden": 48, "neg_eigval": True, "heads": 3, "expand_v": 3.0},
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T=0.7": SamplingParams(temperature=0.7, seed=11, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.5),
    "T=1": SamplingParams(temperature=1.0, seed=(1 << 63) + 5),
}


@pytest.fixture(params=["compiled", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> dict[str, object]:
    """The CPU's two forms, and the GPU."""
    if request.param != "cuda":
        return {"cpu_kernels": request.param}
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return {"device": "cuda"}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def engine(request: pytest.FixtureRequest, where: dict[str, object], tiny_target_of: Callable[..., Path]) -> Engine:
    return engine_of(tiny_target_of(**request.param), **where)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_same_bits_through_any_drafts(engine: Engine, sampling: SamplingParams) -> None:
    prompt = random_prompt(VOCAB, 21, seed=1)
    plain = generate(engine, prompt, sampling=sampling)
    assert plain.passes == 24
    assert len(set(plain.tokens)) > 8, "a text that wanders"
    for seed, hit_rate in enumerate((0.0, 0.3, 0.8, 1.0)):
        drafted = generate(engine, prompt, drafter_from(plain.tokens, VOCAB, seed, hit_rate), sampling=sampling)
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == plain.logprobs
        assert (drafted.accepted > 0) == (hit_rate > 0)


def test_long_chains_and_full_trees(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 9, seed=2)
    plain = generate(engine, prompt, max_tokens=70)
    chain = generate(engine, prompt, lambda s: _right_chain(plain.tokens[s.completion_len :][:64]), max_tokens=70)
    assert (chain.tokens, chain.logprobs) == (plain.tokens, plain.logprobs)
    assert chain.passes == 2
    wide = generate(engine, prompt, drafter_from(plain.tokens, VOCAB, 5, 0.7, most=64), max_tokens=70)
    assert (wide.tokens, wide.logprobs) == (plain.tokens, plain.logprobs)


def _right_chain(tokens: list[int]) -> tuple[list[int], list[int]]:
    return list(range(-1, len(tokens) - 1)), tokens


def test_same_bits_in_any_company(engine: Engine) -> None:
    """Sessions of different prompts, seeds and drafts join, sit out and leave passes in any order."""
    rng = random.Random(3)
    samplings = list(SAMPLINGS.values())
    prompts = [random_prompt(VOCAB, rng.randint(1, 40), seed) for seed in range(7)]
    alone = [generate(engine, p, sampling=samplings[i % 3]) for i, p in enumerate(prompts)]
    drafters: list[Drafter] = [
        no_draft if i % 3 == 0 else drafter_from(alone[i].tokens, VOCAB, i, 0.6) for i in range(len(prompts))
    ]
    texts = [Text() for _ in prompts]
    waiting, living = list(range(len(prompts))), {}
    while waiting or living:
        if waiting and (not living or rng.random() < 0.4):
            i = waiting.pop(0)
            living[i] = open_ready(engine, prompts[i], sampling=samplings[i % 3])
        chosen = [i for i in living if rng.random() < 0.6]
        rng.shuffle(chosen)
        if chosen:
            step(engine, [living[i] for i in chosen], [texts[i] for i in chosen], [drafters[i] for i in chosen])
        for i in chosen:
            if living[i].finish is not None:
                engine.release(living.pop(i))
    for text, expected in zip(texts, alone, strict=True):
        assert text.tokens == expected.tokens
        assert text.logprobs == expected.logprobs


def test_a_plain_step_after_accepted_drafts(engine: Engine) -> None:
    """The state of the last accepted row is used, not that of the root, empty drafts included."""
    prompt = random_prompt(VOCAB, 12, seed=4)
    plain = generate(engine, prompt)

    def alternating(session: Session) -> tuple[list[int], list[int]]:
        done = session.completion_len
        turns.append(done)
        return _right_chain(plain.tokens[done : done + 3] if len(turns) % 2 else [])

    turns: list[int] = []
    text = generate(engine, prompt, alternating)
    assert (text.tokens, text.logprobs) == (plain.tokens, plain.logprobs)
    assert text.accepted >= 12


def test_a_reused_slot_is_empty(engine: Engine) -> None:
    prompt = random_prompt(VOCAB, 5, seed=6)
    first = generate(engine, prompt)
    session = open_ready(engine, random_prompt(VOCAB, 50, seed=7))
    step(engine, [session], [Text()], [drafter_from([], VOCAB, 1, 0.0)])
    slot = session.slot
    engine.release(session)  # with a path still pending
    again = open_ready(engine, prompt)
    assert again.slot == slot
    text = Text()
    while again.finish is None:
        step(engine, [again], [text], [no_draft])
    engine.release(again)
    assert (text.tokens, text.logprobs) == (first.tokens, first.logprobs)


@pytest.mark.parametrize("cut", [1, 2, 40, 80])
def test_a_resumed_text_goes_on_the_same(engine: Engine, cut: int) -> None:
    prompt, sampling = random_prompt(VOCAB, 60, seed=8), SAMPLINGS["T=0.7"]
    whole = generate(engine, prompt, sampling=sampling, max_tokens=90)
    rest = generate(engine, prompt, sampling=sampling, max_tokens=90, resumed=whole.tokens[:cut])
    assert rest.tokens == whole.tokens[cut:]
    assert rest.logprobs == whole.logprobs[cut:]


def test_prefill_does_not_depend_on_the_load(tiny_target: Path, device: str) -> None:
    engine = engine_of(tiny_target, prefill_chunk=48, device=device)
    prompt, other = random_prompt(VOCAB, 150, seed=9), random_prompt(VOCAB, 70, seed=10)
    at_once = generate(engine, prompt)
    stopping = Stopping(max_tokens=24, ignore_eos=True)
    session = engine.open(b"a" * 16, prompt, [], SamplingParams(temperature=0.0), stopping)
    neighbour = open_ready(engine, other)
    calls = 1
    while not engine.prefill(session, 1):
        calls += 1
        if neighbour.finish is None:
            step(engine, [neighbour], [Text()], [drafter_from([], VOCAB, 1, 0.0)])
    assert calls == 4 if device == "cpu" else calls > 2  # 149 tokens in chunks of 48, the last one short
    text = Text()
    while session.finish is None:
        step(engine, [session], [text], [no_draft])
    for s in (session, neighbour):
        engine.release(s)
    assert (text.tokens, text.logprobs) == (at_once.tokens, at_once.logprobs)
