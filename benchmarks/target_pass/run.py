"""Measures whole passes: checks first, then cases and rivals in turns, then host, memory, prefill and the library."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specla.benchmarks.kernels import device
from specla.benchmarks.kernels.preparation import MODES
from specla.benchmarks.kernels.timing import Timed, in_turns
from specla.benchmarks.report import Report, Row
from specla.benchmarks.target_pass import rivals
from specla.benchmarks.target_pass.cases import Bench, Case, cycle_of
from specla.benchmarks.target_pass.checks import check
from specla.benchmarks.target_pass.footprint import footprint
from specla.benchmarks.target_pass.goals import Measured, goals
from specla.benchmarks.target_pass.host import engine_of, iterations
from specla.benchmarks.target_pass.model import random_weights
from specla.benchmarks.target_pass.prompts import measure_prompts
from specla.kernels.gpu.selector import Mode, Selector
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.memory import MIB

SIZES = ((1, 1), (1, 16), (1, 32), (1, 64), (16, 1), (16, 16), (64, 1), (64, 8))
SNAPSHOT_SIZES = ((1, 16), (16, 16))
ROUNDS = 15
METHOD = (
    "Each case is a cycle of passes as the backend would run them (what was accepted before is committed, states are "
    "stored by its rule), each pass one CUDA graph from its inputs on the host to its results there: embedding, "
    "24 layers, head, adjustments, sampling at T = 0.8 with top-p 0.95. A sample is whole cycles back to back over "
    "their passes; all cases and rivals of a mode take turns. Weights (2.9 GB) are many times the L2 cache: cold. "
    "Memory is what the account counts or what has gone from the device since the weights were loaded, graphs and "
    "kernels included, whichever is more."
)


def run(say: Callable[[str], None], save: Callable[[Report], None], *, with_library: bool = True) -> Report:
    """All figures.

    Args:
        say: told what is going on.
        save: given the report so far, whenever something was added.
        with_library: whether to run flash-linear-attention's model, too.

    Raises:
        NoDeviceError: there is no GPU.
        WrongPassError: passes are wrong here.
    """
    device.require()
    made = Report(title="Whole passes of the 1.47B model", device=device.describe())
    made.notes["method"] = METHOD
    weights, selector, found = random_weights("cuda"), Selector.for_device(device.name()), Measured()
    device.wake()
    bandwidth = device.copy_bandwidth()
    made.notes["bandwidth of a copy, TB/s"] = round(bandwidth / 1e12, 3)
    say("checking")
    for mode, error in check(weights, selector).items():
        made.notes[f"{mode} logits against float32, root mean square"] = error
    for mode in MODES:
        say(f"{mode}: cases")
        found.passes[mode] = _cases(made, weights, selector, mode, bandwidth, say)
        save(_with_goals(made, found))
        say(f"{mode}: host and memory")
        _engine(made, found, weights, mode)
        save(_with_goals(made, found))
    say("prefill and the library")
    measure_prompts(made, found, weights, say, lambda: save(_with_goals(made, found)), with_library=with_library)
    made.notes["clocks after"] = device.clocks()
    return _with_goals(made, found)


def _with_goals(made: Report, found: Measured) -> Report:
    made.goals[:] = goals(found)
    return made


def _cases(
    made: Report, weights: GpuWeights, selector: Selector, mode: Mode, bandwidth: float, say: Callable[[str], None]
) -> dict[str, list[float]]:
    cases = [Case(sessions, rows, mode) for sessions, rows in SIZES]
    bench = Bench.make(
        weights, selector, max(s for s, _ in SIZES), max(r for _, r in SIZES), max(s * r for s, r in SIZES)
    )
    timed: list[Timed] = []
    for case in cases:
        say(f"  {case.name}: {bench.choose(case)}")
        timed.append(cycle_of(bench, case))
    names = {case.name for case in cases}
    for case in cases:
        if (case.sessions, case.rows) in SNAPSHOT_SIZES:
            timed.append(rivals.snapshots_of(bench, case))
    floors = {rows for sessions, rows in SIZES if sessions == 1}
    for rows in sorted(floors) if mode == MODES[0] else ():
        for ours in (True, False):
            graph = rivals.products_of(weights, rows, ours=ours)
            timed.append(graph._replace(name=f"{graph.name}, {rows} row{'s' if rows > 1 else ''}"))
    samples = in_turns(timed, ROUNDS)
    for name, microseconds in samples.items():
        made.rows.append(Row.of(mode, name, [us / 1e3 for us in microseconds], "ms"))
        if name in names:
            case = next(case for case in cases if case.name == name)
            floor = rivals.bytes_once(weights, case) / bandwidth * 1e6
            made.rows.append(Row.of(mode, f"{name}, over its bytes once", [us / floor for us in microseconds], "x"))
    for case in cases:
        rival = f"{case.name}, {rivals.SNAPSHOTS}"
        if rival in samples:
            ratios = [s / o for s, o in zip(samples[rival], samples[case.name], strict=True)]
            made.rows.append(Row.of(mode, f"{case.name}: snapshots over ours", ratios, "x"))
    del timed, bench
    torch.cuda.empty_cache()
    return {name: samples[name] for name in names}


def _engine(made: Report, found: Measured, weights: GpuWeights, mode: Mode) -> None:
    for sessions, rows in ((1, 1), (1, 16), (16, 16)):
        case = Case(sessions, rows, mode)
        engine = engine_of(weights, mode, sessions=sessions, max_rows=max(rows, 16))
        timed = iterations(engine, case)
        engine.close()
        made.rows.append(Row.of(mode, f"{case.name}: iteration of an engine", [us / 1e3 for us in timed.whole], "ms"))
        made.rows.append(Row.of(mode, f"{case.name}: its passes alone", [us / 1e3 for us in timed.alone], "ms"))
        made.rows.append(Row.of(mode, f"{case.name}: the host's part", timed.host, "us"))
        if (sessions, rows) == (1, 16):
            found.host[mode] = timed.host
        del engine
        torch.cuda.empty_cache()
    sizes = footprint(mode, 64, 16)
    for name, nbytes in (("counted", sizes.counted), ("taken from the device", sizes.taken)):
        made.rows.append(Row.of(mode, f"memory of 64 sessions at 16 rows, {name}", [nbytes / MIB], "MiB"))
    found.memory[mode] = sizes.overhead
