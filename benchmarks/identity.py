"""Is it the same text? Every drafter, temperature, batch and join against plain decoding, token by token.

The baseline is plain decoding in one process, `baseline_batch` sessions at a time. Each finished text is one line
of a journal, so that a run that was broken off goes on where it stopped.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from specla.benchmarks.prompt_set import Prompt
from specla.benchmarks.report import Goal, Report, Row
from specla.client.results import GenerateResult

_DEVIATIONS = 4.0  # standard deviations by which chance may exceed what is expected


class Generator(Protocol):
    """What `Client` and `Local` have in common, as far as it is needed here."""

    def generate(
        self,
        prompt: str,
        *,
        drafter: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        top_logprobs: int | None = None,
    ) -> GenerateResult:
        """Generate one text."""


@dataclass(frozen=True, order=True)
class Case:
    """One column of the comparison."""

    join: str  # "one process" or "services"
    drafter: str
    temperature: float
    batch: int  # sessions at a time
    other_seed: bool = False

    def __str__(self) -> str:
        seed = ", other seed" if self.other_seed else ""
        return f"{self.drafter}, T={self.temperature:g}, {self.join}, {self.batch} at a time{seed}"


@dataclass(frozen=True)
class Text:
    """One generated text."""

    case: Case
    prompt_id: str
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    passes: int
    numerics_id: str
    max_tokens: int
    logprob: float | None = None  # natural logarithm of the text's probability; of another seed's texts only

    def to_line(self) -> str:
        """One line of the journal."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "Text":
        """The text of a journal line."""
        fields = json.loads(line)
        return cls(**{**fields, "case": Case(**fields["case"]), "token_ids": tuple(fields["token_ids"])})


def cases(
    drafters: Sequence[str], temperatures: Sequence[float], joins: Sequence[str], batch: int, baseline_batch: int
) -> list[Case]:
    """All columns: the baselines first, then every combination, then the other seed."""
    baselines = [Case("one process", "none", t, baseline_batch) for t in temperatures]
    rest = [Case(join, d, t, batch) for join in joins for d in drafters for t in temperatures]
    other = [Case("one process", "none", t, batch, other_seed=True) for t in temperatures if t == 1]
    return [*baselines, *(case for case in rest if case not in baselines), *other]


def seed_of(prompt: Prompt, case: Case) -> int:
    """The seed of a prompt: its own, the same in every column but the `other_seed` one."""
    return zlib.crc32(prompt.id.encode()) + (1 << 32 if case.other_seed else 0)


def run_case(
    case: Case, prompts: Sequence[Prompt], generator: Generator, *, max_tokens: int, done: set[str]
) -> Iterator[Text]:
    """Generate the texts of one column that are not `done`, `case.batch` at a time; yields them as they finish."""

    def one(prompt: Prompt) -> Text:
        result = generator.generate(
            prompt.text,
            drafter=case.drafter,
            max_tokens=max_tokens,
            temperature=case.temperature,
            seed=seed_of(prompt, case),
            top_logprobs=0 if case.other_seed else None,
        )
        usage = result.usage
        return Text(
            case=case,
            prompt_id=prompt.id,
            token_ids=tuple(result.token_ids),
            drafted=usage.drafted_tokens,
            accepted=usage.accepted_tokens,
            passes=usage.target_passes,
            numerics_id=result.numerics_id,
            max_tokens=max_tokens,
            logprob=sum(entry.chosen for entry in result.logprobs) if case.other_seed else None,
        )

    with ThreadPoolExecutor(max_workers=case.batch) as pool:
        futures = [pool.submit(one, prompt) for prompt in prompts if prompt.id not in done]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Journal:
    """The texts generated so far, kept in a file: a line of what all of them were made with, then a line each.

    Args:
        path: made if it does not exist; an existing one is gone on with.
        settings: what a text depends on, or is meant to prove (prompts, length, numerics, ...).

    Raises:
        ValueError: the existing one was made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, object] | None = None) -> None:
        self.path = path
        self.settings = dict(settings or {})
        self.texts: dict[tuple[Case, str], Text] = {}
        whole = path.read_text() if path.exists() else ""
        lines = whole[: whole.rfind("\n") + 1].splitlines()  # a run that was killed leaves half a line
        if lines and (found := json.loads(lines[0]).get("settings")) != self.settings:
            raise ValueError(
                f"{path} was made with {found}, not {self.settings}: give another --journal, or delete this one"
            )
        for line in lines[1:]:
            self._keep(Text.from_line(line))
        if lines:
            path.write_text("".join(f"{line}\n" for line in lines))

    def add(self, text: Text) -> None:
        """Keep a text, in the file too, which is made with the first one."""
        self._keep(text)
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"settings": self.settings}) + "\n")
        with self.path.open("a") as file:
            file.write(text.to_line() + "\n")

    def of(self, case: Case) -> dict[str, Text]:
        """The texts of one column, by prompt."""
        return {prompt_id: text for (its_case, prompt_id), text in self.texts.items() if its_case == case}

    def _keep(self, text: Text) -> None:
        self.texts[text.case, text.prompt_id] = text


def run(
    all_cases: Sequence[Case],
    prompts: Sequence[Prompt],
    journal: Journal,
    generator_of: Callable[[str], Generator],
    *,
    max_tokens: int,
    progress: Callable[[Text], None],
) -> None:
    """Fill the journal, column by column."""
    for case in all_cases:
        done = set(journal.of(case))
        if len(done) == len(prompts):
            continue
        for text in run_case(case, prompts, generator_of(case.join), max_tokens=max_tokens, done=done):
            journal.add(text)
            progress(text)


def report(all_cases: Sequence[Case], prompts: Sequence[Prompt], journal: Journal, *, device: str) -> Report:
    """Compare every column with the baseline of its temperature, the first column of that temperature.

    Raises:
        ValueError: the journal holds texts of other numerics or lengths, or a column is incomplete.
    """
    columns = {case: _column(journal, case, prompts) for case in all_cases}
    texts = [text for column in columns.values() for text in column]
    kinds = {(text.numerics_id, text.max_tokens) for text in texts}
    if len(kinds) != 1:
        raise ValueError(f"the journal mixes numerics or lengths {sorted(kinds)}: begin a new one")
    made = Report(title="Identity", device=device)
    numerics_id, max_tokens = kinds.pop()
    made.notes.update(
        numerics_id=numerics_id,
        max_tokens=max_tokens,
        prompts=len(prompts),
        texts=len(texts),
        tokens=sum(len(text.token_ids) for text in texts),
    )
    for case, column in columns.items():
        baseline = next(texts for first, texts in columns.items() if first.temperature == case.temperature)
        if case.other_seed:
            _add_other_seed(made, case, column, baseline)
        elif column is not baseline:
            _add_same_seed(made, case, column, baseline)
    return made


def _column(journal: Journal, case: Case, prompts: Sequence[Prompt]) -> list[Text]:
    """A column's texts in the prompts' order."""
    texts = journal.of(case)
    missing = [prompt.id for prompt in prompts if prompt.id not in texts]
    if missing:
        raise ValueError(f"{case}: {len(missing)} of {len(prompts)} texts are missing")
    return [texts[prompt.id] for prompt in prompts]


def settings_of(prompts: Sequence[Prompt], **settings: str | int) -> dict[str, str | int]:
    """A journal's settings: the given ones, and a digest of the prompts' ids and texts."""
    digest = hashlib.sha256(json.dumps([(prompt.id, prompt.text) for prompt in prompts]).encode()).hexdigest()
    return {**settings, "prompts": digest[:16]}


def digest_of(target: Path) -> str:
    """Of all that a checkpoint's texts depend on: its configuration, tokenizer and weights."""
    whole = hashlib.sha256()
    for path in sorted((*target.glob("*.json"), *target.glob("*.safetensors"))):
        with path.open("rb") as file:
            whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def _add_same_seed(made: Report, case: Case, texts: Sequence[Text], baseline: Sequence[Text]) -> None:
    differing = sum(a.token_ids != b.token_ids for a, b in zip(texts, baseline, strict=True))
    tokens, passes = sum(len(text.token_ids) for text in texts), sum(text.passes for text in texts)
    drafted, accepted = sum(text.drafted for text in texts), sum(text.accepted for text in texts)
    made.rows.append(Row.of(str(case), "texts that differ", [differing], f"of {len(texts)}"))
    made.rows.append(Row.of(str(case), "tokens a target pass", [tokens / passes], "tokens"))
    made.rows.append(Row.of(str(case), "drafted tokens accepted", [accepted], f"of {drafted}"))
    made.goals.append(
        Goal(name=f"{case}: texts that differ", want=0, got=differing, unit=f"of {len(texts)}", sense="at most")
    )
    if case.drafter != "none":  # that no draft changes a text is shown by drafts, not by their absence
        name, each = f"{case}: candidates verified a text", drafted / len(texts)
        made.goals.append(Goal(name=name, want=1.0, got=each, unit="candidates", sense="at least"))


def _add_other_seed(made: Report, case: Case, texts: Sequence[Text], baseline: Sequence[Text]) -> None:
    """Texts of two seeds are two draws from one distribution: they may coincide as often as it says, no oftener.

    At T = 1 a text has the probability p that the model gives it, and the other seed's text is the same with that
    probability. Where the model leaves no choice, as in a worked sum, p is not small.
    """
    same = sum(a.token_ids == b.token_ids for a, b in zip(texts, baseline, strict=True))
    chances = [math.exp(text.logprob) for text in texts if text.logprob is not None]
    if len(chances) < len(texts):
        raise ValueError(f"{case}: the journal lacks the probabilities of its texts: begin a new one")
    expected = sum(chances)
    most = math.floor(expected + _DEVIATIONS * math.sqrt(sum(p * (1 - p) for p in chances)))
    unit = f"of {len(texts)}"
    made.rows.append(Row.of(str(case), "texts that are the same", [same], unit))
    made.rows.append(Row.of(str(case), "texts expected to be the same", [expected], unit))
    made.goals.append(Goal(name=f"{case}: texts that are the same", want=most, got=same, unit=unit, sense="at most"))
