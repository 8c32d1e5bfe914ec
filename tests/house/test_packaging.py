"""A wheel holds the same modules and data as the editable install does."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from product_tree import ROOT, module_name, package_dirs, tracked_files

_NOT_SHIPPED = {"tests", "tools"}
_DATA = {".proto", ".pyi", ".toml", ".json", ".jsonl", ".safetensors"}


def copy_of_the_tree(to: Path) -> Path:
    """The tracked files but tests; weights as empty stand-ins, whose names are all that counts here."""
    for path in tracked_files():
        if path.parts[0] in _NOT_SHIPPED:
            continue
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            (to / path).touch()
        else:
            shutil.copyfile(ROOT / path, to / path)
    return to


def build_wheel(tree: Path) -> set[str]:
    """Names of the files of the wheel that `tree` gives, without its dist-info."""
    program = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    with zipfile.ZipFile(tree / "dist" / done.stdout.splitlines()[-1]) as wheel:
        return {name for name in wheel.namelist() if name.startswith("specla/")}


def expected_files(tree: Path, files: list[Path]) -> set[str]:
    """The wheel's names for every module, and every file of data, that lies in a mapped folder."""
    packages = package_dirs(tree)
    expected = set()
    for package, folder in packages.items():
        for path in files:
            if path.is_relative_to(folder) and (path.suffix == ".py" or path.suffix in _DATA):
                expected.add("/".join([*package.split("."), *path.relative_to(folder).parts]))
    return expected


def differences(tree: Path, files: list[Path]) -> tuple[list[str], list[str]]:
    """(in the tree and not in the wheel, in the wheel and not in the tree)."""
    wheel, expected = build_wheel(tree), expected_files(tree, files)
    data = {name for name in wheel if Path(name).suffix in _DATA | {".py"}}
    return sorted(expected - wheel), sorted(data - expected)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_tree(tmp_path_factory.mktemp("tree"))


def shipped(files: list[Path]) -> list[Path]:
    return [path for path in files if path.parts[0] not in _NOT_SHIPPED]


def test_wheel_holds_what_the_tree_holds(tree: Path) -> None:
    assert differences(tree, shipped(tracked_files())) == ([], [])


def test_editable_install_is_of_this_tree() -> None:
    for package, folder in package_dirs().items():
        spec = importlib.util.find_spec(package)
        assert spec is not None, f"{package} is not installed: run make install-dev"
        assert [Path(place).resolve() for place in spec.submodule_search_locations or ()] == [ROOT / folder]


def test_every_folder_with_modules_is_mapped() -> None:
    packages = package_dirs()
    outside = _NOT_SHIPPED | {"deploy", "docs"}
    lost = [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] not in outside]
    assert [path for path in lost if module_name(path, packages) is None] == []


def test_planted_subpackage_that_is_not_listed_is_found(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    planted = Path("drafter_service/planted/__init__.py")
    (tree / planted).parent.mkdir()
    (tree / planted).write_text('"""Works when installed editable; missing from the wheel."""\n')
    missing, extra = differences(tree, [*shipped(tracked_files()), planted])
    assert missing == ["specla/drafter_service/planted/__init__.py"]
    assert extra == []
