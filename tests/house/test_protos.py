"""The generated protobuf code is what the .proto files give."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from product_tree import ROOT


def check(tool: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, timeout=120)


def test_generated_code_is_current() -> None:
    done = check(str(ROOT / "tools/generate_protos.py"))
    assert done.returncode == 0, done.stderr


def test_stale_code_is_found(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/generate_protos.py").write_text((ROOT / "tools/generate_protos.py").read_text())
    for path in (ROOT / "protos").rglob("*.p*"):
        if path.suffix in {".proto", ".py", ".pyi"}:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    generated = tmp_path / "protos/specla/v1/common_pb2.py"
    generated.write_text(generated.read_text() + "# changed by hand\n")
    (tmp_path / "protos/specla/v1/drafter_pb2.pyi").unlink()
    done = check(str(tmp_path / "tools/generate_protos.py"))
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stderr.splitlines()] == [
        "protos/specla/v1/common_pb2.py",
        "protos/specla/v1/drafter_pb2.pyi",
    ]


BUF = ROOT / "node_modules/.bin/buf"


@pytest.mark.skipif(not BUF.exists(), reason="Buf is not installed (make buf-lint does)")
@pytest.mark.parametrize(
    ("change", "command", "says"),
    [
        (("", ""), ["lint"], ""),
        (("", ""), ["breaking", "--against", "protos/released.binpb"], ""),
        (("uint64 seed = 2", "uint64 Seed = 2"), ["lint"], "lower_snake_case"),
        (("uint64 seed = 2", "uint32 seed = 2"), ["breaking", "--against", "protos/released.binpb"], "changed type"),
    ],
)
def test_buf_rules(tmp_path: Path, change: tuple[str, str], command: list[str], says: str) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("*.py", "*.pyi", "__pycache__"))
    shutil.copyfile(ROOT / "buf.yaml", tmp_path / "buf.yaml")
    proto = tmp_path / "protos/specla/v1/generation.proto"
    proto.write_text(proto.read_text().replace(*change))
    done = subprocess.run([str(BUF), *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) is (says == "")
    assert says in done.stdout
