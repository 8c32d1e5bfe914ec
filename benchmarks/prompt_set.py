"""Held-out prompts for the benchmarks: texts that the shipped models were never trained on."""

import json
from dataclasses import dataclass
from pathlib import Path

from specla.rpc.errors import InvalidRequestError

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
        InvalidRequestError: the file cannot be read, a line of it is no prompt, or no prompt is left.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise _refusal(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _refusal(f"{path} is not UTF-8 at byte {error.start}") from None
    prompts = [_parsed(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if domain is not None:
        prompts = [prompt for prompt in prompts if prompt.domain == domain]
    if limit is not None and limit < len(prompts):
        prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
    if not prompts:
        raise _refusal(f"{path} has no prompts" + (f" of domain {domain!r}" if domain is not None else ""))
    return prompts


def _parsed(line: str, place: str) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise _refusal(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() != {"id", "domain", "text"}:
        raise _refusal(f"{place} is no prompt")
    if not all(isinstance(value, str) and value for value in fields.values()):
        raise _refusal(f"{place} holds something else than text, or nothing")
    return Prompt(**fields)


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError("prompts", what, hint="Give a file of JSON lines {id, domain, text}, all of them text")
