"""Writes the list of modules into docs/architecture.md, one line each: the first line of its docstring.

python tools/module_map.py            rewrite the marked block
python tools/module_map.py --check    write nothing; exit 1 if the block is not what the modules say
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- modules: begin -->", "<!-- modules: end -->"
ORDER = ("client", "verifier_service", "kernels", "drafter_service", "rpc", "training", "benchmarks", "models")


def first_line(path: Path) -> str:
    """The first paragraph of a module's docstring, as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def block(root: Path) -> str:
    """What stands between the marks: a heading a folder, a line a module."""
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    names = {folder for name, folder in folders.items() if name != "specla.v1"}
    lines = [BEGIN]
    for folder in sorted(names, key=ORDER.index):
        modules = sorted((root / folder).rglob("*.py"))
        lines += ["", f"**{folder}/** {first_line(root / folder / '__init__.py')}", ""]
        for path in modules:
            if path != root / folder / "__init__.py":
                shown = path.parent.relative_to(root) if path.name == "__init__.py" else path.relative_to(root)
                lines.append(f"- `{shown}` {first_line(path)}")
    return "\n".join([*lines, "", END])


def with_map(page: str, modules: str) -> str:
    """The page with the marked block replaced; ValueError if it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no block between {BEGIN} and {END}")
    return before + modules + after


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    page = PAGE.read_text()
    current = with_map(page, block(ROOT))
    if not check:
        PAGE.write_text(current)
    elif current != page:
        print("docs/architecture.md does not list the modules as they are: run `make module-map`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
