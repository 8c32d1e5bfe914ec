"""Whether other programs disturbed what was timed: how long threads of this process stood ready and had no core."""

from pathlib import Path

_TASKS = Path("/proc/self/task")
_BEARABLE = 0.15  # of the time: 0.05 on a quiet machine, 0.35 to 1.1 where every core had another program


def waited_s() -> float:
    """Seconds that the living threads of this process have waited for a core; 0 where the system does not tell."""
    total = 0
    for file in _TASKS.glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[1])
        except OSError:  # the thread has ended
            continue
    return total / 1e9


def warning(waited: float, seconds: float) -> str:
    """What to say of figures during whose `seconds` threads waited so long; nothing where that disturbs little."""
    if waited <= _BEARABLE * seconds:
        return ""
    return (
        "Other programs kept the cores busy, so these figures are likely too low or uneven: set OMP_NUM_THREADS=1, "
        "or run this on a quieter machine."
    )
