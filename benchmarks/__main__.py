"""`python -m specla.benchmarks`: the bench commands where `specla` is not installed."""

import sys

from specla.benchmarks.cli import bench

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.argv = ["specla", "bench", *arguments]  # what results record as their command
    bench(arguments, prog_name="specla bench")
