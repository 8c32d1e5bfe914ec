"""Lays the folders out under their import names, as links: build/types/specla/kernels -> kernels/.

mypy does not follow setuptools' editable finder; it finds the packages here (pyproject: mypy_path).
Run by `make types`; harmless twice.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "build" / "types"


def main() -> None:
    """Make the links of pyproject's package-dir map, and drop those that left it."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders: dict[Path, Path] = {
        LINKS.joinpath(*name.split(".")): ROOT / folder for name, folder in setuptools["package-dir"].items()
    }
    (LINKS / "specla").mkdir(parents=True, exist_ok=True)
    for link in (LINKS / "specla").iterdir():
        if link not in folders or link.resolve() != folders[link]:
            link.unlink()
    for link, folder in folders.items():
        if not link.is_symlink():
            link.symlink_to(folder)


if __name__ == "__main__":
    main()
