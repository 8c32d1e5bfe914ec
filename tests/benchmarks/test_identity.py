"""A small part of `specla bench identity`, and proof that it would see a difference."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from specla.benchmarks import identity
from specla.benchmarks.identity import Case, Journal, Text
from specla.benchmarks.prompt_set import Prompt
from specla.benchmarks.report import Report
from specla.benchmarks.services import services
from specla.client.local import Local
from specla.verifier_service.config import VerifierConfig

PROMPTS = [
    Prompt("sum", "maths", "Question: 3 + 4 = 7. Question: 3 + 4 ="),
    Prompt("code", "code", "def f(a):\n    return a\n\ndef f(a):\n"),
    Prompt("prose", "prose", "It was the best of times, it was the worst of times, it was"),
]
DRAFTERS = ["none", "lookup", "suffix", "random"]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def columns() -> list[Case]:
    return identity.cases(DRAFTERS, [0.0, 1.0], ["one process", "services"], batch=3, baseline_batch=1)


@pytest.fixture(scope="module")
def filled(tiny_target: Path, columns: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Journal:
    journal = Journal(tmp_path_factory.mktemp("identity") / "journal.jsonl")
    config = VerifierConfig(target=tiny_target, threads=1, max_sessions=3, drafting="unconditional")
    with ExitStack() as stack:
        generators = {
            "one process": stack.enter_context(Local(verifier=config, drafters=DRAFTERS[1:])),
            "services": stack.enter_context(
                services(
                    tiny_target,
                    DRAFTERS,
                    verifier_options=["--threads=1", "--max-sessions=3", "--drafting=unconditional"],
                )
            ),
        }
        identity.run(
            columns, PROMPTS, journal, generators.__getitem__, max_tokens=MAX_TOKENS, progress=lambda text: None
        )
    return journal


def missed_goals(made: Report) -> list[str]:
    """But for the least number of candidates, which drafters that look for repetition do not reach in a few tokens."""
    few = ("lookup", "suffix")
    return [g.name for g in made.goals if not g.met and not (g.unit == "candidates" and g.name.startswith(few))]


def test_a_seed_has_one_text_everywhere(filled: Journal, columns: list[Case]) -> None:
    made = identity.report(columns, PROMPTS, filled, device="test")
    drafting = sum(case.drafter != "none" for case in columns)
    assert len(made.goals) == len(columns) - 2 + drafting  # the two baselines are what the others are held to
    assert missed_goals(made) == []
    assert made.notes["texts"] == len(columns) * len(PROMPTS)
    assert int(made.notes["tokens"]) > 0
    for case in columns:  # worthless drafts were verified, not left out
        if case.drafter == "random":
            assert all(text.drafted >= text.passes for text in filled.of(case).values())


def test_a_different_token_is_seen(filled: Journal, columns: list[Case], tmp_path: Path) -> None:
    spoiled = Journal(tmp_path / "journal.jsonl")
    wrong = Case("services", "random", 1.0, 3)
    for (case, prompt_id), text in filled.texts.items():
        if case == wrong and prompt_id == "code":
            text = replace(text, token_ids=(*text.token_ids[:-1], text.token_ids[-1] ^ 1))
        spoiled.add(text)
    made = identity.report(columns, PROMPTS, spoiled, device="test")
    assert missed_goals(made) == [f"{wrong}: texts that differ"]


def test_texts_without_drafts_prove_nothing(filled: Journal, columns: list[Case], tmp_path: Path) -> None:
    idle = Journal(tmp_path / "journal.jsonl")
    for text in filled.texts.values():
        idle.add(replace(text, drafted=0, accepted=0) if text.case.drafter == "random" else text)
    made = identity.report(columns, PROMPTS, idle, device="test")
    missed = [goal.name for goal in made.goals if not goal.met and "random" in goal.name]
    assert missed == [f"{case}: candidates verified a text" for case in columns if case.drafter == "random"]


def test_a_journal_of_other_settings_is_refused_and_half_a_line_dropped(filled: Journal, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    settings = identity.settings_of(PROMPTS, numerics="exact", max_tokens=MAX_TOKENS)
    first = Journal(path, settings)
    text = next(iter(filled.texts.values()))
    first.add(text)
    with path.open("a") as file:
        file.write(text.to_line()[:40])
    again = Journal(path, settings)
    assert list(again.texts.values()) == [text]
    again.add(replace(text, prompt_id="other"))
    assert len(Journal(path, settings).texts) == 2
    for other in ({**settings, "numerics": "fast"}, identity.settings_of(PROMPTS[:1], numerics="exact"), {}):
        with pytest.raises(ValueError, match="was made with"):
            Journal(path, other)


def test_a_run_that_made_no_text_leaves_no_journal(tmp_path: Path) -> None:
    Journal(tmp_path / "runs" / "journal.jsonl", {"numerics": "exact"})
    assert list(tmp_path.iterdir()) == []


def test_the_digest_of_a_target_knows_its_weights_and_configuration(tiny_target: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_target, tmp_path / "copy"))
    assert identity.digest_of(copy) == identity.digest_of(tiny_target)
    for name in ("config.json", "model.safetensors"):
        before, path = identity.digest_of(copy), copy / name
        *kept, last = path.read_bytes()
        path.write_bytes(bytes([*kept, last ^ 1]))
        assert identity.digest_of(copy) != before, name


def test_a_seed_that_changes_nothing_is_seen(filled: Journal, columns: list[Case], tmp_path: Path) -> None:
    spoiled = Journal(tmp_path / "journal.jsonl")
    other = next(case for case in columns if case.other_seed)
    baseline = filled.of(Case("one process", "none", 1.0, 1))
    for text in filled.texts.values():
        spoiled.add(replace(text, token_ids=baseline[text.prompt_id].token_ids) if text.case == other else text)
    made = identity.report(columns, PROMPTS, spoiled, device="test")
    assert missed_goals(made) == [f"{other}: texts that are the same"]


def test_texts_that_leave_no_choice_may_be_the_same(filled: Journal, columns: list[Case], tmp_path: Path) -> None:
    certain = Journal(tmp_path / "journal.jsonl")
    other = next(case for case in columns if case.other_seed)
    baseline = filled.of(Case("one process", "none", 1.0, 1))
    for text in filled.texts.values():
        same = replace(text, token_ids=baseline[text.prompt_id].token_ids, logprob=-0.001)
        certain.add(same if text.case == other else text)
    made = identity.report(columns, PROMPTS, certain, device="test")
    assert missed_goals(made) == []


def test_a_broken_off_run_goes_on(filled: Journal, columns: list[Case], tmp_path: Path) -> None:
    lines = filled.path.read_text().splitlines()
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join(lines[:-1]) + "\n")
    journal, missing = Journal(path), Text.from_line(lines[-1])
    asked: list[str] = []

    class Recorded:
        def generate(self, prompt: str, **options: object) -> object:
            asked.append(prompt)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        identity.run(
            columns, PROMPTS, journal, lambda join: Recorded(), max_tokens=MAX_TOKENS, progress=lambda text: None
        )
    assert asked == [next(prompt.text for prompt in PROMPTS if prompt.id == missing.prompt_id)]


def test_incomplete_or_mixed_journals_are_refused(filled: Journal, columns: list[Case], tmp_path: Path) -> None:
    short = Journal(tmp_path / "short.jsonl")
    mixed = Journal(tmp_path / "mixed.jsonl")
    for i, text in enumerate(filled.texts.values()):
        if i:
            short.add(text)
        mixed.add(text if i else replace(text, numerics_id="another"))
    with pytest.raises(ValueError, match="missing"):
        identity.report(columns, PROMPTS, short, device="test")
    with pytest.raises(ValueError, match="mixes"):
        identity.report(columns, PROMPTS, mixed, device="test")


def test_journal_lines_are_json(filled: Journal) -> None:
    settings, line = (json.loads(line) for line in filled.path.read_text().splitlines()[:2])
    assert settings == {"settings": {}}
    assert line["case"]["drafter"] == "none"
    assert len(line["token_ids"]) <= MAX_TOKENS
