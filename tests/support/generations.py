"""Runs an engine the way a scheduler does, with drafts of any worth, and keeps every figure it committed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from specla.kernels.sampling import RowLogprobs
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.features import FeatureWindow
from specla.verifier_service.passes import PassItem, PassResult
from specla.verifier_service.session import Session

Draft = tuple[list[int], list[int]]  # parents as on the wire, tokens
Drafter = Callable[[Session], Draft]

GREEDY = SamplingParams(temperature=0.0)


def no_draft(session: Session) -> Draft:
    return [], []


@dataclass
class Text:
    """What a session committed: its tokens and, for each, the log-probabilities of the whole vocabulary."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    passes: int = 0
    accepted: int = 0

    def add(self, result: PassResult) -> None:
        assert result.error is None, result.error
        assert result.top is not None
        self.tokens += result.tokens
        self.logprobs += result.top
        self.passes += 1
        self.accepted += sum(result.drafted)


@cache
def engine_of(target: Path, numerics: str = "exact", **settings: object) -> Engine:
    """An engine with one thread; the same for the same settings, so leave no session open."""
    config = VerifierConfig(target=target, numerics=numerics, threads=1, **settings)  # type: ignore[arg-type]
    return Engine(config)


def open_ready(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int = 24,
    sampling: SamplingParams = GREEDY,
    resumed: Sequence[int] = (),
    keep: FeatureWindow | None = None,
    ignore_eos: bool = True,
    stop_ids: Sequence[int] = (),
    budget: int = 1 << 20,
) -> Session:
    eos = frozenset(engine.target.config.eos_token_ids)
    stopping = Stopping(max_tokens=max_tokens, stop_ids=frozenset(stop_ids), ignore_eos=ignore_eos, eos_ids=eos)
    session = engine.open(b"s" * 16, prompt, resumed, sampling, stopping, keep)
    while not engine.prefill(session, budget):
        pass
    return session


def step(engine: Engine, sessions: Sequence[Session], texts: Sequence[Text], drafters: Sequence[Drafter]) -> None:
    """One pass over these sessions, every log-probability reported."""
    vocab = engine.target.config.vocab_size
    items = []
    for session, drafter in zip(sessions, drafters, strict=True):
        parents, tokens = drafter(session)
        items.append(PassItem(session, Topology.from_wire(parents, tokens), tokens, top_k=vocab))
    for result, text in zip(engine.run_pass(items), texts, strict=True):
        text.add(result)


def generate(engine: Engine, prompt: Sequence[int], drafter: Drafter = no_draft, **how: object) -> Text:
    """A whole text by one session alone."""
    session, text = open_ready(engine, prompt, **how), Text()  # type: ignore[arg-type]
    while session.finish is None:
        step(engine, [session], [text], [drafter])
    assert session.tokens[session.resumed_len :] == text.tokens
    engine.release(session)
    return text


def drafter_from(answer: Sequence[int], vocab: int, seed: int, hit_rate: float, most: int = 8) -> Drafter:
    """Random trees along which the right tokens of a known answer stand with probability hit_rate."""
    rng = random.Random(seed)

    def draft(session: Session) -> Draft:
        parents: list[int] = []
        tokens: list[int] = []
        right = {-1}  # nodes whose path is the answer so far
        depth = {-1: 0}
        for node in range(rng.randint(0, most)):
            parent = rng.choice([-1, *range(node)])
            place = session.completion_len + depth[parent]
            siblings = [t for p, t in zip(parents, tokens, strict=True) if p == parent]
            wanted = answer[place] if parent in right and place < len(answer) else None
            if wanted is not None and wanted not in siblings and rng.random() < hit_rate:
                token = wanted
                right.add(node)
            else:
                token = rng.choice([t for t in range(vocab) if t != wanted and t not in siblings])
            parents.append(parent)
            tokens.append(token)
            depth[node] = depth[parent] + 1
        return parents, tokens

    return draft


def random_prompt(vocab: int, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]
