"""Is it sooner? Each drafter against plain decoding, on code that repeats itself and on prose, interleaved."""

import gc
import time
from collections.abc import Callable, Sequence

from specla.benchmarks.identity import Generator
from specla.benchmarks.prompt_set import Prompt
from specla.benchmarks.report import Goal, Report, Row
from specla.client.results import GenerateResult

REPEATING = "repetitive-code"
PROSE = "prose"
LEAST_PROMPTS = 8  # of each kind: over fewer, the goals would judge the prompts


def warm_up(generator: Generator, drafters: Sequence[str]) -> None:
    """A short text with each drafter. And what is there now is no longer looked through for garbage, as in a service:
    that takes as long as several texts."""
    for drafter in drafters:
        generator.generate("warm up", drafter=drafter, max_tokens=8, temperature=0.0, seed=0)
    gc.collect()
    gc.freeze()


def measure(
    generator: Generator,
    prompts: Sequence[Prompt],
    drafters: Sequence[str],
    *,
    rounds: int,
    max_tokens: int,
    temperature: float,
    progress: Callable[[], None],
) -> dict[str, list[tuple[float, GenerateResult]]]:
    """Seconds and result of each text by drafter; the drafters take turns on every prompt, in rotating order.

    Raises:
        RuntimeError: a drafter changed a text.
    """
    timed: dict[str, list[tuple[float, GenerateResult]]] = {drafter: [] for drafter in drafters}
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            shift = (turn + number) % len(drafters)
            texts: dict[str, list[int]] = {}
            for drafter in [*drafters[shift:], *drafters[:shift]]:
                start = time.perf_counter()
                result = generator.generate(
                    prompt.text, drafter=drafter, max_tokens=max_tokens, temperature=temperature, seed=turn
                )
                timed[drafter].append((time.perf_counter() - start, result))
                texts[drafter] = list(result.token_ids)
                progress()
            if any(ids != texts[drafters[0]] for ids in texts.values()):
                raise RuntimeError(f"prompt {prompt.id}: the drafters' texts differ; no speed is reported")
    return timed


def add_rows(
    made: Report, case: str, timed: dict[str, list[tuple[float, GenerateResult]]], *, prompts: int
) -> dict[str, float]:
    """Rows of one case; returns each drafter's speed over plain decoding (total time over total time)."""
    ratios: dict[str, float] = {}
    plain = [seconds for seconds, _ in timed["none"]]
    for drafter, runs in timed.items():
        tokens = sum(len(result.token_ids) for _, result in runs)
        passes = sum(result.usage.target_passes for _, result in runs)
        speeds = [len(result.token_ids) / seconds for seconds, result in runs]
        made.rows.append(Row.of(case, f"{drafter}: speed", speeds, "tokens/s"))
        made.rows.append(Row.of(case, f"{drafter}: tokens a target pass", [tokens / passes], "tokens"))
        by_round = [
            sum(plain[i : i + prompts]) / sum(seconds for seconds, _ in runs[i : i + prompts])
            for i in range(0, len(runs), prompts)
        ]
        made.rows.append(Row.of(case, f"{drafter}: over none", by_round, "x"))
        ratios[drafter] = sum(plain) / sum(seconds for seconds, _ in runs)
    return ratios


def add_goals(made: Report, temperature: float, repeating: dict[str, float], prose: dict[str, float]) -> None:
    """The goals: greedy code that repeats itself 1.25 times as fast as plain decoding, prose never under 0.95.

    What drafters gain on drawn code is reported, not promised.
    """
    if temperature == 0:
        drafting = {drafter: ratio for drafter, ratio in repeating.items() if drafter != "none"}
        best = max(drafting, key=lambda drafter: drafting[drafter])
        name = f"code that repeats itself, T = 0, {best}"
        made.goals.append(Goal(name=name, want=1.25, got=drafting[best], unit="x", sense="at least"))
    for drafter, ratio in prose.items():
        if drafter != "none":
            name = f"prose, T = {temperature:g}, {drafter}"
            made.goals.append(Goal(name=name, want=0.95, got=ratio, unit="x", sense="at least"))
