"""What does exactness cost? Whole texts through services in exact and in fast numerics, in turns."""

import time
from collections.abc import Callable, Mapping, Sequence

from specla.benchmarks.identity import Generator
from specla.benchmarks.prompt_set import Prompt
from specla.benchmarks.report import Goal, Report, Row

EXACT, FAST = "exact", "fast"
LEAST_PROMPTS = 12  # over fewer, the goals would judge the prompts
MOST = 1.10  # exact is the default as long as it costs no more than this, end to end


def measure(
    generators: Mapping[str, Generator],
    prompts: Sequence[Prompt],
    drafters: Sequence[str],
    *,
    max_tokens: int,
    progress: Callable[[], None],
) -> dict[tuple[str, str], list[float]]:
    """Seconds a token of every prompt, by (drafter, numerics); greedy. The numerics take turns, in rotating order."""
    taken: dict[tuple[str, str], list[float]] = {(drafter, name): [] for drafter in drafters for name in generators}
    names = list(generators)
    for number, prompt in enumerate(prompts):
        for drafter in drafters:
            for name in names if number % 2 else reversed(names):
                start = time.perf_counter()
                result = generators[name].generate(
                    prompt.text, drafter=drafter, max_tokens=max_tokens, temperature=0.0, seed=0
                )
                taken[drafter, name].append((time.perf_counter() - start) / len(result.token_ids))
                progress()
    return taken


def add_to(made: Report, taken: Mapping[tuple[str, str], Sequence[float]]) -> None:
    """Rows and goals: the price is the ratio of a token's mean times, its spread that of the prompts' ratios."""
    for drafter in dict.fromkeys(drafter for drafter, _ in taken):
        exact, fast = taken[drafter, EXACT], taken[drafter, FAST]
        for name, seconds in ((EXACT, exact), (FAST, fast)):
            made.rows.append(Row.of(drafter, name, [1 / each for each in seconds], "tokens/s"))
        ratios = [one / other for one, other in zip(exact, fast, strict=True)]
        made.rows.append(Row.of(drafter, "exact over fast", ratios, "x"))
        goal = f"exact numerics over fast, end to end, {drafter}"
        made.goals.append(Goal(name=goal, want=MOST, got=sum(exact) / sum(fast), unit="x", sense="at most"))
