"""`specla data build`: from package names to token streams and a manifest that says where every token comes from."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from specla.training.data.contamination import Contamination, evaluation_texts
from specla.training.data.documents import SPLITS, Corpus, SourceReport, write_documents
from specla.training.data.packages import fetch, permissive_licence
from specla.training.data.shards import read_shard, write_shards
from specla.training.data.sources import DOMAINS, Source
from specla.training.data.tokenizer import save_tokenizer, train_tokenizer
from specla.training.data.worked_sums import PUZZLES, puzzles, worked_sums

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How large the corpus and the vocabulary are.

    sums: problems of this project's own templates. puzzles_each: problems a reasoning-gym generator.
    """

    vocab_size: int = 8192
    sums: int = 120_000
    puzzles_each: int = 3_000
    seed: int = 20_26


def build(
    sources: list[Source], out: Path, config: BuildConfig, say: Say, evaluation: Iterable[str] | None = None
) -> Path:
    """Fetch, clean, deduplicate, decontaminate, split, tokenise; returns the manifest's path.

    Args:
        evaluation: texts that training must not hold; those of `evaluation_texts` unless given.

    `out` then holds raw/ (packages), documents.jsonl, held_out.jsonl (validation and test), tokenizer/,
    tokens/ and manifest.json.
    """
    raw = out / "raw"
    corpus = Corpus(Contamination(evaluation_texts(raw) if evaluation is None else evaluation))
    say(f"evaluation texts that training must not hold: {len(corpus.contamination)}")
    for source in sources:  # what cannot be had or used is found out before the long work
        archive = fetch(source, raw)
        if not source.licence:
            permissive_licence(source, archive)
    for source in sources:
        report = corpus.add_package(source, raw)
        say(f"{report.package} {report.version}: {report.kept} documents, {report.characters / 1e6:.2f} M characters")
    own = worked_sums(config.sums, config.seed)
    corpus.add_texts(own, domain="maths", source="worked-sums", licence="Apache-2.0", version=f"seed {config.seed}")
    if config.puzzles_each:
        corpus.add_texts(
            puzzles(config.puzzles_each, config.seed),
            domain="maths",
            source="reasoning-gym",
            licence="Apache-2.0",
            version=f"{len(PUZZLES)} generators, seed {config.seed}",
        )
    write_documents(corpus.documents, out / "documents.jsonl")
    write_documents((d for d in corpus.documents if d.split != "train"), out / "held_out.jsonl")
    say(f"{len(corpus.documents)} documents; training the tokenizer")
    tokenizer = train_tokenizer(corpus.documents, vocab_size=config.vocab_size, seed=config.seed)
    save_tokenizer(tokenizer, out / "tokenizer")
    counts = write_shards(corpus.documents, tokenizer, out / "tokens", seed=config.seed)
    return _write_manifest(out, config, corpus.reports, counts)


def _write_manifest(out: Path, config: BuildConfig, reports: list[SourceReport], counts: dict[str, int]) -> Path:
    tokens = {domain: {split: _tokens(out / "tokens", domain, split) for split in SPLITS} for domain in DOMAINS}
    natural = sum(tokens[domain]["train"] for domain in DOMAINS if domain != "maths")
    manifest = {
        "config": asdict(config),
        "tokens": tokens,
        "distinct_natural_training_tokens": natural,
        "distinct_templated_training_tokens": tokens["maths"]["train"],
        "sources": [asdict(report) | {"tokens": counts.get(report.package, 0)} for report in reports],
    }
    path = out / "manifest.json"
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return path


def _tokens(folder: Path, domain: str, split: str) -> int:
    try:
        return len(read_shard(folder, domain, split))
    except FileNotFoundError:
        return 0
