"""The price of exactness: numerics in turns, seconds a token, a goal that can fail."""

from types import SimpleNamespace
from typing import Any

import pytest

from specla.benchmarks import price
from specla.benchmarks.prompt_set import Prompt
from specla.benchmarks.report import Report


class Clock:
    now = 0.0


class Generator:
    """Takes a set time a token on a clock of its own."""

    def __init__(self, clock: Clock, log: list[str], name: str, seconds: float) -> None:
        self.clock, self.log, self.name, self.seconds = clock, log, name, seconds

    def generate(self, prompt: str, *, drafter: str, max_tokens: int, temperature: float, seed: int) -> Any:
        self.log.append(f"{prompt} {drafter} {self.name}")
        self.clock.now += self.seconds * max_tokens
        return SimpleNamespace(token_ids=range(max_tokens))


@pytest.mark.parametrize(("exact", "met"), [(1.09, True), (1.12, False)])
def test_the_ratio_of_times_a_token(monkeypatch: pytest.MonkeyPatch, exact: float, met: bool) -> None:
    clock, log = Clock(), list[str]()
    monkeypatch.setattr(price.time, "perf_counter", lambda: clock.now)
    generators = {"exact": Generator(clock, log, "exact", exact), "fast": Generator(clock, log, "fast", 1.0)}
    prompts = [Prompt("a", "prose", "A"), Prompt("b", "code", "B")]
    taken = price.measure(generators, prompts, ["none", "suffix"], max_tokens=4, progress=lambda: None)
    assert log[:2] == ["A none fast", "A none exact"]
    assert log[4:6] == ["B none exact", "B none fast"]
    made = Report(title="", device="")
    price.add_to(made, taken)
    assert [(goal.name.split()[-1], goal.met) for goal in made.goals] == [("none", met), ("suffix", met)]
    assert made.goals[0].got == pytest.approx(exact)
    assert [row.unit for row in made.rows] == ["tokens/s", "tokens/s", "x"] * 2
