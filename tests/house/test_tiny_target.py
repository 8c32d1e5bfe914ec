"""The tiny target that other tests stand on is what it says."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file
from tiny_target import END_OF_TEXT, make_tiny_target, make_tiny_tokenizer
from tokenizers import Tokenizer


def test_files_and_shapes(tiny_target: Path) -> None:
    config = json.loads((tiny_target / "config.json").read_text())
    weights = load_file(str(tiny_target / "model.safetensors"))
    assert config["model_type"] == "gated_deltanet"
    assert weights["model.embeddings.weight"].shape == (320, 64)
    assert weights["model.layers.1.attn.q_conv1d.weight"].shape == (32, 1, 4)
    assert weights["model.layers.0.attn.A_log"].shape == (2,)
    assert "lm_head.weight" not in weights
    assert Tokenizer.from_file(str(tiny_target / "tokenizer.json")).get_vocab_size() == 320


def test_other_shapes(tiny_target_of: Callable[..., Path]) -> None:
    path = tiny_target_of(v_heads=4, expand_v=2.0, gate=False, tied=False)
    weights = load_file(str(path / "model.safetensors"))
    assert path == tiny_target_of(v_heads=4, expand_v=2.0, gate=False, tied=False)
    assert weights["model.layers.0.attn.v_proj.weight"].shape == (4 * 32, 64)
    assert weights["model.layers.0.attn.o_norm.weight"].shape == (32,)
    assert "model.layers.0.attn.g_proj.weight" not in weights
    assert weights["lm_head.weight"].shape == (320, 64)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        make_tiny_target(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    weights = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_tokenizer_holds_any_text() -> None:
    tokenizer = make_tiny_tokenizer()
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    for text in ("plain words", "tabs\tand\r\n\x00 controls", "日本語 😀 é", " leading and trailing "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
