"""Evaluation of a target: the 5-gram yardstick, bits a byte, generation, and when a body counts as parsed."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specla.training.target.config import TargetShape
from specla.training.target.decode import advance, generate
from specla.training.target.evaluate import (
    bits_per_byte,
    body_parses,
    merge_results,
    model_nats,
    token_bytes,
)
from specla.training.target.model import TargetModel
from specla.training.target.ngram import DISCOUNT, NGram

SHAPE = TargetShape(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=16, intermediate_size=48)


def slow_probability(train: list[int], context: tuple[int, ...], token: int, order: int, vocab: int) -> float:
    """Interpolated Kneser-Ney written out with dictionaries, from the definition."""

    def counts(n: int) -> Counter[tuple[int, ...]]:
        if n == order:
            return Counter(tuple(train[i : i + n]) for i in range(len(train) - n + 1))
        longer = {tuple(train[i : i + n + 1]) for i in range(len(train) - n)}
        return Counter(gram[1:] for gram in longer)

    probability = 1 / vocab
    for n in range(1, order + 1):
        table = counts(n)
        history = context[len(context) - n + 1 :] if n > 1 else ()
        following = {gram: c for gram, c in table.items() if gram[:-1] == history}
        total = sum(following.values())
        if total:
            own = max(table.get((*history, token), 0) - DISCOUNT, 0)
            probability = own / total + DISCOUNT * len(following) / total * probability
    return probability


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_n_gram_model_agrees_with_its_definition(order: int) -> None:
    rng = np.random.default_rng(order)
    train = (rng.integers(0, 3, 120) + 3 * (np.arange(120) % 2)).astype(np.uint16)
    test = rng.integers(0, 7, 30).astype(np.uint16)
    got = NGram(train, 8, order).nats(test)
    for i in range(order - 1, 30):
        context = tuple(test[i - order + 1 : i].tolist())
        want = slow_probability(train.tolist(), context, int(test[i]), order, 8)
        assert got[i - order + 1] == pytest.approx(-math.log(want), rel=1e-9)


def test_n_gram_probabilities_sum_to_one() -> None:
    train = np.random.default_rng(0).integers(0, 5, 300).astype(np.uint16)
    model = NGram(train, 6, 3)
    rows = np.stack([np.array([1, 2, t], np.uint16) for t in range(6)])
    assert sum(math.exp(-model.nats(row)[0]) for row in rows) == pytest.approx(1.0)


def test_bits_a_byte_count_every_token_once_and_the_end_for_nothing() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}, "ab": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sizes = token_bytes(tokenizer)
    ids = tokenizer.encode("abé").ids
    assert sizes[ids].sum() == len("abé".encode())
    assert sizes[0] == 0
    tokens = np.array([1, *ids, 0], np.uint16)
    assert bits_per_byte(np.full(len(ids) + 1, math.log(2)), tokens, sizes) == pytest.approx((len(ids) + 1) / 4)


@pytest.fixture
def model() -> TargetModel:
    torch.manual_seed(0)
    model = TargetModel(SHAPE)
    with torch.no_grad():
        model.model.embeddings.weight.mul_(20)
    return model


def test_model_nats_cover_the_stream_and_match_one_window(model: TargetModel) -> None:
    tokens = np.random.default_rng(1).integers(1, 40, 150).astype(np.uint16)
    nats = model_nats(model, tokens, length=32, batch=2)
    assert len(nats) == 149
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens[32:64].astype(np.int64))[None])
    want = torch.nn.functional.cross_entropy(
        logits[0], torch.from_numpy(tokens[33:65].astype(np.int64)), reduction="none"
    )
    np.testing.assert_allclose(nats[32:64], want.numpy(), rtol=2e-4, atol=1e-5)


def test_decoding_token_by_token_agrees_with_whole_rows(model: TargetModel) -> None:
    ids = torch.randint(1, 40, (3, 75), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = model.model(ids, None)
        features, states = advance(model, ids[:, :70], None)
        rows = [features]
        for t in range(70, 75):
            features, states = advance(model, ids[:, t : t + 1], states)
            rows.append(features)
        again, _ = advance(model, ids[:, 2:], advance(model, ids[:, :2], None)[1])
    torch.testing.assert_close(torch.cat(rows, 1), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, want[:, 2:], rtol=1e-4, atol=1e-4)


def test_generation_does_not_depend_on_its_neighbours_and_stops_at_the_end(model: TargetModel) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [3]]
    together = generate(model, prompts, new=12)
    alone = [generate(model, [prompt], new=12)[0] for prompt in prompts]
    assert together == alone
    assert all(0 not in ids for ids in together)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # every logit is equal, so the argmax is the end
    assert generate(model, prompts, new=5) == [[], [], []]


HEAD = 'def f(x):\n    """Do."""\n'


@pytest.mark.parametrize(
    ("continuation", "parses"),
    [
        ("    return x\n\n\ndef g():\n", True),
        ("    if x:\n        return 1\n    return (x\n", False),
        ("    y = [\n        1,\n    ]\n    return y\nclass", True),
        ("    return x\n    y = (1,", True),  # cut off by the limit: the last line does not count
        ("", False),
        ("\n\ndef g():\n", False),
        ("    return x ++\n\nprint()", False),
    ],
)
def test_when_a_body_parses(continuation: str, parses: bool) -> None:
    assert body_parses(HEAD, continuation) is parses


def test_results_are_added_to_what_a_file_holds(tmp_path: Path) -> None:
    merge_results(tmp_path / "e.json", {"a": 1, "b": 1})
    merge_results(tmp_path / "e.json", {"b": 2})
    assert json.loads((tmp_path / "e.json").read_text()) == {"a": 1, "b": 2}
