"""What lies in the tree: small files, short modules, nothing of the machine it was written on."""

import re
from pathlib import Path

import pytest
from product_tree import ROOT, module_name, package_dirs, tracked_files

MIB = 2**20
# Corpus text: what it says is not ours.
_QUOTED = ("models/", "benchmarks/prompts/")
# Absolute paths of some machine, and the hosts of package registries. Put together here so that this file passes.
_FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<![\w.~$}-])/(?:root|home|Users|mnt)/",
            r"\bpypi\." + r"org|pythonhosted\." + r"org|registry\.npmjs\." + r"org|(?:deb|security)\.debian\." + "org",
        ]
    )
)


def text_of(path: Path) -> str | None:
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def forbidden_in(text: str) -> list[str]:
    """'line: text' of each line that names a machine's path or a registry's host."""
    return [f"{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if _FORBIDDEN.search(line)]


def test_no_large_file_outside_models() -> None:
    large = [path for path in tracked_files() if (ROOT / path).stat().st_size > 2 * MIB and path.parts[0] != "models"]
    assert large == []


def test_nothing_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked_files():
        text = None if str(path).startswith(_QUOTED) and path.suffix != ".md" else text_of(path)
        if text is not None and path != Path("tests/house/test_tree.py"):
            found += [f"{path}:{line}" for line in forbidden_in(text)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see /mnt/data/x", True),
        ('open("/root/.cache")', True),
        ("cd /home/somebody", True),
        ("https://" + "pypi." + "org/simple", True),
        ("deploy/home/x and net/mnt/y", False),
        ("${HOME}/x", False),
    ],
)
def test_forbidden_words_are_found(line: str, found: bool) -> None:
    assert bool(forbidden_in(line)) is found


def test_modules_are_short_and_introduce_themselves() -> None:
    packages = package_dirs()
    long, silent = [], []
    for path in tracked_files():
        module = module_name(path, packages)
        if module is None or module.startswith("specla.v1"):
            continue
        text = (ROOT / path).read_text()
        limit = 500 if module.startswith("specla.kernels") else 350
        if len(text.splitlines()) > limit:
            long.append(f"{path}: {len(text.splitlines())} lines, {limit} allowed")
        if not text.lstrip().startswith(('"""', 'r"""')):
            silent.append(str(path))
    assert long == []
    assert silent == []


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony_line,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", makefile, re.M)
    phony = set(phony_line.replace("\\\n", " ").split())
    described = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M))
    assert phony == described
    assert {"demo", "test", "lint", "types", "protos", "protos-check", "buf-lint", "wheel-check"} <= phony
