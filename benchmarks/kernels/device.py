"""What the benchmark reads off the GPU: its name, L2 size, clocks, and the bandwidth that a plain copy reaches.

Clocks and power are read through nvidia-smi; nothing is ever set.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess

import torch

_COPY_BYTES = 4 << 30
_READINGS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


class NoDeviceError(RuntimeError):
    """PyTorch finds no GPU."""


def require() -> None:
    """Raises NoDeviceError unless there is a GPU."""
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "this is timed on a GPU, and PyTorch finds none here: run it where `specla doctor` names one"
        )


def name() -> str:
    """As CUDA gives it."""
    return str(torch.cuda.get_device_name())


def describe() -> str:
    """Name, multiprocessors, memory and L2 of the current device."""
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory, l2 = p.total_memory / 2**30, p.L2_cache_size / 2**20
    return f"{p.name}, {p.multi_processor_count} multiprocessors, {memory:.0f} GiB, {l2:.0f} MiB of L2"


def l2_bytes() -> int:
    """Size of the L2 cache."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def clocks() -> str:
    """SM and memory clock, power and temperature now, as text; or why they are not known."""
    if shutil.which("nvidia-smi") is None:
        return "unknown: no nvidia-smi"
    query = ["nvidia-smi", f"--query-gpu={','.join(_READINGS)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        return f"unknown: nvidia-smi ended with {done.returncode}"
    sm, memory, power, temperature = (part.strip() for part in done.stdout.strip().split(","))
    return f"SM {sm}, memory {memory}, {power}, {temperature} C"


def wake() -> None:
    """Half a second of products, so that the clocks are up before the first sample."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    milliseconds = 0.0
    while milliseconds < 500:
        for _ in range(50):
            a @ a
        end.record()
        end.synchronize()
        milliseconds = begin.elapsed_time(end)


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a large copy within the device: the median of nine."""
    source = torch.randint(0, 1 << 30, (_COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    seconds: list[float] = []
    for _ in range(11):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(2 * _COPY_BYTES / statistics.median(seconds[2:]))
