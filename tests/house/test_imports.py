"""The arrows between the parts: who may import whom, read from the source of every file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from product_tree import ROOT, module_name, package_dirs, tracked_files

# Everything may import its own part; beyond that, only these. The longest matching prefix decides.
_SHARED = {"specla.v1", "specla.rpc"}
_SERVICES = {"specla.verifier_service", "specla.drafter_service"}
ARROWS: dict[str, set[str]] = {
    "specla.v1": set(),
    "specla.models": set(),
    "specla.kernels": set(),
    "specla.rpc": {"specla.v1"},
    "specla.verifier_service": _SHARED | {"specla.kernels"},
    "specla.drafter_service": _SHARED | {"specla.kernels"},
    "specla.client": _SHARED,
    # Generation in one process: the engine and how its parts are joined, the SDK's face of it, a server over it.
    "specla.client.in_process": _SHARED | _SERVICES,
    "specla.client.local": _SHARED | _SERVICES,
    "specla.client.all_in_one": _SHARED | _SERVICES,
    "specla.client.cli": _SHARED | _SERVICES,
    "specla.training": _SHARED | _SERVICES | {"specla.kernels"},
    "specla.benchmarks": _SHARED | _SERVICES | {"specla.kernels", "specla.client", "specla.training", "specla.models"},
}
# Engines know nothing of gRPC: in the services only the server does, in rpc/ these do not, in kernels/ none does.
_GRPC_FREE = {
    "specla.kernels",
    "specla.rpc.errors",
    "specla.rpc.faults",
    "specla.rpc.links",
    "specla.rpc.settings",
    "specla.rpc.status",
    "specla.rpc.waker",
} | _SERVICES
_GRPC_USERS = {"specla.verifier_service.server", "specla.drafter_service.server"}


def under(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import: at the top, inside functions, relative, for types only, or by a literal name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                base = name or ""
                if level:
                    parts = module.split(".") if is_package else module.split(".")[:-1]
                    parts = parts[: len(parts) - level + 1]
                    base = ".".join([*parts, *([name] if name else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name


def violations(root: Path, files: list[Path]) -> list[str]:
    """Every import against the arrows, as 'file:line: who may not import what'."""
    found = []
    packages = package_dirs(root)
    for path in files:
        module = module_name(path, packages)
        if module is None:
            continue
        part = max((name for name in ARROWS if under(module, {name})), key=len, default=None)
        if part is None:
            found.append(f"{path}: {module} belongs to no part that has arrows")
            continue
        own = ".".join(part.split(".")[:2])
        for line, target in imports((root / path).read_text(), module, is_package=path.name == "__init__.py"):
            if target.startswith("specla.") and not under(target, ARROWS[part] | {own}):
                found.append(f"{path}:{line}: {module} may not import {target}")
            no_grpc = under(module, _GRPC_FREE) and module not in _GRPC_USERS
            if no_grpc and target.split(".")[0] in {"grpc", "grpc_health", "grpc_reflection", "grpc_status"}:
                found.append(f"{path}:{line}: {module} may not know of gRPC ({target})")
    return found


def test_the_root_is_not_on_the_path() -> None:
    """Otherwise `kernels`, `client` and the like would be packages of their own, and hide others of that name."""
    assert ROOT not in {Path(place or ".").resolve() for place in sys.path}


def test_arrows_hold() -> None:
    files = tracked_files()
    assert sum(module_name(path, package_dirs()) is not None for path in files) > 30
    assert violations(ROOT, files) == []


@pytest.mark.parametrize(
    ("path", "line", "names"),
    [
        ("kernels/planted.py", "import specla.verifier_service.engine", "specla.verifier_service.engine"),
        ("kernels/planted.py", "from specla.rpc import errors", "specla.rpc.errors"),
        ("rpc/planted.py", "def f():\n    from specla import client", "specla.client"),
        ("client/coordinator/planted.py", "from specla.verifier_service import engine", "specla.verifier_service"),
        ("client/planted.py", "from .. import drafter_service", "specla.drafter_service"),
        ("drafter_service/planted.py", "from specla.verifier_service.config import X", "specla.verifier_service"),
        ("verifier_service/planted.py", "import importlib\nimportlib.import_module('specla.client')", "specla.client"),
        ("verifier_service/engine.py", "import grpc.aio", "gRPC"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, path: str, line: str, names: str) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    found = violations(tmp_path, [Path(path)])
    assert len(found) == 1
    assert names in found[0]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("client/local.py", "def f():\n    from specla.verifier_service.engine import Engine"),
        ("client/cli/serve.py", "def f():\n    from specla.drafter_service import server"),
        ("verifier_service/server.py", "import grpc.aio\nfrom specla.kernels import topology\nfrom . import engine"),
        ("benchmarks/planted.py", "from specla.client import Local"),
    ],
)
def test_allowed_imports_pass(tmp_path: Path, path: str, line: str) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert violations(tmp_path, [Path(path)]) == []


def test_the_engines_run_without_grpc() -> None:
    """Not by their own imports alone: nothing that they bring along imports it either."""
    program = "import importlib, sys\nfor name in ('grpc', 'grpc_health', 'grpc_reflection', 'grpc_status'):\n"
    program += "    sys.modules[name] = None\nfor module in sys.argv[1:]: importlib.import_module(module)"
    engines = ["specla.verifier_service.scheduler", "specla.verifier_service.engine", "specla.drafter_service.local"]
    done = subprocess.run([sys.executable, "-c", program, *engines], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([sys.executable, "-c", program, "specla.rpc.channel"], capture_output=True).returncode == 1
