"""What the corpus is made of: a list of packages, their licences and how each is read."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGED = Path(__file__).with_name("sources.toml")
DOMAINS = ("prose", "docs", "code", "maths")


class SourceError(ValueError):
    """A list of sources that cannot be used, or a package whose licence does not allow its use."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One package.

    registry: "pypi", "npm" or "debian". domain: one of DOMAINS. licence: as stated by the list; empty for code, which
    states it in its own metadata. reader: a name in `readers.READERS`. include, exclude: shell patterns over member
    paths. cap: millions of characters kept at most.
    """

    registry: str
    package: str
    domain: str
    licence: str = ""
    reader: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    cap: float = 24.0


def load_sources(path: Path = PACKAGED) -> list[Source]:
    """Read a TOML list of sources: `[code] packages = [...]` and `[[source]]` tables.

    Raises:
        SourceError: an unknown or missing key, or a domain that does not exist.
    """
    table = tomllib.loads(path.read_text())
    if extra := set(table) - {"code", "source"}:
        raise SourceError(f"{path.name}: unknown tables {sorted(extra)}; allowed are code and source")
    sources = [_source(entry, path) for entry in table.get("source", [])]
    code = table.get("code", {})
    if extra := set(code) - {"packages", "cap"}:
        raise SourceError(f"{path.name}: unknown keys {sorted(extra)} in [code]; allowed are packages and cap")
    for package in code.get("packages", []):
        entry = {"registry": "pypi", "package": package, "domain": "code", "reader": "python", "include": ["*.py"]}
        sources.append(_source(entry | {"cap": code.get("cap", Source.cap)}, path))
    return sources


def _source(entry: Mapping[str, object], path: Path) -> Source:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    try:
        source = Source(**values)  # type: ignore[arg-type]
    except TypeError as error:
        raise SourceError(f"{path.name}: source {entry.get('package', '?')}: {error}") from error
    if source.domain not in DOMAINS:
        raise SourceError(f"{path.name}: source {source.package}: domain {source.domain!r} is none of {DOMAINS}")
    if source.domain != "code" and not source.licence:
        raise SourceError(f"{path.name}: source {source.package}: states no licence")
    return source
