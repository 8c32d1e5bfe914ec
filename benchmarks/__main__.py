"""`python -m specla.benchmarks`: the bench commands without the installed `specla`."""

from specla.benchmarks.cli import bench

if __name__ == "__main__":
    bench(prog_name="specla bench")
