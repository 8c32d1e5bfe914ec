"""The product's own files and packages, as git and pyproject.toml know them."""

import importlib.util
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def tracked_files(root: Path = ROOT) -> list[Path]:
    """Files under version control that exist, relative to `root`; all files but hidden ones where there is no git."""
    if not (root / ".git").exists():
        paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return sorted(path for path in paths if not any(part.startswith(".") for part in path.parts))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(Path(name) for name in listed.split("\0") if name and (root / name).is_file())


def package_dirs(root: Path = ROOT) -> dict[str, str]:
    """Import name -> folder, the map of pyproject.toml: {"specla.kernels": "kernels", ...}."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    return dict(setuptools["package-dir"])


def module_name(path: Path, packages: dict[str, str]) -> str | None:
    """The import name of a file: kernels/tree.py -> specla.kernels.tree; None for a file of no package."""
    for package, folder in packages.items():
        if path.suffix == ".py" and path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join([package, *(part for part in parts if part != "__init__")])
    return None


def load_tool(name: str) -> ModuleType:
    """A program of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
