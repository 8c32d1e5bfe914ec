"""Acceptance: the walk against the reference, ends of text, and the distribution of what is committed."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from generations import engine_of, open_ready, random_prompt
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specla.kernels import reference
from specla.kernels.sampling import FAILED_TOKEN, RowSampling, SessionSampling, sample
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.acceptance import Finish, FinishReason, Stopping, walk, walk_words
from specla.verifier_service.passes import PassItem

SEEDS = 20_000


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents, candidates and one sampled token a row, over few tokens so that candidates are often hit."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, node - 1))
        siblings = [t for p, t in zip(parents, tokens, strict=True) if p == parent]
        free = [t for t in range(6) if t not in siblings]
        if free:
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
        else:
            break
    return parents, tokens, draw(st.lists(st.integers(0, 5), min_size=len(tokens) + 1, max_size=len(tokens) + 1))


Tree = tuple[list[int], list[int], list[int]]


def walks(trees: Sequence[Tree]) -> list[tuple[list[int], list[int]]]:
    """Of trees of one pass the rows and tokens of each one's walk."""
    batch = pack([Topology.from_wire(parents, tokens) for parents, tokens, _ in trees])
    rows = [row for _, tokens, _ in trees for row in (-7, *tokens)]
    sampled = [token for tree in trees for token in tree[2]]
    out = np.full(walk_words(batch.rows), -9, np.int32)
    found = walk(batch, np.array(rows, np.int32), np.array(sampled, np.int32), out)
    assert found.firsts[0] == 0
    assert found.firsts[-1] == len(found.rows) == len(found.tokens)
    assert out[len(trees) + 1 :][: len(trees)].tolist() == np.diff(found.firsts).tolist()
    return [(list(found.rows[a:b]), list(found.tokens[a:b])) for a, b in pairwise(found.firsts)]


@given(st.lists(trees(), min_size=1, max_size=4))
def test_walks_against_the_reference(of_pass: list[Tree]) -> None:
    for (parents, tokens, sampled), (rows, found) in zip(of_pass, walks(of_pass), strict=True):
        wanted = reference.accept([-1, *(p + 1 for p in parents)], [-1, *tokens], sampled)
        assert rows == wanted.rows
        assert found == [*(tokens[row - 1] for row in rows[1:]), wanted.bonus_token]


def test_a_row_that_failed_ends_its_walk() -> None:
    failed = ([-1, 0], [3, 4], [3, FAILED_TOKEN, 4])
    assert walks([failed, failed]) == [([0, 1], [3, FAILED_TOKEN])] * 2


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.integers(1, 6),
    st.sets(st.integers(0, 5), max_size=2),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_first_token_that_ends_a_text(
    tokens: list[int], max_tokens: int, stop_ids: set[int], ignore_eos: bool, completion_len: int
) -> None:
    stopping = Stopping(
        max_tokens=max_tokens, stop_ids=frozenset(stop_ids), ignore_eos=ignore_eos, eos_ids=frozenset({5})
    )
    ends = [stopping.finish_of(token, completion_len + i) for i, token in enumerate(tokens, 1)]
    wanted = next(((i, end) for i, end in enumerate(ends, 1) if end is not None), (len(tokens), None))
    assert stopping.cut(tokens, completion_len) == wanted
    assert (wanted[1] is None) == (stopping.ends.isdisjoint(tokens) and completion_len + len(tokens) < max_tokens)


def test_reasons_and_their_precedence() -> None:
    stopping = Stopping(max_tokens=3, stop_ids=frozenset({7}), eos_ids=frozenset({0, 7}))
    assert stopping.finish_of(7, 3) == Finish(FinishReason.STOP_ID, 7)
    assert stopping.finish_of(0, 3) == Finish(FinishReason.EOS)
    assert stopping.finish_of(1, 3) == Finish(FinishReason.LENGTH)
    assert stopping.finish_of(1, 2) is None
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        Stopping(max_tokens=-1).validate(10)


# The distribution of two tokens behind fixed prefixes, drafted by a tree: the two best candidates of the root.


@pytest.fixture(scope="module", params=[1, 2, 3])
def drafted_tree(request: pytest.FixtureRequest, tiny_target: Path) -> tuple[Topology, list[int], NDArray[np.float32]]:
    """A tree of likely candidates and the target's logits after each of its rows."""
    engine = engine_of(tiny_target)
    session = open_ready(engine, random_prompt(320, 20, seed=request.param))
    assert session.slot is not None

    def logits_of(parents: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        topology = Topology.from_wire(parents, tokens)
        (result,) = engine.run_pass([PassItem(session, topology, tokens, top_k=320)])
        assert result.top is not None
        rows = np.empty((len(result.top), 320), dtype=np.float32)
        for row, entry in zip(rows, result.top, strict=True):
            for token, logprob in entry.top:
                row[token] = logprob * 1.5  # sharper than a random model: more cells hold five of the 20,000 seeds
        return rows

    first = logits_of([], [])[0]
    best, second = (int(i) for i in np.argsort(-first)[:2])
    rows = [first]
    for token in (best, second):
        session = open_ready(engine, [*random_prompt(320, 20, seed=request.param), token])
        rows.append(logits_of([], [])[0])
    engine.close()
    return Topology.from_wire([-1, -1], [best, second]), [best, second], np.stack(rows)


Pairs = Counter[tuple[int, ...]]


def committed(tree: tuple[Topology, list[int], NDArray[np.float32]], temperature: float) -> Pairs:
    """The first two tokens that the pass commits, or the one if it commits no more, for every seed."""
    topology, tokens, logits = tree
    parents = [row - 1 for row in topology.parent_rows[1:]]
    found: Pairs = Counter()
    for seed in range(SEEDS):
        session = SessionSampling(SamplingParams(temperature=temperature, seed=seed), logits.shape[1])
        rows = RowSampling([session], [0, 0, 0], [20, 21, 21], topology.parent_rows, [0, *tokens])
        sampled = sample(logits, rows).tokens.tolist()
        ((_, walked),) = walks([(parents, tokens, sampled)])
        found[tuple(walked[:2])] += 1
    return found


def wrongly_committed(tree: tuple[Topology, list[int], NDArray[np.float32]], temperature: float) -> Pairs:
    """A candidate is taken with its target probability, and else a token is drawn from the whole target distribution:
    the mistake of treating certain candidates as if sampled."""
    topology, tokens, logits = tree
    found: Pairs = Counter()
    rng = np.random.default_rng(0)
    probabilities = [softmax(row / temperature) for row in logits]
    totals = [p.cumsum() for p in probabilities]
    for _ in range(SEEDS):
        row, text = 0, []
        while True:
            taken = next((c for c in topology.children[row] if rng.random() < probabilities[row][tokens[c - 1]]), None)
            if taken is None:
                text.append(int(np.searchsorted(totals[row], rng.random() * totals[row][-1])))
                break
            text.append(tokens[taken - 1])
            row = taken
        found[tuple(text[:2])] += 1
    return found


def softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def chi_square_p(
    found: Pairs, tree: tuple[Topology, list[int], NDArray[np.float32]], temperature: float
) -> tuple[float, int]:
    """Upper tail probability and degrees of freedom against the target's own distribution; cells below 5 are joined."""
    topology, tokens, logits = tree
    first = softmax(logits[0] / temperature)
    expected: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(first):
        child = next((c for c in topology.children[0] if tokens[c - 1] == token), None)
        if child is None:
            expected[(token,)] = float(p)
        else:
            after = softmax(logits[child] / temperature)
            expected |= {(token, following): float(p * q) for following, q in enumerate(after)}
    big = {cell: SEEDS * p for cell, p in expected.items() if SEEDS * p >= 5}
    rest = SEEDS - sum(big.values())
    statistic = sum((found[cell] - e) ** 2 / e for cell, e in big.items())
    others = SEEDS - sum(found[cell] for cell in big)
    assert rest >= 5
    statistic += (others - rest) ** 2 / rest
    freedom = len(big)
    # Wilson and Hilferty: the cube root of a chi-square is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2)), freedom


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_committed_tokens_have_the_targets_distribution(
    drafted_tree: tuple[Topology, list[int], NDArray[np.float32]], temperature: float
) -> None:
    p, freedom = chi_square_p(committed(drafted_tree, temperature), drafted_tree, temperature)
    assert freedom > 30
    assert p > 1e-3
    p, _ = chi_square_p(wrongly_committed(drafted_tree, temperature), drafted_tree, temperature)
    assert p < 1e-9
