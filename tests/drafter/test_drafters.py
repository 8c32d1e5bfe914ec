"""Each drafter: valid trees, planted repetitions found, probabilities that hold."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafter import Drafter, DraftState
from specla.drafter_service.drafters.lookup import LookupDrafter
from specla.drafter_service.drafters.make import make_drafter
from specla.drafter_service.drafters.none import NoneDrafter
from specla.drafter_service.drafters.oracle import OracleDrafter
from specla.drafter_service.drafters.random import RandomDrafter
from specla.drafter_service.drafters.suffix import SuffixDrafter
from specla.drafter_service.tree import ROOT, DraftTree
from specla.kernels.topology import Topology
from specla.rpc.errors import InvalidRequestError
from specla.v1 import common_pb2

GREEDY = common_pb2.Sampling(temperature=0.0)
MAKERS: dict[str, Callable[[], Drafter]] = {
    "none": NoneDrafter,
    "lookup": LookupDrafter,
    "suffix": SuffixDrafter,
    "suffix with history": lambda: SuffixDrafter(history_tokens=64),
    "random": lambda: RandomDrafter(seed=3),
    "oracle chain": lambda: OracleDrafter([list(range(200))], rate=0.7),
    "oracle tree": lambda: OracleDrafter([list(range(200))], rate=0.7, branching=3),
}


def check(tree: DraftTree, budget: int, highest_id: int) -> None:
    assert len(tree) <= budget
    Topology.from_wire(tree.parents, tree.tokens)
    assert all(math.isfinite(log_prob) and log_prob <= 0 for log_prob in tree.log_probs)
    assert all(0 <= token <= highest_id for token in tree.tokens)


def accepted(tree: DraftTree, text: Sequence[int]) -> int:
    """How many tokens of the text a verifier would take from the tree."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, taken = ROOT, 0
    for token in text:
        if (node, token) not in children:
            break
        node, taken = children[node, token], taken + 1
    return taken


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    steps=st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 32)), max_size=8),
)
def test_trees_are_valid_whatever_happens(
    maker: Callable[[], Drafter], tokens: list[int], steps: list[tuple[list[int], int]]
) -> None:
    drafter = maker()
    for _ in range(2):
        state = drafter.start(tokens, GREEDY)
        for more, budget in steps:
            first = state.draft(budget)
            check(first, budget, 199)
            assert state.draft(budget) == first
            state.extend(more)
        state.finish()


@pytest.mark.parametrize("maker", [LookupDrafter, SuffixDrafter], ids=["lookup", "suffix"])
def test_a_planted_repetition_is_drafted_to_the_end_of_the_budget(maker: Callable[[], Drafter]) -> None:
    noise = random.Random(1)
    phrase = [1000 + i for i in range(20)]
    state = maker().start([*(noise.randrange(500) for _ in range(300)), *phrase, 7, *phrase[:4]], GREEDY)
    assert accepted(state.draft(8), phrase[4:]) >= 2
    for token in phrase[4:10]:
        state.extend([token])
    # Having been right, it reaches further.
    assert accepted(state.draft(8), phrase[10:]) == 8


@pytest.mark.parametrize("maker", [LookupDrafter, SuffixDrafter], ids=["lookup", "suffix"])
def test_two_continuations_become_siblings(maker: Callable[[], Drafter]) -> None:
    state = maker().start([1, 2, 3, 10, 1, 2, 4, 11, 1, 2, 3, 12, 1, 2], GREEDY)
    tree = state.draft(16)
    behind_root = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT]
    assert sorted(behind_root) == [3, 4]


@pytest.mark.parametrize("maker", [LookupDrafter, SuffixDrafter], ids=["lookup", "suffix"])
def test_a_loop_is_drafted_beyond_what_there_is_of_it(maker: Callable[[], Drafter]) -> None:
    state = maker().start([1, 2, 3] * 4, GREEDY)
    for _ in range(3):
        state.draft(12)
        state.extend([1, 2, 3] * 4)
    assert state.draft(12).tokens == (1, 2, 3) * 4


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 20))
def test_the_likeliest_candidates_come_first_and_a_larger_budget_adds_to_them(tokens: list[int], budget: int) -> None:
    state = SuffixDrafter().start(tokens, GREEDY)
    paths = state.draft(24).path_log_probs()
    assert paths == pytest.approx(sorted(paths, reverse=True))
    assert state.draft(budget).path_log_probs() == pytest.approx(paths[:budget])


def test_chances_of_siblings_add_up_to_less_than_one() -> None:
    noise = random.Random(2)
    state = SuffixDrafter(branching=8).start([noise.randrange(6) for _ in range(400)], GREEDY)
    tree = state.draft(32)
    assert len(tree) > 8
    for node in {*tree.parents}:
        chances = [math.exp(p) for p, parent in zip(tree.log_probs, tree.parents, strict=True) if parent == node]
        assert sum(chances) < 1


def _markov(rng: random.Random, length: int, sureness: float) -> list[int]:
    """A text over 50 ids in which the next one is a function of the last two, but for a share of noise."""
    text = [rng.randrange(50), rng.randrange(50)]
    while len(text) < length:
        sure = (text[-2] * 7 + text[-1] * 13 + 5) % 50
        text.append(sure if rng.random() < sureness else rng.randrange(50))
    return text


@pytest.mark.parametrize("maker", [LookupDrafter, SuffixDrafter], ids=["lookup", "suffix"])
@pytest.mark.parametrize("sureness", [0.3, 0.6, 0.9])
def test_log_probs_tell_how_often_candidates_come_true(maker: Callable[[], Drafter], sureness: float) -> None:
    text = _markov(random.Random(4), 2500, sureness)
    state = maker().start(text[:300], GREEDY)
    expected = got = 0.0
    position = 300
    while position < len(text) - 40:
        tree = state.draft(12)
        taken = accepted(tree, text[position:])
        if position > 800:
            expected += sum(math.exp(path) for path in tree.path_log_probs())
            got += taken
        state.extend(text[position : position + taken + 1])
        position += taken + 1
    assert got > 50
    assert 0.75 < expected / got < 1.33


@pytest.mark.parametrize("maker", [LookupDrafter, SuffixDrafter], ids=["lookup", "suffix"])
def test_noise_teaches_to_expect_nothing(maker: Callable[[], Drafter]) -> None:
    noise = random.Random(5)
    state = maker().start([noise.randrange(40) for _ in range(1500)], GREEDY)
    worth = []
    for _ in range(100):
        state.extend([noise.randrange(40)])
        worth.append(sum(math.exp(path) for path in state.draft(8).path_log_probs()[:1]))
    assert sum(worth) / len(worth) < 0.1


def test_lookup_keeps_to_its_shortest_context() -> None:
    text = [5, 6, 8, 9, 1, 6]  # only the last token has stood before
    assert len(LookupDrafter(min_ngram=2).start(text, GREEDY).draft(4)) == 0
    assert LookupDrafter(min_ngram=1).start(text, GREEDY).draft(4).tokens[0] == 8


def _draft_after_another_session(history_tokens: int) -> DraftTree:
    drafter = SuffixDrafter(history_tokens=history_tokens)
    former = drafter.start([1], GREEDY)
    former.extend(list(range(100, 160)))
    former.finish()
    return drafter.start([2, 120, 121, 122, 123], GREEDY).draft(8)


def test_suffix_shares_outputs_only_when_told() -> None:
    assert len(_draft_after_another_session(0)) == 0
    assert _draft_after_another_session(1000).tokens[:2] == (124, 125)


def test_suffix_history_keeps_outputs_not_prompts_and_forgets_the_oldest() -> None:
    drafter = SuffixDrafter(history_tokens=100)

    def say(prompt: list[int], output: list[int]) -> None:
        state = drafter.start(prompt, GREEDY)
        state.extend(output)
        state.finish()

    def knows(context: list[int]) -> bool:
        return len(drafter.start(context, GREEDY).draft(4)) > 0

    say([500, 501, 502, 503], list(range(40)))
    assert knows([700, 10, 11])
    assert not knows([700, 501, 502])
    say([1], list(range(100, 140)))
    assert knows([700, 10, 11])
    say([1], list(range(200, 240)))
    assert not knows([700, 10, 11])
    assert knows([700, 110, 111])
    assert knows([700, 210, 211])


def test_random_is_a_function_of_seed_and_position_and_claims_what_it_is_told() -> None:
    def draft(seed: int, tokens: list[int]) -> DraftTree:
        return RandomDrafter(seed=seed, probability=0.25).start(tokens, GREEDY).draft(16)

    assert draft(1, [3, 90]) == draft(1, [90, 3])
    assert draft(1, [3, 90]) != draft(2, [3, 90])
    assert draft(1, [3, 90]) != draft(1, [3, 90, 3])
    assert set(draft(1, [3, 90]).log_probs) == {math.log(0.25)}
    assert len(set(draft(1, [3, 90]).parents)) > 2


@pytest.mark.parametrize("branching", [1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 1.0])
def test_oracle_is_right_at_its_rate(rate: float, branching: int) -> None:
    rng = random.Random(6)
    text = [rng.randrange(500) for _ in range(3000)]
    oracle = OracleDrafter([[1, 2], text], rate=rate, branching=branching, seed=7)
    state: DraftState = oracle.start(text[:10], GREEDY)
    right = tried = 0
    for position in range(10, 2990):
        tree = state.draft(branching)
        assert len(tree) == branching
        right += text[position] in tree.tokens
        tried += 1
        state.extend([text[position]])
    assert abs(right / tried - rate) < 0.03
    assert math.exp(tree.log_probs[0]) * branching == pytest.approx(rate, abs=1e-5)


def test_oracle_goes_on_behind_accepted_tokens_and_stops_where_the_text_leaves_the_recording() -> None:
    text = list(range(50))
    state = OracleDrafter([text], rate=1.0).start(text[:5], GREEDY)
    assert state.draft(6).tokens == (5, 6, 7, 8, 9, 10)
    state.extend(text[5:48])
    assert state.draft(6).tokens == (48, 49)
    state.extend([3])
    assert len(state.draft(6)) == 0


def test_oracle_reads_its_file_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps({"token_ids": [1, 2, 3]}) + "\n" + json.dumps({"token_ids": [4, 5]}) + "\n")
    drafter = make_drafter(DrafterConfig(name="oracle", oracle_file=good, oracle_rate=1.0))
    assert drafter.start([4], GREEDY).draft(3).tokens == (5,)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"token_ids": [1]}\n{"ids": [2]}\n')
    with pytest.raises(InvalidRequestError, match="line 2") as refused:
        make_drafter(DrafterConfig(name="oracle", oracle_file=bad))
    assert refused.value.field == "oracle_file"
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        make_drafter(DrafterConfig(name="oracle", oracle_file=tmp_path / "none"))


def test_make_drafter_knows_each_name() -> None:
    for name in ("none", "lookup", "suffix", "random"):
        assert make_drafter(DrafterConfig(name=name)).name == name
