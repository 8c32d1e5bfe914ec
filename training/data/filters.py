"""Which documents are worth training on: quality by domain, and near-duplicates of what was kept before."""

import ast
import re
import warnings
from hashlib import blake2b

import numpy as np

COMMON = re.compile(
    r"\b(?:the|of|and|to|in|a|is|that|for|it|as|with|be|on|by|this|are|or|from|not|you|can|if|an|which)\b", re.I
)
WORD = re.compile(r"[A-Za-z]+")
SKIPPED_PATHS = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|migrations|locale|third_party|node_modules)/|(^|/)test_|_test\.py$|_pb2|conftest",
)


def digest(text: str) -> int:
    """A 64-bit hash of a text, the same on every machine and run."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def good_code(path: str, text: str) -> bool:
    """A hand-written Python file of a readable size that parses."""
    if not 400 <= len(text) <= 60_000 or SKIPPED_PATHS.search(path):
        return False
    lines = text.split("\n")
    if max(map(len, lines)) > 200 or sum(map(len, lines)) / len(lines) > 80:
        return False
    _, digits, foreign = _shares(text)
    if digits > 0.12 or foreign > 0.005:
        return False
    if re.search(r"generated (by|from|automatically)|do not edit|auto-?generated", text[:600], re.I):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def good_text(text: str, *, prose: bool) -> bool:
    """English text rather than tables, indexes or other languages; prose must read as such."""
    if len(text) < 300:
        return False
    letters, _, foreign = _shares(text)
    common = len(COMMON.findall(text)) / max(len(WORD.findall(text)), 1)
    return letters > (0.68 if prose else 0.5) and foreign < 0.02 and common > (0.16 if prose else 0.08)


def _shares(text: str) -> tuple[float, float, float]:
    """Shares of ASCII letters, ASCII digits and bytes beyond ASCII in a text's UTF-8 form."""
    raw = np.frombuffer(text.encode(), np.uint8)
    low = raw | 0x20
    letters = np.count_nonzero((low >= ord("a")) & (low <= ord("z")))
    digits = np.count_nonzero((raw >= ord("0")) & (raw <= ord("9")))
    return letters / len(raw), digits / len(raw), np.count_nonzero(raw > 126) / len(raw)


class Deduplicator:
    """Drops documents most of whose lines were seen before, and repeated paragraphs inside texts."""

    def __init__(self, *, most: float = 0.5) -> None:
        """most: the largest share of a document's longer lines that earlier documents may hold."""
        self.most = most
        self._lines: set[int] = set()

    def admit(self, text: str, *, code: bool) -> str:
        """The text without its repeated paragraphs (code: whole or not at all); empty when it is a duplicate."""
        units = [u.strip() for u in text.split("\n" if code else "\n\n")]
        keys = [hash_line(u) for u in units]
        counted = [(u, key) for u, key in zip(units, keys, strict=True) if len(u) > (24 if code else 40)]
        if not counted:
            return ""
        seen = sum(len(u) for u, key in counted if key in self._lines)
        if seen > self.most * sum(len(u) for u, _ in counted):
            return ""
        if not code:
            fresh = [
                u for u, key in zip(text.split("\n\n"), keys, strict=True) if len(u) <= 40 or key not in self._lines
            ]
            text = "\n\n".join(fresh)
        self._lines.update(key for _, key in counted)
        return text


def hash_line(line: str) -> int:
    """A 64-bit hash of a line or paragraph with case, blanks and digits set aside."""
    return digest(re.sub(r"[\W\d_]+", " ", line.lower()))
