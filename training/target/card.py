"""`specla train card`: the model card, written from the records of data, training and evaluation."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from specla.training.data.sources import DOMAINS

Json = dict[str, Any]

ROLES = {
    "prose": "books, speeches, the Bible, essays, dictionaries, guides for users",
    "docs": "technical documentation",
    "code": "Python sources",
    "maths": "templated problems with worked answers",
}


def write_card(folder: Path) -> Path:
    """Write `folder/README.md` from manifest.json, training.json, eval.json and config.json beside it.

    Raises:
        FileNotFoundError: one of the four is missing.
    """
    manifest, training, measured, config = (
        json.loads((folder / name).read_text())
        for name in ("manifest.json", "training.json", "eval.json", "config.json")
    )
    parts = [
        _head(config, training),
        _data(manifest, training),
        _quality(measured),
        _samples(measured),
        _limits(measured),
        _sources(manifest),
    ]
    path = folder / "README.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _millions(count: float) -> str:
    return f"{count / 1e6:.1f} M"


def _head(config: Json, training: Json) -> str:
    H, D, L, inner = (config[k] for k in ("num_heads", "hidden_size", "num_hidden_layers", "intermediate_size"))
    wide = H * config["head_dim"]
    block = 3 * (D * wide + wide * config["conv_size"]) + 2 * D * wide + 2 * D * H + 2 * H + config["head_dim"]
    parameters = config["vocab_size"] * D + L * (block + 3 * D * inner + 2 * D) + D
    seconds = max(entry.get("seconds", 0.0) for entry in training["history"])
    settings = training["config"]
    return f"""# SpecLA target, {parameters / 1e6:.1f} M parameters

A small Gated DeltaNet language model: the target that SpecLA ships, so that a machine without a GPU generates real
text. It is a demonstration of speculative decoding on recurrent state, not an assistant.

- **Shape**: {L} layers, hidden size {D}, {H} heads of {config["head_dim"]}, MLP {inner}, byte-level BPE of
  {config["vocab_size"]}, head tied to the embedding, weights in bfloat16.
- **Format**: that of flash-linear-attention (`GatedDeltaNetForCausalLM`, model type `{config["model_type"]}`).
- **Training**: {_millions(training["tokens_seen"])} tokens in {seconds / 60:.1f} minutes on one {training["device"]}
  (torch {training["torch"]}; bfloat16 products, AdamW, rate {settings["learning_rate"]:g}, warm-up
  {settings["warmup"]:.0%}, straight decay over the last {settings["decay"]:.0%}, batches of {settings["batch"]} rows of
  {settings["length"]} tokens, documents packed with the state cleared between them, seed {settings["seed"]}).
- **Licence** of the weights: Apache-2.0. What they were trained on is listed below.
- **Again**: `specla data build`, `specla train target --config training/target/full.toml`, `specla train eval`,
  `specla train card`.

![Loss curve](loss.svg)"""


def _data(manifest: Json, training: Json) -> str:
    distinct, settings = training["distinct_tokens"], training["config"]
    rows = []
    for domain in DOMAINS:
        seen = settings["mix"][domain] * training["tokens_seen"]
        shares = [_millions(distinct[domain]), _millions(seen), f"{seen / distinct[domain]:.1f}"]
        rows.append(f"| {domain} | {ROLES[domain]} | {' | '.join(shares)} |")
    natural = sum(distinct[domain] for domain in DOMAINS if domain != "maths")
    dropped = sum(source["contaminated"] for source in manifest["sources"])
    table = "\n".join(rows)
    return f"""## Data

| domain | what | distinct tokens | tokens seen | times read |
|---|---|---|---|---|
{table}

Distinct tokens of natural text and code: {_millions(natural)}. Distinct templated tokens, counted apart:
{_millions(distinct["maths"])}; the templates are this project's own and reasoning-gym's, none derives from GSM8K.
{_unread(manifest, training)}
Cleaned, deduplicated by line and paragraph, split by the hash of each document (one in 200 for validation, one in 200
for test). HumanEval, GSM8K's test problems (a published sample of 100) and reasoning-gym's gsm_symbolic are for
evaluation only: a document that shares 13 words in a row with them was left out ({dropped} documents)."""


def _unread(manifest: Json, training: Json) -> str:
    """What of the corpus the training did not read, in words; nothing if it read all."""
    built = {domain: manifest["tokens"][domain]["train"] for domain in DOMAINS}
    parts = [
        f"{_millions(training['distinct_tokens'][domain])} of the {_millions(built[domain])} tokens of {domain}"
        for domain in DOMAINS
        if training["distinct_tokens"][domain] < built[domain]
    ]
    if not parts:
        return ""
    return f"\nThis training read {' and '.join(parts)} that the commands above build; a new one reads all of them.\n"


def _quality(measured: Json) -> str:
    keys = ("bits_per_byte", "five_gram_bits_per_byte", "xz_bits_per_byte")
    rows = "\n".join(
        f"| {domain} | " + " | ".join(f"{measured[key][domain]:.3f}" for key in keys) + f" | {tokens:,} |"
        for domain, tokens in measured["test_tokens"].items()
    )
    functions, sums = measured["functions"], measured["worked_sums"]
    return f"""## Measured on held-out documents

Bits a byte, lower is better. The 5-gram model is interpolated Kneser-Ney over the same tokens, trained on the same
domain's training stream; xz compresses the test text alone.

| domain | this model | 5-gram | xz -9e | test tokens |
|---|---|---|---|---|
{rows}

- **Python**: of {functions["count"]} held-out functions, given head and docstring, the completed body parses in
  {100 * functions["parses_at_temperature_0.0"]:.1f}% at temperature 0 and
  {100 * functions["parses_at_temperature_0.7"]:.1f}% at 0.7 (256 tokens at most).
- **Worked sums**: of {sums["count"]} held-out problems of the trained templates, {sums["right_shape"]:.0%} end in
  "The answer is ...", {sums["right_answer"]:.0%} with the right answer."""


def _samples(measured: Json) -> str:
    blocks = [
        f"Temperature {sample['temperature']:g}, prompt `{json.dumps(sample['prompt'], ensure_ascii=False)[1:-1]}`:\n\n"
        f"````text\n{sample['prompt']}{sample['text']}\n````"
        for sample in measured["samples"]
    ]
    return "## Samples\n\nAs they came, cut at 120 tokens.\n\n" + "\n\n".join(blocks)


def _limits(measured: Json) -> str:
    return """## What it is bad at

It knows next to nothing, and what it states is often false. It follows no instructions. Its prose drifts into the
manner of its sources (nineteenth-century novels, scripture, manuals) and loses its thread after some sentences; at
temperature 0 it soon repeats itself. Its Python has the right form more often than the right meaning. It works sums of
the kinds that it was trained on and fails at others. English and Python only."""


def _sources(manifest: Json) -> str:
    rows, packages = [], defaultdict(list)
    for source in sorted(manifest["sources"], key=lambda s: (DOMAINS.index(s["domain"]), -s["tokens"])):
        if source["domain"] == "code":
            packages[source["licence"]].append(f"{source['package']} {source['version']}")
        else:
            where = f"{source['registry']}: {source['package']} {source['version']}"
            rows.append(f"| {source['domain']} | {where} | {source['licence']} | {_millions(source['tokens'])} |")
    listed = "\n".join(f"- {licence}: {', '.join(names)}" for licence, names in sorted(packages.items()))
    table = "\n".join(rows)
    return f"""## Sources and their licences

| domain | package | licence | tokens |
|---|---|---|---|
{table}

Python sources, from packages whose own metadata states a permissive licence:

{listed}"""
