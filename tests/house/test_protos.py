"""The generated protobuf code is what the .proto files give."""

import subprocess
import sys

from product_tree import ROOT


def check(tool: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, timeout=120)


def test_generated_code_is_current() -> None:
    done = check(str(ROOT / "tools/generate_protos.py"))
    assert done.returncode == 0, done.stderr


def test_stale_code_is_found(tmp_path) -> None:
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
