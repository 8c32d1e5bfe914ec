"""The shipped checkpoint: names and shapes that fla reads, a tokenizer that fits, a card of measured figures."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

MODELS = Path(__file__).parents[2] / "models"
FLA_PARAMETERS = Path(__file__).with_name("fla_parameters.json")  # of fla 0.6's class for the shipped config.json


@pytest.fixture(scope="module")
def shapes() -> dict[str, list[int]]:
    with safe_open(MODELS / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 (no dict)
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def test_every_parameter_of_flas_class_is_there_but_the_tied_head(shapes: dict[str, list[int]]) -> None:
    wanted: dict[str, list[int]] = json.loads(FLA_PARAMETERS.read_text())
    assert wanted.pop("lm_head.weight") == wanted["model.embeddings.weight"]
    assert shapes == wanted


def test_the_size_is_as_promised(shapes: dict[str, list[int]]) -> None:
    parameters = 0
    for shape in shapes.values():
        product = 1
        for size in shape:
            product *= size
        parameters += product
    assert 25e6 < parameters < 40e6
    assert (MODELS / "model.safetensors").stat().st_size < 80e6


def test_config_tokenizer_and_generation_settings_agree() -> None:
    config = json.loads((MODELS / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(MODELS / "tokenizer.json"))
    generation = json.loads((MODELS / "generation_config.json").read_text())
    assert config["architectures"] == ["GatedDeltaNetForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>")
    text = "def f(x):\n    return x + 12345\n\nIt was 10 o'clock — déjà vu.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_card_states_the_measured_figures() -> None:
    card = (MODELS / "README.md").read_text()
    measured = json.loads((MODELS / "eval.json").read_text())
    for domain in ("prose", "docs", "code", "maths"):
        figures = [measured[key][domain] for key in ("bits_per_byte", "five_gram_bits_per_byte", "xz_bits_per_byte")]
        row = " | ".join([f"| {domain}", *(f"{figure:.3f}" for figure in figures)])
        assert row in card
    assert measured["functions"]["count"] == 200
    assert f"{100 * measured['functions']['parses_at_temperature_0.0']:.1f}%" in card


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed (it brings 5 GB of CUDA)")
@pytest.mark.slow
def test_flas_own_class_loads_it_whole() -> None:
    from fla.models.gated_deltanet import GatedDeltaNetForCausalLM

    model, report = GatedDeltaNetForCausalLM.from_pretrained(MODELS, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.model.embeddings.weight
