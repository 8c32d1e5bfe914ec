"""Where fast numerics choose another token than exact ones: how often, and how near a tie exact decoding was there.

Both modes read the same held-out texts, so that one difference does not make everything behind it another text. Exact
mode's choices are those of plain decoding, whatever the passes; fast mode runs in passes of several rows, as it does
with drafts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specla.benchmarks.report import Report, Row
from specla.verifier_service.engine import Engine

CASE = "fast against exact"
MILLION = 1e6


class Difference(NamedTuple):
    """A place where the modes choose differently."""

    text: int
    position: int
    exact: int
    fast: int
    margin: float
    """Of exact mode's best logit over its second."""


def differences(
    exact: Engine, fast: Engine, texts: Sequence[Sequence[int]], rows: int, progress: Callable[[], None]
) -> list[Difference]:
    """All places of the texts where greedy choices differ.

    Args:
        exact: an engine of exact numerics.
        fast: one of fast numerics, of the same target.
        texts: token ids.
        rows: of a pass.
        progress: called after every text.
    """
    found = []
    for index, text in enumerate(texts):
        pairs = zip(exact.greedy_choices(text, rows), fast.greedy_choices(text, rows), strict=True)
        for position, (one, other) in enumerate(pairs, 1):
            if one.token != other.token:
                found.append(Difference(index, position, one.token, other.token, one.margin))
        progress()
    return found


def add_to(made: Report, found: Sequence[Difference], tokens: int) -> None:
    """Rows of a report: differences a million tokens, and their margins."""
    rate = len(found) / tokens * MILLION
    made.rows.append(Row.of(CASE, "other choices a million tokens", [rate], "tokens"))
    if found:
        made.rows.append(Row.of(CASE, "margin of the two best logits there", [d.margin for d in found], "logits"))
        made.rows.append(Row.of(CASE, "largest margin there", [max(d.margin for d in found)], "logits"))
    made.notes.update(tokens=tokens, differences=len(found))
