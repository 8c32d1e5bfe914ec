"""What is asked of held-out text: functions to finish, sums to work, prompts to measure with."""

import ast
import json
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from specla.training.data.documents import Document

PROMPTS = {"prose": 60, "code": 60, "maths": 40, "repetitive-code": 40}
CUTS = 2  # prompts tried a document
WORD_LISTS = ("dict-", "wordnet")  # entries in a row are prose by domain, but nothing that a person would prompt with
SHORTEST, LONGEST = 30, 300  # tokens of a prompt


class FunctionProbe(NamedTuple):
    """A held-out function: its head up to the docstring's end, and the body that its author wrote."""

    source: str
    prompt: str
    body: str


def functions(documents: Iterable[Document], *, count: int, seed: int) -> list[FunctionProbe]:
    """Functions with docstrings out of held-out code, at most four a document, drawn by seed."""
    found: list[FunctionProbe] = []
    for document in documents:
        if document.domain == "code" and document.split != "train":
            found += list(_functions(document))[:4]
    random.Random(seed).shuffle(found)
    return found[:count]


def _functions(document: Document) -> Iterator[FunctionProbe]:
    lines = document.text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(document.text)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            docstring, end = node.body[0], node.end_lineno or 0
            head = "\n".join(lines[node.lineno - 1 : docstring.end_lineno]) + "\n"
            if len(head) < 1200 and end - (docstring.end_lineno or 0) <= 30:
                yield FunctionProbe(document.source, head, "\n".join(lines[docstring.end_lineno or 0 : end]))


def prompts(
    documents: Iterable[Document], tokenizer: Tokenizer, *, seed: int, wanted: Mapping[str, int] = PROMPTS
) -> Iterator[dict[str, str]]:
    """Prompts out of held-out documents: {id, domain, text}, 30 to 300 tokens each, so many of a kind as wanted.

    Raises:
        ValueError: the held-out documents yield too few prompts of a kind.
    """
    r = random.Random(seed)
    held_out = [d for d in documents if d.split != "train"]
    r.shuffle(held_out)
    for kind, number in wanted.items():
        domain = "code" if kind == "repetitive-code" else kind
        fit = [d for d in held_out if d.domain == domain and not d.source.startswith(WORD_LISTS)]
        cut = [c for _ in range(CUTS) for d in fit for c in _cut(d, tokenizer, r)]
        if domain == "maths":
            cut = list({text: (text, ids) for text, ids in cut}.values())
        if kind == "repetitive-code":
            cut = [c for c in cut if c[0].count("import ") * 3 < c[0].count("\n")]
            cut.sort(key=lambda c: -_repetition(c[1]))
        elif kind == "code":  # the most repetitive ones are the other kind's
            cut.sort(key=lambda c: -_repetition(c[1]))
            cut = cut[wanted.get("repetitive-code", 0) * 2 :]
            r.shuffle(cut)
        if len(cut) < number:
            raise ValueError(f"held-out {domain} yields {len(cut)} prompts; {number} are wanted")
        for i, (text, _) in enumerate(cut[:number]):
            yield {"id": f"{kind}-{i:03}", "domain": kind, "text": text}


def _cut(document: Document, tokenizer: Tokenizer, r: random.Random) -> Iterator[tuple[str, list[int]]]:
    """At most one prompt a document, as (text, ids); it ends at a line's or word's end so that it can be continued."""
    text = document.text
    if document.domain == "maths":
        text = text[: text.index("\nAnswer:") + len("\nAnswer:")]
        if "The answer is" not in document.text:
            return
    else:
        start = text.find("\n", r.randrange(max(1, len(text) - 1500))) + 1
        text = text[start : start + r.randrange(300, 1000)]
        text = text[: max(text.rfind("\n") + 1 if document.domain == "code" else text.rfind(" "), 0)]
    ids = tokenizer.encode(text).ids
    if SHORTEST <= len(ids) <= LONGEST and text.strip():
        yield text, ids


def _repetition(ids: list[int]) -> float:
    """Share of the 4-grams that stood before."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / max(len(grams), 1)


def write_prompts(documents: Iterable[Document], tokenizer: Tokenizer, path: Path, *, seed: int) -> int:
    """Write prompts as JSON lines; returns how many."""
    rows = list(prompts(documents, tokenizer, seed=seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
