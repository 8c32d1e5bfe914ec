"""The drafters' benchmark over a generator that counts: who takes turns with whom, and what its figures are made of."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specla.benchmarks.drafters import Sample, add_rows, measure, samples_of
from specla.benchmarks.prompt_set import Prompt
from specla.benchmarks.report import Report
from specla.client.cli.main import app
from specla.client.results import GenerateResult, Usage

PROMPTS = [Prompt(id=str(i), domain="prose", text=f"prompt {i}") for i in range(3)]


def result(ids: list[int], passes: int) -> GenerateResult:
    usage = Usage(
        prompt_tokens=1, completion_tokens=len(ids), target_passes=passes, drafted_tokens=0, accepted_tokens=0
    )
    return GenerateResult(
        text="",
        token_ids=tuple(ids),
        drafted=(),
        logprobs=(),
        finish_reason="length",
        matched_stop=None,
        matched_stop_id=None,
        usage=usage,
        seed=0,
        model="",
        numerics_id="",
    )


@dataclass
class Counting:
    """Generates four tokens that follow from prompt and seed; `wrong` names a drafter that changes them."""

    wrong: str = ""
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    together: threading.Barrier | None = None

    def generate(self, prompt: str, *, drafter: str, max_tokens: int, seed: int, **_: object) -> GenerateResult:
        with self.lock:
            self.asked.append((drafter, prompt, seed))
            self.now += 1
            self.most = max(self.most, self.now)
        if self.together is not None:
            self.together.wait(10)
        with self.lock:
            self.now -= 1
        return result([len(prompt), seed, int(drafter == self.wrong), max_tokens], passes=2)


def counted(timed: dict[str, list[list[Sample]]]) -> dict[str, list[int]]:
    return {name: [len(samples) for samples in rounds] for name, rounds in timed.items()}


def test_one_text_at_a_time_on_every_prompt() -> None:
    generator, seen = Counting(), list[int]()
    timed = measure(
        generator,
        PROMPTS,
        ["none", "a"],
        rounds=2,
        max_tokens=4,
        temperature=0.0,
        at_once=1,
        progress=lambda: seen.append(1),
    )
    assert counted(timed) == {"none": [3, 3], "a": [3, 3]}
    assert len(seen) == 2 * 2 * samples_of(3, 1)
    assert [drafter for drafter, *_ in generator.asked[:6]] == ["none", "a", "a", "none", "none", "a"]
    assert {(prompt, seed) for _, prompt, seed in generator.asked} == {(p.text, s) for p in PROMPTS for s in (0, 1)}
    assert generator.most == 1


def test_several_texts_at_a_time_keep_all_places_busy() -> None:
    generator = Counting(together=threading.Barrier(4))
    timed = measure(
        generator,
        PROMPTS[:2],
        ["none", "a"],
        rounds=2,
        max_tokens=4,
        temperature=1.0,
        at_once=4,
        progress=lambda: None,
    )
    assert counted(timed) == {"none": [1, 1], "a": [1, 1]}
    assert samples_of(2, 4) == 1
    assert len(timed["a"][0][0].results) == 8  # two for each place, with as many seeds as that takes
    assert generator.most == 4
    asked = [(prompt, seed) for drafter, prompt, seed in generator.asked if drafter == "a"]
    assert len(set(asked)) == len(asked) == 16


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_speed_of_other_texts(at_once: int) -> None:
    with pytest.raises(RuntimeError, match="texts differ"):
        measure(
            Counting(wrong="a"),
            PROMPTS,
            ["none", "a"],
            rounds=1,
            max_tokens=4,
            temperature=0.0,
            at_once=at_once,
            progress=lambda: None,
        )


def test_ratios_are_of_total_times() -> None:
    text, made = result([1, 2, 3, 4], passes=2), Report(title="", device="")
    timed = {
        "none": [[Sample(4.0, [text]), Sample(2.0, [text])], [Sample(2.0, [text]), Sample(4.0, [text])]],
        "a": [[Sample(1.0, [text]), Sample(2.0, [text])], [Sample(1.0, [text]), Sample(4.0, [text])]],
    }
    assert add_rows(made, "case", timed) == {"none": 1.0, "a": 1.5}
    rows = {row.name: row for row in made.rows}
    assert (rows["a: over none"].low, rows["a: over none"].high) == (1.2, 2.0)
    assert rows["a: speed"].median == 3.0
    assert rows["a: tokens a target pass"].median == 2.0


def test_the_command_says_how_many_at_a_time(tiny_target: Path) -> None:
    options = ["--limit", "1", "--rounds", "1", "--max-tokens", "4", "--temperatures", "1", "--threads", "1"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["bench", "drafters", "--target", str(tiny_target), *options, "--at-once", "3"]
    )
    assert done.exit_code == 0, done.output
    assert "Drafters over plain decoding, 3 texts at a time" in done.stdout
