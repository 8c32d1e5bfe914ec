"""Is it sooner? Each drafter against plain decoding, on code that repeats itself and on prose, interleaved."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

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


class Sample(NamedTuple):
    """Some texts with one drafter, one after the other or several at a time."""

    seconds: float
    """Until the last of them was there."""
    results: list[GenerateResult]


def measure(
    generator: Generator,
    prompts: Sequence[Prompt],
    drafters: Sequence[str],
    *,
    rounds: int,
    max_tokens: int,
    temperature: float,
    at_once: int,
    progress: Callable[[], None],
) -> dict[str, list[list[Sample]]]:
    """Samples of each round by drafter; the drafters take turns, in rotating order.

    One text at a time, on every prompt; several at a time, on all prompts together, with as many seeds as give each
    place two texts or more.

    Raises:
        RuntimeError: a drafter changed a text.
    """
    timed: dict[str, list[list[Sample]]] = {drafter: [[] for _ in range(rounds)] for drafter in drafters}
    with ThreadPoolExecutor(at_once) as pool:
        for turn in range(rounds):
            for number, jobs in enumerate(_jobs(prompts, turn, at_once)):
                shift = (turn + number) % len(drafters)
                texts: dict[str, list[list[int]]] = {}
                for drafter in [*drafters[shift:], *drafters[:shift]]:

                    def run(job: tuple[Prompt, int], drafter: str = drafter) -> GenerateResult:
                        prompt, seed = job
                        return generator.generate(
                            prompt.text, drafter=drafter, max_tokens=max_tokens, temperature=temperature, seed=seed
                        )

                    start = time.perf_counter()
                    results = list(map(run, jobs)) if at_once == 1 else list(pool.map(run, jobs))
                    timed[drafter][turn].append(Sample(time.perf_counter() - start, results))
                    texts[drafter] = [list(result.token_ids) for result in results]
                    progress()
                if any(ids != texts[drafters[0]] for ids in texts.values()):
                    which = f"prompt {jobs[0][0].id}" if len(jobs) == 1 else f"{at_once} at a time"
                    raise RuntimeError(f"{which}: the drafters' texts differ; no speed is reported")
    return timed


def samples_of(prompts: int, at_once: int) -> int:
    """Of a round, by drafter."""
    return prompts if at_once == 1 else 1


def _jobs(prompts: Sequence[Prompt], turn: int, at_once: int) -> list[list[tuple[Prompt, int]]]:
    """What a round's samples generate: prompts and seeds."""
    if at_once == 1:
        return [[(prompt, turn)] for prompt in prompts]
    copies = math.ceil(2 * at_once / len(prompts))
    return [[(prompt, turn * copies + copy) for copy in range(copies) for prompt in prompts]]


def add_rows(made: Report, case: str, timed: dict[str, list[list[Sample]]]) -> dict[str, float]:
    """Rows of one case; returns each drafter's speed over plain decoding (total time over total time)."""
    ratios: dict[str, float] = {}
    plain = [sum(sample.seconds for sample in samples) for samples in timed["none"]]
    for drafter, by_round in timed.items():
        samples = [sample for samples in by_round for sample in samples]
        results = [result for sample in samples for result in sample.results]
        tokens = sum(len(result.token_ids) for result in results)
        passes = sum(result.usage.target_passes for result in results)
        speeds = [sum(len(result.token_ids) for result in sample.results) / sample.seconds for sample in samples]
        made.rows.append(Row.of(case, f"{drafter}: speed", speeds, "tokens/s"))
        made.rows.append(Row.of(case, f"{drafter}: tokens a target pass", [tokens / passes], "tokens"))
        seconds = [sum(sample.seconds for sample in samples) for samples in by_round]
        over = [one / other for one, other in zip(plain, seconds, strict=True)]
        made.rows.append(Row.of(case, f"{drafter}: over none", over, "x"))
        ratios[drafter] = sum(plain) / sum(seconds)
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
