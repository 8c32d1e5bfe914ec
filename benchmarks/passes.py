"""What does a pass cost? Verification passes of several sizes over plain decoding, in one engine, interleaved.

Candidates either all fail or all come true, so that both a pass that commits one token and one that commits as
many as it has are timed. Sampling, acceptance and the deferred commit are inside the time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specla.benchmarks.report import Goal, Report, Row
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.engine import Engine
from specla.verifier_service.passes import PassItem
from specla.verifier_service.session import Session

PLAIN = "plain"
GOALS = {5: 1.4, 9: 2.1}  # rows: at most so many plain passes
TEXT_LEN = 512  # tokens of plain text that the candidates which come true are taken from


@dataclass(frozen=True)
class Shape:
    """One kind of pass.

    Attributes:
        name: what the tables call it.
        parents: of the candidates, -1 for the root.
        right: whether the longest path of the candidates comes true; if not, none does.
    """

    name: str
    parents: tuple[int, ...] = ()
    right: bool = False

    @property
    def rows(self) -> int:
        """Root and candidates."""
        return len(self.parents) + 1


def chain(rows: int) -> tuple[int, ...]:
    """Parents of a chain."""
    return tuple(range(-1, rows - 2))


def bushy(rows: int) -> tuple[int, ...]:
    """Parents of a tree: two children under the root, then two under every second node, as drafters send them."""
    return tuple((i // 2) * 2 - 1 if i >= 2 else -1 for i in range(rows - 1))


def shapes(row_counts: Sequence[int]) -> list[Shape]:
    """Plain decoding, then chains and trees of each size, right and wrong."""
    found = [Shape(PLAIN)]
    for rows in row_counts:
        for kind, parents in (("chain", chain(rows)), ("tree", bushy(rows))):
            found += [Shape(f"{kind} of {rows} rows, {'right' if r else 'wrong'}", parents, r) for r in (False, True)]
    return found


class Runner:
    """Sessions of one shape of pass over one prompt; reopened when the known text runs out."""

    def __init__(self, engine: Engine, shape: Shape, prompt: Sequence[int], text: Sequence[int]) -> None:
        self._engine, self._shape, self._prompt, self._text = engine, shape, prompt, text
        self._topology = Topology.from_wire(shape.parents)
        self._session = _open(engine, prompt)

    def step(self) -> float:
        """Run one pass; returns its seconds, tokens drafted and accepted included.

        Raises:
            RuntimeError: the pass committed something else than plain decoding.
        """
        done = self._session.completion_len
        if done + self._shape.rows >= len(self._text):
            self.close()
            self._session, done = _open(self._engine, self._prompt), 0
        item = PassItem(self._session, self._topology, self._candidates(done))
        start = time.perf_counter()
        (result,) = self._engine.run_pass([item])
        seconds = time.perf_counter() - start
        if list(result.tokens) != list(self._text[done : done + len(result.tokens)]):
            raise RuntimeError(f"{self._shape.name}: the pass committed other tokens than plain decoding")
        if self._shape.right and len(result.tokens) != int(self._topology.depth.max()) + 1:
            raise RuntimeError(f"{self._shape.name}: {len(result.tokens)} tokens, not the whole path")
        return seconds

    def close(self) -> None:
        """Give the slot back."""
        self._engine.release(self._session)

    def _candidates(self, done: int) -> list[int]:
        """Tokens for the candidates: a right child is the text's own token, all others are near misses of it."""
        depth = self._topology.depth[1:]
        right_rows = set(self._topology.path(int(self._topology.depth.argmax())))
        tokens, seen = [], set()
        for row, (parent, level) in enumerate(zip(self._shape.parents, depth.tolist(), strict=True), start=1):
            token = self._text[done + level - 1]
            if not (self._shape.right and row in right_rows):
                token = next(
                    t for t in range(self._engine.target.config.vocab_size) if t != token and (parent, t) not in seen
                )
            seen.add((parent, token))
            tokens.append(token)
        return tokens


def measure(
    engine: Engine, prompt: Sequence[int], row_counts: Sequence[int], *, rounds: int, progress: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each pass by shape; every round runs each shape once, in rotating order."""
    text = _plain_text(engine, prompt)
    runners = {shape.name: Runner(engine, shape, prompt, text) for shape in shapes(row_counts)}
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):  # the first two are for the caches
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            took = runners[name].step()
            if turn >= 2:
                seconds[name].append(took)
        progress()
    for runner in runners.values():
        runner.close()
    return seconds


def measure_price(exact: Engine, fast: Engine, prompt: Sequence[int], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of plain passes of both numerics, in turns: what exact costs over the unrestricted fastest form."""
    plain = Shape(PLAIN)
    runners = {n: Runner(e, plain, prompt, _plain_text(e, prompt)) for n, e in (("exact", exact), ("fast", fast))}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(rounds + 2):
        for name in sorted(runners, reverse=turn % 2 == 1):
            took = runners[name].step()
            if turn >= 2:
                seconds[name].append(took)
    for runner in runners.values():
        runner.close()
    return seconds


def add_price(made: Report, seconds: dict[str, list[float]]) -> None:
    """Rows of `measure_price`."""
    for name, samples in seconds.items():
        made.rows.append(Row.of("plain decoding, in turns", name, [s * 1e3 for s in samples], "ms"))
    ratios = [e / f for e, f in zip(seconds["exact"], seconds["fast"], strict=True)]
    made.rows.append(Row.of("plain decoding, in turns", "exact over fast", ratios, "x"))


def add_to(made: Report, case: str, seconds: dict[str, list[float]]) -> None:
    """Rows and goals of one numerics mode: milliseconds, and the ratio to the plain pass of the same round."""
    for name, samples in seconds.items():
        made.rows.append(Row.of(case, name, [s * 1e3 for s in samples], "ms"))
        if name != PLAIN:
            ratios = [s / plain for s, plain in zip(samples, seconds[PLAIN], strict=True)]
            made.rows.append(Row.of(case, f"{name}, over plain", ratios, "x"))
    plain = statistics.median(seconds[PLAIN])
    for rows, want in GOALS.items():
        costs = {n: statistics.median(s) / plain for n, s in seconds.items() if f"of {rows} rows" in n}
        if costs:
            worst = max(costs, key=lambda name: costs[name])
            name = f"{case}: a pass of {rows} rows over plain decoding, the dearest shape ({worst})"
            made.goals.append(Goal(name=name, want=want, got=costs[worst], unit="x", sense="at most"))


def _open(engine: Engine, prompt: Sequence[int]) -> Session:
    stopping = Stopping(max_tokens=engine.config.max_new_tokens, ignore_eos=True)
    session = engine.open(b"", prompt, (), SamplingParams(temperature=0.0), stopping)
    while not engine.prefill(session, engine.config.max_prompt_tokens):
        pass
    return session


def _plain_text(engine: Engine, prompt: Sequence[int]) -> list[int]:
    session = _open(engine, prompt)
    while session.completion_len < TEXT_LEN:
        engine.run_pass([PassItem(session, Topology.root_only())])
    engine.release(session)
    return session.tokens[session.prompt_len :]
