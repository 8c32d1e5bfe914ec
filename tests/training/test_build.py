"""`specla data build` and the model card, end to end on small packages that lie at hand."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from specla.training.data.build import BuildConfig, build
from specla.training.data.contamination import GRAM, words
from specla.training.data.documents import read_documents
from specla.training.data.shards import read_shard
from specla.training.data.sources import SourceError, load_sources
from specla.training.target.card import write_card

SECRET = "The third clerk of the harbour office counts eleven green barrels before he signs the captain's long list."
SOURCES = """
[code]
packages = ["thing"]

[[source]]
registry = "npm"
package = "tales"
domain = "prose"
licence = "public domain"
reader = "text"
include = ["*.txt"]
"""


def story(i: int) -> str:
    names = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus")
    a, b = names[i % 7], names[(i * 3 + 1) % 7]
    places = (f"gate{'abcdefghij'[i % 10]}", f"mill{'klmnopqrst'[i // 10 % 10]}", f"lake{'uvwxyzabcd'[i * 7 % 10]}")
    told = "went to the {0} of the town, and it was the {0} that they had known as children there."
    lines = [f"{a} and {b} {told.format(place)}" for place in places]
    return "\n\n".join([f"Story {'abcdefghijklmnop'[i % 16]} of {a}, as it was told to {b} in the winter.", *lines]) * 2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    for registry in ("pypi", "npm"):
        (out / "raw" / registry).mkdir(parents=True)
    with zipfile.ZipFile(out / "raw" / "pypi" / "thing-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing-2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nLicense: MIT\n")
        for i in range(60):
            name = f"{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10]}"
            body = "\n".join(f"    {name}_{w} = value - len('{name} and {w}')" for w in ("one", "two", "six", "ten"))
            text = f'def {name}(value):\n    """Take {name} from a value and give back what is left."""\n{body}\n'
            text += f"    return {name}_one + {name}_two + {name}_six + {name}_ten\n"
            text += f'\nNOTE = "{SECRET}"\n' if i == 5 else ""
            wheel.writestr(f"thing/{name}.py", text + f"\n\n# {name}" * 30)
    with tarfile.open(out / "raw" / "npm" / "tales-1.5.tgz", "w:gz") as tar:
        for i in range(60):
            content = (story(i) + (f"\n\n{SECRET}" if i == 7 else "")).encode()
            info = tarfile.TarInfo(f"package/{i}.txt")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (out / "sources.toml").write_text(SOURCES)
    config = BuildConfig(vocab_size=420, sums=500, puzzles_each=0)
    build(load_sources(out / "sources.toml"), out, config, lambda line: None, evaluation=[SECRET])
    return out


def test_the_manifest_accounts_for_every_token(built: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    by_name = {source["package"]: source for source in manifest["sources"]}
    assert (by_name["thing"]["licence"], by_name["thing"]["version"]) == ("MIT", "2.0")
    assert (by_name["tales"]["licence"], by_name["tales"]["version"]) == ("public domain", "1.5")
    assert by_name["thing"]["contaminated"] == by_name["tales"]["contaminated"] == 1
    for domain, package in (("code", "thing"), ("prose", "tales"), ("maths", "worked-sums")):
        assert by_name[package]["tokens"] == sum(manifest["tokens"][domain].values()) > 1000
    assert manifest["distinct_templated_training_tokens"] == manifest["tokens"]["maths"]["train"]


def test_no_training_text_shares_thirteen_words_with_the_evaluation_text(built: Path) -> None:
    listed = words(SECRET)
    grams = {" ".join(listed[i : i + GRAM]) for i in range(len(listed) - GRAM + 1)}
    documents = list(read_documents(built / "documents.jsonl"))
    assert {d.domain for d in documents} == {"prose", "code", "maths"}
    assert len(documents) > 500
    for document in documents:
        assert not any(gram in " ".join(words(document.text)) for gram in grams)
    tokenizer = Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json"))
    stream = tokenizer.decode(np.asarray(read_shard(built / "tokens", "prose", "train")).tolist())
    assert "eleven green barrels" not in stream


def test_held_out_documents_are_those_outside_the_training_split(built: Path) -> None:
    everything = [d for d in read_documents(built / "documents.jsonl") if d.split != "train"]
    assert list(read_documents(built / "held_out.jsonl")) == everything


def test_a_package_without_a_permissive_licence_stops_the_build_before_the_long_work(
    built: Path, tmp_path: Path
) -> None:
    (tmp_path / "raw" / "pypi").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "raw" / "pypi" / "thing-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing-2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nLicense: GPLv3\n")
    (tmp_path / "s.toml").write_text('[code]\npackages = ["thing"]\n')
    with pytest.raises(SourceError, match="thing: licence"):
        build(load_sources(tmp_path / "s.toml"), tmp_path, BuildConfig(), lambda line: None, evaluation=[])
    assert not (tmp_path / "documents.jsonl").exists()


def test_the_card_says_what_the_records_say(tmp_path: Path) -> None:
    domains = ("prose", "docs", "code", "maths")
    shape = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16}
    config = shape | {"intermediate_size": 48, "conv_size": 4, "model_type": "gated_deltanet"}
    settings = {"learning_rate": 0.002, "warmup": 0.02, "decay": 0.4, "batch": 4, "length": 64, "seed": 7}
    source = {
        "registry": "npm",
        "package": "tales",
        "domain": "prose",
        "version": "1.5",
        "licence": "PD",
        "tokens": 5_000_000,
    }
    records = {
        "config": config,
        "manifest": {
            "sources": [source | {"contaminated": 3, "tokens": 5_000_000}],
            "tokens": {domain: {"train": 5_000_000} for domain in domains} | {"docs": {"train": 6_000_000}},
        },
        "training": {
            "config": settings | {"mix": dict.fromkeys(domains, 0.25)},
            "device": "CPU",
            "torch": "2.13",
            "tokens_seen": 80_000_000,
            "distinct_tokens": dict.fromkeys(domains, 5_000_000),
            "history": [{"tokens": 1, "loss": 1.0, "seconds": 90.0}],
        },
        "eval": {
            **{
                key: dict.fromkeys(domains, value)
                for key, value in (("bits_per_byte", 1.25), ("five_gram_bits_per_byte", 1.5), ("xz_bits_per_byte", 2.0))
            },
            "test_tokens": dict.fromkeys(domains, 1234),
            "functions": {"count": 200, "parses_at_temperature_0.0": 0.785, "parses_at_temperature_0.7": 0.6},
            "worked_sums": {"count": 100, "right_shape": 0.99, "right_answer": 0.5},
            "samples": [{"prompt": "a", "temperature": 0.0, "text": " b"}],
        },
    }
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    card = write_card(tmp_path).read_text()
    for part in (
        "80.0 M tokens in 1.5 minutes on one CPU",
        "| prose | 1.250 | 1.500 | 2.000 | 1,234 |",
        "Distinct tokens of natural text and code: 15.0 M.",
        "| 5.0 M | 20.0 M | 4.0 |",
        "(3 documents)",
        "78.5% at temperature 0",
        "a b",
        "| prose | npm: tales 1.5 | PD | 5.0 M |",
        "This training read 5.0 M of the 6.0 M tokens of docs that the commands above build",
    ):
        assert part in card
