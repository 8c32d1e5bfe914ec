"""Held-out prompts for the benchmarks: texts that the shipped models were never trained on."""

import json
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = Path(__file__).resolve().parent / "prompts" / "held_out.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One prompt of the held-out set."""

    id: str
    domain: str
    text: str


def load(path: Path = HELD_OUT, *, domain: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON-lines file, in order.

    Args:
        path: file of {id, domain, text} lines.
        domain: keep only this domain.
        limit: keep at most so many, spread evenly over the file so that every domain stays represented.

    Raises:
        ValueError: no prompt is left.
    """
    prompts = [Prompt(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    if domain is not None:
        prompts = [prompt for prompt in prompts if prompt.domain == domain]
    if limit is not None and limit < len(prompts):
        prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
    if not prompts:
        raise ValueError(f"no prompts of domain {domain!r} in {path.name}")
    return prompts
