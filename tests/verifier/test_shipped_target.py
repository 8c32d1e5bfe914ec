"""The shipped target keeps exact mode's promise at its real size, and agrees with float64."""

import pytest
import torch
from generations import GREEDY, drafter_from, engine_of, generate, open_ready
from reference_model import ReferenceModel
from tokenizers import Tokenizer

from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.verifier_service.config import SHIPPED_TARGET
from specla.verifier_service.cpu_backend import CpuBackend
from specla.verifier_service.passes import PassItem

pytestmark = pytest.mark.skipif(
    not (SHIPPED_TARGET / "model.safetensors").is_file(), reason="this tree holds no shipped target"
)

TEXTS = (
    "The old house stood at the end of the road, and nobody in the village could say who had built it.",
    "def total(values):\n    result = 0\n    for value in values:\n        result +=",
)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=3)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("text", TEXTS, ids=["prose", "code"])
def test_same_bits_through_any_drafts(text: str, sampling: SamplingParams, device: str) -> None:
    engine = engine_of(SHIPPED_TARGET, device=device)
    prompt = Tokenizer.from_file(str(SHIPPED_TARGET / "tokenizer.json")).encode(text).ids
    vocab = engine.target.config.vocab_size
    plain = generate(engine, prompt, max_tokens=20, sampling=sampling)
    for seed, hit_rate in ((1, 0.0), (2, 0.7)):
        drafter = drafter_from(plain.tokens, vocab, seed, hit_rate, most=12)
        drafted = generate(engine, prompt, drafter, max_tokens=20, sampling=sampling)
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == plain.logprobs


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_logits_against_float64(numerics: str, device: str) -> None:
    engine = engine_of(SHIPPED_TARGET, numerics, device=device)
    prompt = Tokenizer.from_file(str(SHIPPED_TARGET / "tokenizer.json")).encode(" ".join(TEXTS * 2)).ids
    assert len(prompt) > 2 * CpuBackend.chain_rows, "long enough for the chunked form"
    candidates, parents = prompt[:6], [-1, -1, 0, 1, 2, 2]
    vocab = engine.target.config.vocab_size
    session = open_ready(engine, prompt)
    item = PassItem(session, Topology.from_wire(parents, candidates), candidates, top_k=vocab)
    (result,) = engine.run_pass([item])
    engine.release(session)
    assert result.top is not None
    found = torch.empty(vocab, dtype=torch.float64)
    for token, logprob in result.top[0].top:
        found[token] = logprob
    wanted = torch.log_softmax(ReferenceModel(SHIPPED_TARGET).logits(prompt)[-1], -1)
    tolerance = 1e-5 if device == "cpu" else 1e-2  # a GPU runs in the checkpoint's bfloat16
    assert (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt() < tolerance
