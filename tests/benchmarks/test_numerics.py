"""Differences between numerics: none of an engine with itself, all of them with another target, and their margins."""

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from specla.benchmarks import numerics
from specla.benchmarks.cli import bench
from specla.benchmarks.report import Report
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine

TEXTS = [[5, 9, 250, 17, 3, 3, 8] * 5, [7, 1]]


def engine_of(target: Path, mode: str = "exact") -> Engine:
    return Engine(VerifierConfig(target=target, numerics=mode, threads=1, max_sessions=1, max_rows=16))  # type: ignore[arg-type]


def test_exact_choices_know_no_rows(tiny_target: Path) -> None:
    engine = engine_of(tiny_target)
    alone = engine.greedy_choices(TEXTS[0], 1)
    assert len(alone) == len(TEXTS[0])
    assert all(choice.margin >= 0 for choice in alone)
    assert engine.greedy_choices(TEXTS[0], 16) == alone
    assert numerics.differences(engine, engine, TEXTS, 7, lambda: None) == []


def test_another_model_differs_where_its_choices_do(tiny_target: Path, tiny_target_of: Callable[..., Path]) -> None:
    one, other = engine_of(tiny_target), engine_of(tiny_target_of(tied=False))
    done: list[int] = []
    found = numerics.differences(one, other, TEXTS, 4, lambda: done.append(1))
    assert len(done) == len(TEXTS)
    choices = [(engine.greedy_choices(TEXTS[0], 4)) for engine in (one, other)]
    wanted = [i for i, (a, b) in enumerate(zip(*choices, strict=True), 1) if a.token != b.token]
    assert wanted
    assert [d.position for d in found if d.text == 0] == wanted
    assert found[0].margin == choices[0][wanted[0] - 1].margin
    made = Report(title="numerics", device="test")
    numerics.add_to(made, found, 37)
    assert made.rows[0].median == len(found) / 37 * 1e6
    assert made.rows[2].median == max(d.margin for d in found)


def test_command_reports_the_rate(tiny_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "domain": "prose", "text": "hello there"}\n')
    result = CliRunner().invoke(
        bench, ["numerics", "--target", str(tiny_target), "--prompts", str(prompts), "--json", str(tmp_path / "r.json")]
    )
    assert result.exit_code == 0, result.output
    assert "other choices a million tokens" in (tmp_path / "r.json").read_text()
