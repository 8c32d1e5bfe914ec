"""Keeps tuning runs: the times that tests read, and the table that ships, fitted from them.

    specla bench kernels --tune build/h200.json --json build/tune.json --budget 300
    python tools/record_kernel_times.py build/tune.json

Several runs may be given, earlier ones first, parts of the grid among them (--tune-rows). Cases that none has timed
stay as they are recorded, if they were timed on the same device; --anew drops them. The files are
tests/kernels/gpu/data/h200_times.json and kernels/gpu/tables/h200.json.
"""

import argparse
import json
from pathlib import Path

from specla.benchmarks.kernels.recorded import recorded, table_of

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "tests" / "kernels" / "gpu" / "data" / "h200_times.json"
TABLE = ROOT / "kernels" / "gpu" / "tables" / "h200.json"


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="what --json wrote beside --tune")
    parser.add_argument("--anew", action="store_true", help="keep nothing of what is recorded now")
    given = parser.parse_args()
    former = None if given.anew or not TIMES.exists() else json.loads(TIMES.read_text())
    record = recorded([json.loads(path.read_text()) for path in given.runs], former)
    table = table_of(record)
    TIMES.write_text(json.dumps(record, indent=0) + "\n")
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(
        f"{len(record['times'])} cases at {len(table['measured'])} places: {TIMES.relative_to(ROOT)}, "
        f"{TABLE.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
