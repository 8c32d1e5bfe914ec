"""The client part, the coordinator and the training-free drafters run where torch is not installed."""

import subprocess
import sys

import pytest
from product_tree import ROOT, module_name, package_dirs, tracked_files

_BLOCKED = ("torch", "triton", "safetensors", "transformers", "matplotlib")
# Generation in one process brings the engine into it; everything else of the client speaks to a coordinator.
_IN_PROCESS = {"specla.client.in_process", "specla.client.local", "specla.client.all_in_one"}
_PROGRAM = f"""
import sys
for name in {_BLOCKED!r}:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def run_without_torch(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def modules_of(*folders: str) -> list[str]:
    packages = package_dirs()
    names = (module_name(path, packages) for path in tracked_files() if path.parts[0] in folders)
    return sorted(name for name in names if name is not None and name not in _IN_PROCESS)


def test_the_client_part_and_the_drafters_import_without_torch() -> None:
    modules = modules_of("client", "drafter_service", "rpc", "protos")
    done = run_without_torch(*modules, "specla.kernels.topology")
    assert len(modules) > 10
    assert done.returncode == 0, done.stderr


def test_what_needs_torch_is_caught() -> None:
    done = run_without_torch("specla.kernels.chunked")
    assert done.returncode == 1
    assert "torch" in done.stderr


def test_local_says_what_it_needs() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom specla.client import Local"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: Local needs torch, which the extra [verifier] brings: pip install 'specla[verifier]'"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["serve", "--help"], ["version"]])
def test_the_command_line_starts_without_torch(arguments: list[str]) -> None:
    program = f"import sys\nfor name in {_BLOCKED!r}: sys.modules[name] = None\nsys.argv = ['specla', *sys.argv[1:]]\n"
    program += "from specla.client.cli.main import run\nrun()"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout
