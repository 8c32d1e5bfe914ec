"""Prompts: ours as the engine runs them, host included, beside the library's, whose decoding is timed as well.

Each part is kept as it comes: what fails or is broken off leaves the parts before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from specla.benchmarks.kernels.replay import MissingLibraryError
from specla.benchmarks.report import Report, Row
from specla.benchmarks.target_pass import library
from specla.benchmarks.target_pass.cases import SAMPLING
from specla.benchmarks.target_pass.goals import LIBRARY, OURS, PREFILL_TOKENS, Measured
from specla.benchmarks.target_pass.host import engine_of
from specla.benchmarks.target_pass.model import SHAPE
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.engine import Engine
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.passes import PassItem

SHORT, TOGETHER = 100, 16
"""Tokens of a short prompt, and how many of them are run at once and one by one."""

_ROUNDS = 5
_CAPTURED = f"{LIBRARY} in a CUDA graph"
_DECODING = "flash-linear-attention, 1 session"


def measure_prompts(
    made: Report,
    found: Measured,
    weights: GpuWeights,
    say: Callable[[str], None],
    save: Callable[[], None],
    *,
    with_library: bool,
) -> None:
    """Adds rows to the report and prefill to what was found; `save` is called whenever something was added."""
    engine = engine_of(weights, "exact", sessions=TOGETHER, max_rows=16)
    ours = _our_prefill(engine)
    _keep(made, found, _milliseconds({OURS: ours}, _ROUNDS))
    save()
    say("  short prompts, and a session beside a long one")
    _short_prompts(made, engine)
    _beside_a_prompt(made, engine)
    save()
    if with_library:  # last: what fails there may leave the device unusable
        _library(made, found, ours, say, save)


def _keep(made: Report, found: Measured, samples: dict[str, list[float]]) -> None:
    """Prefill as it was measured last."""
    found.prefill, case = samples, f"prefill, {PREFILL_TOKENS:,} tokens"
    made.rows[:] = [row for row in made.rows if row.case != case]
    for name, milliseconds in samples.items():
        made.rows.append(Row.of(case, name, milliseconds, "ms"))
        if name != OURS:
            ratios = [theirs / own for theirs, own in zip(milliseconds, samples[OURS], strict=True)]
            made.rows.append(Row.of(case, f"{name} over ours", ratios, "x"))


def _library(
    made: Report, found: Measured, ours: Callable[[], None], say: Callable[[str], None], save: Callable[[], None]
) -> None:
    """Its parts, prefill first; a part that fails is noted."""
    say("  the library's kernels tune themselves")
    failed = library.warm(PREFILL_TOKENS)
    for left_out, what in failed.items():
        made.notes[f"library, {left_out}"] = f"left out: {what}"
    try:
        model = library.library_model(SHAPE)
    except MissingLibraryError as error:
        made.notes["left out"] = str(error)
        return

    def prefill() -> None:
        timed = {OURS: ours, LIBRARY: library.prefill(model, PREFILL_TOKENS)}
        _keep(made, found, _milliseconds(timed, _ROUNDS))
        timed[_CAPTURED] = library.captured_prefill(model, PREFILL_TOKENS)
        _keep(made, found, _milliseconds(timed, _ROUNDS))

    def step() -> None:
        samples = _milliseconds({"": library.captured_step(model)}, _ROUNDS)[""]
        made.rows.append(Row.of(_DECODING, "a step in a CUDA graph", samples, "ms"))

    def generate() -> None:
        samples = [us / 1e3 for us in library.generate_us(model, _ROUNDS)]
        made.rows.append(Row.of(_DECODING, "generate as shipped, a token", samples, "ms"))

    parts = ("prefill", "prefill", prefill), ("decoding", "generate", generate), ("decoding", "step", step)
    for tuned, name, part in parts:
        if tuned in failed:
            continue
        say(f"  the library's {name}")
        try:
            part()
        except Exception as error:  # whatever the library raises
            first = (str(error).splitlines() or [""])[0]
            made.notes[f"library, {name}"] = f"failed: {type(error).__name__}: {first}"
        save()


def _our_prefill(engine: Engine) -> Callable[[], None]:
    prompt = _long_prompt()

    def prefill() -> None:
        session = engine.open(b"", prompt, [], SAMPLING, Stopping(max_tokens=8))
        while not engine.prefill(session, engine.config.chunk_tokens):
            pass
        engine.release(session)

    return prefill


def _long_prompt() -> list[int]:
    return [(7 * i) % 32_000 for i in range(PREFILL_TOKENS + 1)]


def _short_prompts(made: Report, engine: Engine) -> None:
    """Many at once: those that wait go together, or one after the other."""

    def run(at_once: int) -> None:
        prompts = [[(7 * i + j) % 32_000 for i in range(SHORT + 1)] for j in range(TOGETHER)]
        waiting = [engine.open(b"", prompt, [], SAMPLING, Stopping(max_tokens=8)) for prompt in prompts]
        sessions = list(waiting)
        while waiting:
            engine.end_prefill(engine.begin_prefill(waiting[:at_once]))
            waiting = [session for session in waiting if not session.ready]
        for session in sessions:
            engine.release(session)

    timed = {"together": lambda: run(TOGETHER), "one by one": lambda: run(1)}
    for name, samples in _milliseconds(timed, _ROUNDS).items():
        made.rows.append(Row.of("prefill", f"{TOGETHER} prompts of {SHORT} tokens, {name}", samples, "ms"))


def _beside_a_prompt(made: Report, engine: Engine) -> None:
    """How long a decoding session waits for a token while a long prompt is prefilled: a chunk and its own pass."""
    decoding = engine.open(b"", [1, 2, 3], [], SAMPLING, Stopping(max_tokens=1 << 30))
    while not engine.prefill(decoding, 1):
        pass
    item, waits = PassItem(decoding, Topology.root_only()), []
    engine.run_pass([item])
    for _ in range(_ROUNDS):
        session = engine.open(b"", _long_prompt(), [], SAMPLING, Stopping(max_tokens=8))
        while not session.ready:
            begun = time.perf_counter()
            engine.end_prefill(engine.begin_prefill([session]))
            engine.run_pass([item])
            waits.append((time.perf_counter() - begun) * 1e3)
        engine.release(session)
    engine.release(decoding)
    name = f"a token of a session beside a prompt of {PREFILL_TOKENS:,} tokens"
    made.rows.append(Row.of("prefill", name, waits, "ms"))
    made.rows.append(Row.of("prefill", f"{name}, the longest", [max(waits)], "ms"))


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
