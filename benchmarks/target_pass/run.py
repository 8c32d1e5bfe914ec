"""Measures whole passes: checks first, then cases and rivals in turns, then host, memory, prefill and the library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from specla.benchmarks.kernels import device
from specla.benchmarks.kernels.preparation import MODES
from specla.benchmarks.kernels.replay import MissingLibraryError
from specla.benchmarks.kernels.timing import Timed, in_turns
from specla.benchmarks.report import Report, Row
from specla.benchmarks.target_pass import library, rivals
from specla.benchmarks.target_pass.cases import SAMPLING, Bench, Case, cycle_of
from specla.benchmarks.target_pass.checks import check
from specla.benchmarks.target_pass.goals import LIBRARY, OURS, PREFILL_TOKENS, Measured, goals
from specla.benchmarks.target_pass.host import engine_of, iterations_us
from specla.benchmarks.target_pass.model import SHAPE, random_weights
from specla.kernels.gpu.selector import Mode, Selector
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.engine import Engine
from specla.verifier_service.gpu.memory import GpuMemoryAccount
from specla.verifier_service.gpu.weights import GpuWeights

SIZES = ((1, 1), (1, 16), (1, 32), (1, 64), (16, 1), (16, 16), (64, 1), (64, 8))
SNAPSHOT_SIZES = ((1, 16), (16, 16))
ROUNDS = 15
LIBRARY_ROUNDS = 5
METHOD = (
    "Each case is a cycle of passes as the backend would run them (what was accepted before is committed, states are "
    "stored by its rule), each pass one CUDA graph from the copy of its inputs to the copy of its results: embedding, "
    "24 layers, head, adjustments, sampling at T = 0.8 with top-p 0.95. A sample is whole cycles back to back over "
    "their passes; all cases and rivals of a mode take turns. Weights (2.9 GB) are many times the L2 cache: cold. "
    "Memory is what the account counts; what CUDA takes for the graphs themselves is not in it."
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
    _prefill(made, found, weights, with_library=with_library, say=say)
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
        iterations = iterations_us(engine, case)
        engine.close()
        alone = statistics.median(found.passes[mode][case.name])
        made.rows.append(Row.of(mode, f"{case.name}: iteration of an engine", [us / 1e3 for us in iterations], "ms"))
        host = [us - alone for us in iterations]
        made.rows.append(Row.of(mode, f"{case.name}: the host's part", host, "us"))
        if (sessions, rows) == (1, 16):
            found.host[mode] = host
        del engine
        torch.cuda.empty_cache()
    engine = engine_of(weights, mode, sessions=64, max_rows=16)
    found.memory[mode] = _overhead(engine)
    del engine
    torch.cuda.empty_cache()


def _overhead(engine: Engine) -> float:
    """Memory a session at 16 rows over its bare state."""
    memory = engine.memory
    assert isinstance(memory, GpuMemoryAccount)
    return memory.overhead(64, 16)


def _prefill(
    made: Report, found: Measured, weights: GpuWeights, *, with_library: bool, say: Callable[[str], None]
) -> None:
    timed: dict[str, Callable[[], None]] = {OURS: _our_prefill(weights)}
    if with_library:
        try:
            model = library.library_model(SHAPE)
        except MissingLibraryError as error:
            made.notes["left out"] = str(error)
        else:
            for name, samples in _library_decoding(made, model, say).items():
                made.rows.append(Row.of("flash-linear-attention, 1 session", name, samples, "ms"))
            timed[LIBRARY] = library.prefill(model, PREFILL_TOKENS)
    found.prefill = _milliseconds(timed, LIBRARY_ROUNDS)
    for name, samples in found.prefill.items():
        made.rows.append(Row.of("prefill", f"{PREFILL_TOKENS:,} tokens, {name}", samples, "ms"))


def _our_prefill(weights: GpuWeights) -> Callable[[], None]:
    engine = engine_of(weights, "exact", sessions=1, max_rows=16)
    prompt = [(7 * i) % 32_000 for i in range(PREFILL_TOKENS + 1)]

    def prefill() -> None:
        session = engine.open(b"", prompt, [], SAMPLING, Stopping(max_tokens=8))
        while not engine.prefill(session, engine.config.chunk_tokens):
            pass
        engine.release(session)

    return prefill


def _library_decoding(made: Report, model: object, say: Callable[[str], None]) -> Mapping[str, Sequence[float]]:
    say("  the library's generate")
    found = {"generate as shipped, a token": [us / 1e3 for us in library.generate_us(model, LIBRARY_ROUNDS)]}
    try:
        step = library.captured_step(model)
    except Exception as error:
        made.notes["library in a CUDA graph"] = f"not captured: {type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        found["a step in a CUDA graph"] = _milliseconds({"": step}, LIBRARY_ROUNDS)[""]
    return found


def _milliseconds(timed: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Of each, in turns, the device's queue empty before and after."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for run in timed.values():
        run()
    for _ in range(rounds):
        for name, run in timed.items():
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            found[name].append(float(begin.elapsed_time(end)))
    return found
