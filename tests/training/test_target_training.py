"""Training the target: batches, resuming, saving, and what the packed rows see."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from specla.training.data.shards import shard_path
from specla.training.data.tokenizer import save_tokenizer
from specla.training.target.batches import Batches
from specla.training.target.checkpoint import ResumeError, load_model
from specla.training.target.config import ConfigError, TargetShape, TrainConfig, load_config
from specla.training.target.model import TargetModel, boundaries
from specla.training.target.trainer import Trainer

VOCAB = 48
SHAPE = TargetShape(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=16, intermediate_size=48
)
CONFIG = TrainConfig(
    shape=SHAPE,
    tokens=24 * 2 * 32,
    batch=2,
    length=32,
    mix={"prose": 0.5, "code": 0.5},
    learning_rate=1e-2,
    validate_every=10,
    compile=False,
)
PACKAGED = Path(__file__).parents[2] / "training" / "target"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "tokens").mkdir()
    for domain in ("prose", "code"):
        for split, size in (("train", 700), ("validation", 200)):
            steps = rng.integers(1, 4, size)
            ids = (np.cumsum(steps) % (VOCAB - 1) + 1).astype("<u2")
            ids[::40] = 0
            shard_path(tmp_path / "tokens", domain, split).write_bytes(ids.tobytes())
    save_tokenizer(Tokenizer(models.BPE()), tmp_path / "tokenizer")
    return tmp_path


Make = Callable[..., Trainer]


@pytest.fixture
def make(data: Path) -> Make:
    return lambda name, steps=24: Trainer(
        dataclasses.replace(CONFIG, tokens=steps * 2 * 32), data, data / name, torch.device("cpu")
    )


def test_a_run_learns_and_leaves_a_loadable_model_and_a_curve(make: Make, data: Path) -> None:
    trainer = make("run")
    assert trainer.run()
    losses = [entry["loss"] for entry in trainer.history if "loss" in entry]
    validation = [entry["validation_prose"] for entry in trainer.history if "validation_prose" in entry]
    assert len(losses) == 1
    assert validation[-1] < validation[0] < np.log(VOCAB)
    assert (data / "run" / "loss.svg").read_text().count("<path") > 5
    record = json.loads((data / "run" / "training.json").read_text())
    assert (record["tokens_seen"], record["device"]) == (24 * 2 * 32, "CPU")
    assert record["distinct_tokens"] == {"code": 700, "prose": 700}
    loaded = load_model(data / "run" / "model")
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor.bfloat16().float(), rtol=0, atol=0)
    config = json.loads((data / "run" / "model" / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["tie_word_embeddings"]) == ("gated_deltanet", 32, True)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(make: Make) -> None:
    whole = make("whole", steps=4)
    whole.run()
    for _ in range(4):
        piece = make("pieces", steps=4)
        if piece.run(seconds=0.0):
            break
    assert piece.step == whole.step == 4
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(piece.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_checkpoint_of_other_settings_is_refused(make: Make, data: Path) -> None:
    make("run").run(seconds=0.0)
    other = dataclasses.replace(CONFIG, learning_rate=5e-3)
    with pytest.raises(ResumeError, match="learning_rate"):
        Trainer(other, data, data / "run", torch.device("cpu"))


def test_batches_read_each_stream_once_before_any_of_it_again(data: Path) -> None:
    batches = Batches(
        data / "tokens",
        {"prose": 0.25, "code": 0.75},
        batch=4,
        length=16,
        steps=200,
        seed=1,
        device=torch.device("cpu"),
    )
    starts = batches.starts.tolist()
    code = [s for s in starts if s < 700]  # "code" comes first in the alphabet
    rows = (700 - 1) // 16
    assert 0.7 < len(code) / len(starts) < 0.8
    for epoch in range(len(code) // rows):
        assert sorted(code[epoch * rows : (epoch + 1) * rows]) == [i * 16 for i in range(rows)]
    inputs, targets = batches(3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_packed_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = TargetModel(SHAPE)
    ids = torch.randint(1, VOCAB, (1, 90))
    ids[0, 29] = 0
    packed = model(ids, boundaries(ids, 0, SHAPE.conv_size))
    alone = model(ids[:, 30:])
    torch.testing.assert_close(packed[:, 30:], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(ids)[:, 30:], alone, atol=1e-3)


def test_gradients_are_finite_across_document_starts(make: Make) -> None:
    trainer = make("run")
    inputs, targets = trainer.batches(0)
    inputs[:, 5] = 0
    trainer.loss(inputs, targets).backward()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    config = dataclasses.replace(CONFIG, tokens=1000 * 64, warmup=0.1, decay=0.4)
    rates = [config.rate(step) / config.learning_rate for step in range(1001)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[100:600] == [1.0] * 500
    assert rates[800] == pytest.approx(0.5)
    assert rates[1000] == 0.0


@pytest.mark.parametrize("name", ["full", "tiny"])
def test_packaged_configurations_load(name: str) -> None:
    config = load_config(PACKAGED / f"{name}.toml")
    assert config.steps > 100
    assert set(config.mix) == {"prose", "docs", "code", "maths"}


def test_configurations_with_mistakes_are_refused(tmp_path: Path) -> None:
    text = (PACKAGED / "tiny.toml").read_text()
    for old, new, message in (
        ("batch = 4", "batch = 4\nbatches = 4", "batches"),
        ("prose = 0.4", "prose = 0.3", "add up"),
        ("[train]", "[training]", "tables"),
        ("tokens = 200_000", "tokens = 20", "less than one step"),
    ):
        path = tmp_path / "bad.toml"
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            load_config(path)
