import subprocess
import sys
from pathlib import Path

import pytest

from specla.benchmarks.crowding import warning

# A thread that computes for half a second beside two other programs, all on one core.
PROGRAM = """
import os, subprocess, sys, time
from specla.benchmarks.crowding import waited_s, warning
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    time.sleep(0.2)
    waited, begun = waited_s(), time.perf_counter()
    while time.perf_counter() < begun + 0.5:
        pass
    print(warning(waited_s() - waited, time.perf_counter() - begun))
finally:
    for other in others:
        other.kill()
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_programs_on_the_same_core_are_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Other programs kept the cores busy")
    assert "OMP_NUM_THREADS=1" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("waited", "seconds", "warns"), [(0.05, 1.0, False), (0.5, 1.0, True), (0.5, 10.0, False), (0.0, 0.0, False)]
)
def test_a_little_waiting_is_nothing(waited: float, seconds: float, warns: bool) -> None:
    assert bool(warning(waited, seconds)) is warns
