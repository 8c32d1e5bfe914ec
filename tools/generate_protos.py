"""Generates the Python code of protos/specla/v1, or proves that what is committed is current.

    python tools/generate_protos.py           write it beside the .proto files
    python tools/generate_protos.py --check   write nothing; exit 1 and name each file that differs

The generator's version is pinned in pyproject.toml: generated code refuses a grpcio older than its generator.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import _proto, protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> None:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py of specla.v1 under `out`; RuntimeError if protoc refuses."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "specla").rglob("*.proto"))
    known_types = Path(next(iter(_proto.__path__)))  # google/protobuf/*.proto, which the package carries
    arguments = [
        f"-I{PROTOS}",
        f"-I{known_types}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    code = protoc.main(["protoc", *arguments, *sources])
    if code != 0:
        raise RuntimeError(f"protoc ended with status {code}")


def stale_files() -> list[str]:
    """Generated files that are missing, left over, or differ from what the .proto files give now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {str(path.relative_to(scratch)): path.read_bytes() for path in Path(scratch).rglob("*_pb2*")}
    generated = [path for pattern in ("*_pb2*.py", "*_pb2.pyi") for path in PROTOS.rglob(pattern)]
    committed = {str(path.relative_to(PROTOS)): path.read_bytes() for path in generated}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        generate(PROTOS)
        return 0
    stale = stale_files()
    for name in stale:
        print(f"protos/{name} is not what its .proto gives: run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
