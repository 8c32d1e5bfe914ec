"""The sampler in Triton: the tokens of sampling.py, whatever is asked for, and its errors."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import random_tree

from specla.kernels.gpu.adjusting import LogitEntries, adjust_logits
from specla.kernels.gpu.sampler_rows import SamplerConfig, SamplerRows
from specla.kernels.gpu.sampling import FINE, IS_INFINITE, IS_NAN, RULED_OUT, sample
from specla.kernels.sampling import RowSampling, SamplingParams, SessionSampling, adjusted_logits
from specla.kernels.sampling import sample as sample_on_cpu
from specla.kernels.tree import pack

POISON = -77
SMALL = SamplerConfig(chunk=64, sweep=64, warps=1, splits=2)


def drawn(logits, rows, config, *, vocab_size=None, spare=1):
    """Tokens and errors of `rows`, from a buffer with room for `spare` rows more, which must stay as they are."""
    R, V = logits.shape
    device = logits.device
    parameters = SamplerRows(R + spare, vocab_size or V, device, config)
    parameters.fill(rows)
    for scratch in (parameters.scores, parameters.part_best, parameters.part_largest):
        scratch.fill_(float("nan"))
    parameters.part_id.fill_(POISON)
    room = torch.full((R + spare, V), float("nan"), dtype=logits.dtype, device=device)
    room[:R] = logits
    before = room.clone()
    tokens = torch.full((R + spare,), POISON, dtype=torch.int64, device=device)
    errors = torch.full((R + spare,), POISON, dtype=torch.int32, device=device)
    sample(room, parameters, tokens, errors)
    assert torch.equal(room.nan_to_num(), before.nan_to_num()), "logits were written"
    assert bool((tokens[R:] == POISON).all() and (errors[R:] == POISON).all()), "an unused row was written"
    assert bool((parameters.arrived == 0).all()), "the next call would start wrong"
    return tokens[:R].tolist(), errors[:R].tolist()


def rows_of(params, vocab_size, positions=None):
    sessions = [SessionSampling(p, vocab_size) for p in params]
    return RowSampling(sessions, range(len(params)), positions or [7 * i + 1 for i in range(len(params))])


ASKED = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cool": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_k of all": {"top_k": 10_000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6, "temperature": 1.6},
    "min_p": {"min_p": 0.2, "temperature": 1.6},
    "min_p of one": {"min_p": 1.0},
    "top_k, top_p": {"top_k": 12, "top_p": 0.5},
    "top_k, top_p, min_p": {"top_k": 9, "top_p": 0.95, "min_p": 0.1, "temperature": 1.3},
    "greedy ignores them": {"temperature": 0.0, "top_k": 2, "top_p": 0.1},
}


@pytest.mark.parametrize(("vocab_size", "splits"), [(96, 1), (250, 3)])
def test_same_tokens_as_on_a_cpu(vocab_size, splits, device):
    rng = np.random.default_rng(vocab_size)
    params = [SamplingParams(seed=(1 << 63) + i, **asked) for i, asked in enumerate(ASKED.values())]
    rows = rows_of(params, vocab_size, [(1 << 32) - 1 - i for i in range(len(params))])
    logits = torch.from_numpy(rng.normal(0, 2, (len(params), vocab_size)).astype(np.float32))
    want = sample_on_cpu(logits, rows)
    config = SamplerConfig(chunk=128, sweep=128, warps=1, splits=splits)
    tokens, errors = drawn(logits.to(device), rows, config)
    assert dict(zip(ASKED, tokens, strict=True)) == dict(zip(ASKED, want.tokens.tolist(), strict=True))
    assert errors == [FINE] * len(params)


def test_rows_that_sample_in_several_launches(device):
    """As many at a time as there is scratch for: the tokens of one launch."""
    params = [SamplingParams(seed=i, temperature=1.3, top_p=0.7) for i in range(5)]
    rows = rows_of(params, 96)
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (5, 96)).astype(np.float32)).to(device)
    found = []
    for scored in (5, 2):
        scores = torch.full((scored, 96), float("nan"), device=device)
        parameters = SamplerRows(5, 96, device, SMALL, scores=scores)
        parameters.fill(rows)
        tokens, errors = (torch.full((5,), POISON, dtype=torch.int32, device=device) for _ in range(2))
        sample(logits, parameters, tokens, errors)
        assert errors.tolist() == [FINE] * 5
        found.append(tokens.tolist())
    parameters.scores = parameters.scores[:2]
    tokens, errors = (torch.full((5,), POISON, dtype=torch.int32, device=device) for _ in range(2))
    for part in (slice(3, 5), slice(0, 3)):
        sample(logits[part].clone(), parameters, tokens, errors, part=part)
    assert found[0] == found[1] == tokens.tolist() == sample_on_cpu(logits.cpu(), rows).tokens.tolist()


@settings(max_examples=8)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.3, 1.0, 3.0]),
            top_k=st.sampled_from([0, 1, 7]),
            top_p=st.sampled_from([1.0, 0.9, 0.3]),
            min_p=st.sampled_from([0.0, 0.3]),
            seed=st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**32),
)
def test_ties_stand_or_fall_together(params, seed):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = np.random.default_rng(seed)
    rows = rows_of(params, 70)
    logits = torch.from_numpy(rng.integers(-3, 4, (len(params), 70)).astype(np.float32) / 2)
    logits[logits == 0.5] = -float("inf")  # banned
    logits[logits == 0] *= -1
    want = sample_on_cpu(logits, rows).tokens.tolist()
    assert drawn(logits.to(device), rows, SMALL)[0] == want


def test_ties_go_to_the_lowest_id_over_chunks_and_programs(device):
    logits = torch.zeros(3, 300)
    logits[0, [70, 130, 299]] = 1.0
    logits[1, [0, 299]] = 1.0
    logits[2, 299] = 1.0
    rows = rows_of([SamplingParams(temperature=0)] * 3, 300)
    assert drawn(logits.to(device), rows, SMALL)[0] == [70, 0, 299]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_faults_of_a_row_are_its_own(temperature, device):
    logits = torch.zeros(6, 150)
    logits[:, 10] = 60.0
    logits[1, 3] = float("nan")
    logits[2, 140] = float("inf")
    logits[3] = -float("inf")
    logits[4, 3], logits[4, 149] = float("inf"), float("nan")
    logits[5, :10] = -float("inf")
    rows = rows_of([SamplingParams(temperature=temperature, top_p=0.5)] * 6, 150)
    tokens, errors = drawn(logits.to(device), rows, SMALL)
    assert tokens == [10, -1, -1, -1, -1, 10]
    assert errors == [FINE, IS_NAN, IS_INFINITE, RULED_OUT, IS_NAN, FINE]


def test_a_row_does_not_depend_on_its_neighbours_or_its_place(device):
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 1, (3, 120)).astype(np.float32)).to(device)
    params = [SamplingParams(top_p=0.4, seed=9), SamplingParams(temperature=0), SamplingParams(top_k=3, seed=9)]
    together, _ = drawn(logits, rows_of(params, 120, [5, 6, 7]), SMALL, spare=2)
    for i in range(3):
        config = SamplerConfig(chunk=32, sweep=64, warps=1, splits=1)
        assert drawn(logits[i : i + 1], rows_of(params[i : i + 1], 120, [5 + i]), config, spare=0)[0] == [together[i]]


def test_rows_may_stand_apart_and_be_of_half_precision(device):
    rng = np.random.default_rng(4)
    wide = torch.from_numpy(rng.normal(0, 2, (2, 100)).astype(np.float32)).to(torch.float16)
    logits = wide[:, :90]
    rows = rows_of([SamplingParams(temperature=0), SamplingParams(seed=5)], 90)
    want = sample_on_cpu(logits.float(), rows).tokens.tolist()
    parameters = SamplerRows(2, 90, device, SMALL)
    parameters.fill(rows)
    tokens = torch.full((2,), POISON, dtype=torch.int32, device=device)
    errors = torch.full((2,), POISON, dtype=torch.int32, device=device)
    sample(wide.to(device)[:, :90], parameters, tokens, errors)
    assert tokens.tolist() == want
    assert errors.tolist() == [FINE, FINE]


def penalised_rows(vocab_size, rng):
    """A tree of 5 rows over three sessions that ask for adjustments of every kind, and a row that asks nothing."""
    asked = [
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.8, seed=1),
        SamplingParams(temperature=0, logit_bias={3: 9.0, 5: -2.5}, banned_ids=frozenset({3, 11})),
        SamplingParams(repetition_penalty=0.5, logit_bias={2: 1.5}, top_k=20, seed=2),
        SamplingParams(seed=3),
    ]
    prompts = [rng.integers(0, vocab_size, 6).tolist() for _ in asked]
    sessions = [SessionSampling(p, vocab_size, prompt, prompt[:3]) for p, prompt in zip(asked, prompts, strict=True)]
    tokens = [0, int(prompts[0][0]), int(prompts[0][0]), 0, 0, 0]
    return RowSampling(sessions, [0, 0, 0, 1, 2, 3], [9, 10, 11, 9, 9, 9], [-1, 0, 1, -1, -1, -1], tokens)


def test_bias_penalties_and_bans_follow_each_rows_own_path(device):
    rng = np.random.default_rng(5)
    rows = penalised_rows(64, rng)
    logits = torch.from_numpy(rng.normal(0, 3, (6, 64)).astype(np.float32))
    want = sample_on_cpu(logits, rows)
    room = torch.full((7, 80), 5e30, device=device)
    room[:6, :64] = logits
    entries = LogitEntries(7, 64, 200, device)
    entries.fill(rows)
    adjusted = room[:, :64]
    adjust_logits(adjusted, entries)
    assert bool((room[:, 64:] == 5e30).all() and (room[6] == 5e30).all() and torch.equal(adjusted[5].cpu(), logits[5]))
    assert drawn(adjusted[:6], rows, SMALL)[0] == want.tokens.tolist()
    # A path that becomes committed changes no bit.
    grown = SessionSampling(rows.sessions[0].params, 64, np.flatnonzero(rows.sessions[0]._seen), [])
    grown._counts[:] = rows.sessions[0]._counts
    grown.extend(rows.row_tokens[1:3])
    again = logits[2:3].clone().to(device)
    entries = LogitEntries(1, 64, 200, device)
    entries.fill(RowSampling([grown], [0], [11]))
    adjust_logits(again, entries)
    assert torch.equal(again[0], adjusted[2])


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30))
def test_shared_lists_and_own_paths_make_the_logits_of_a_cpu(seed):
    """Random trees over random wishes: every row as `adjusted_logits` has it, at once and in parts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drawn_by, vocab_size = random.Random(seed), 40
    sessions, trees = [], []
    for _ in range(drawn_by.randint(1, 3)):
        wish = SamplingParams(
            repetition_penalty=drawn_by.choice([1.0, 1.3, 0.7]),
            presence_penalty=drawn_by.choice([0.0, 0.6]),
            frequency_penalty=drawn_by.choice([0.0, -0.3]),
            logit_bias=drawn_by.choice([{}, {7: 2.0, 3: -1.0}]),
            banned_ids=drawn_by.choice([frozenset(), frozenset({3, 9})]),
        )
        text = [drawn_by.randrange(vocab_size) for _ in range(drawn_by.randint(1, 30))]
        sessions.append(SessionSampling(wish, vocab_size, text[:4], text[4:]))
        trees.append(random_tree(drawn_by, drawn_by.randint(1, 9)))
    batch = pack(trees)
    tokens = [drawn_by.randrange(6) for _ in range(batch.rows)]  # equal ones on a path, and ids of bias and bans
    rows = RowSampling(sessions, batch.row_sessions, batch.depths, batch.parents, tokens)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (batch.rows, vocab_size)).astype(np.float32))
    entries = LogitEntries(batch.rows, vocab_size, 400, device)
    changes = entries.changes_of(rows)
    whole, parted = logits.clone().to(device), logits.clone().to(device)
    entries.put(changes)
    adjust_logits(whole, entries)
    for part in changes.parts(7):
        assert len(part.shared) <= 7
        entries.put(part)
        adjust_logits(parted, entries)
    assert torch.equal(whole, parted)
    entries.put(changes)
    for rows_at_once in (slice(0, 4), slice(4, batch.rows)):
        in_turns = logits[rows_at_once].clone().to(device)
        if len(in_turns):
            adjust_logits(in_turns, entries, part=rows_at_once)
        assert torch.equal(in_turns, whole[rows_at_once])
    for row, index in enumerate(batch.row_sessions):
        want = adjusted_logits(logits[row].numpy(), sessions[index], rows.path(row))
        np.testing.assert_allclose(whole[row].cpu().numpy(), want, rtol=2.0**-22, atol=1e-6)
        if device.type == "cpu":
            assert np.array_equal(whole[row].numpy(), want)


def test_a_ban_does_not_hide_a_fault(device):
    logits = torch.zeros(3, 20, device=device)
    logits[0, 4], logits[1, 4] = float("nan"), float("inf")
    rows = rows_of([SamplingParams(temperature=0, banned_ids=frozenset({4}))] * 3, 20)
    entries = LogitEntries(3, 20, 3, device)
    entries.fill(rows)
    adjust_logits(logits, entries)
    assert drawn(logits, rows, SMALL) == ([-1, -1, 0], [IS_NAN, IS_INFINITE, FINE])
    entries.fill(rows_of([SamplingParams()], 20))  # nothing is left of the former entries
    fresh = torch.zeros(3, 20, device=device)
    adjust_logits(fresh, entries)
    assert bool((fresh == 0).all())


def test_what_does_not_fit_is_refused(device):
    rows = rows_of([SamplingParams(banned_ids=frozenset({1, 2}))] * 2, 50)
    parameters, tokens = SamplerRows(2, 50, device, SMALL), torch.zeros(2, dtype=torch.int32, device=device)
    parameters.fill(rows)
    logits = torch.zeros(2, 50, device=device)
    with pytest.raises(ValueError, match=r"logits is torch.float64 .*give torch.float32"):
        sample(logits.double(), parameters, tokens, tokens)
    with pytest.raises(ValueError, match=r"give .* \[2, 50\]"):
        sample(logits[:, :40], parameters, tokens, tokens)
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        sample(torch.zeros(50, 2, device=device).T, parameters, tokens, tokens)
    with pytest.raises(ValueError, match="at most 1"):
        SamplerRows(1, 50, device, SMALL).fill(rows)
    with pytest.raises(ValueError, match="50 ids: give sessions of 60"):
        SamplerRows(2, 60, device, SMALL).fill(rows)
    with pytest.raises(ValueError, match="larger sweep"):
        SamplerRows(2, 20_000, device, SamplerConfig(sweep=16))
    with pytest.raises(ValueError, match="powers of two"):
        SamplerConfig(chunk=100)
    with pytest.raises(ValueError, match="4 logits change, with room for 3"):
        LogitEntries(2, 50, 3, device).fill(rows)
    with pytest.raises(ValueError, match=r"give float32 \[2, 50\]"):
        adjust_logits(logits.half(), LogitEntries(2, 50, 3, device))


def is_at_the_border(row, params, token, want):
    """Whether two tokens differ only because a sum of top-p came out on the other side of its bound."""
    weights = np.exp((row - row.max()).astype(np.float64) / (params.temperature or 1))
    total = np.sort(weights)[-params.top_k :].sum()  # of all where top_k is 0
    share = [weights[row > row[i]].sum() / total for i in (token, want)]
    return params.top_p < 1 and min(abs(s - params.top_p) for s in share) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "count"), [(32_000, 64), (151_936, 4), (50_257, 16)])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_same_tokens_for_whole_vocabularies(vocab_size, count, spread, device):
    rng = np.random.default_rng(vocab_size)
    asked = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
        for t in (0.0, 0.7, 1.0, 1.6)
        for k in (0, 1, 50)
        for p in (1.0, 0.9, 0.3)
        for m in (0.0, 0.05)
    ]
    for start in range(0, len(asked), count):
        params = [SamplingParams(seed=start + i, **a) for i, a in enumerate(asked[start : start + count])]
        rows = rows_of(params, vocab_size)
        logits = rng.normal(0, spread, (len(params), vocab_size)).astype(np.float32)
        want = sample_on_cpu(torch.from_numpy(logits), rows).tokens.tolist()
        for config in (None, SamplerConfig(splits=1), SamplerConfig(chunk=2048, warps=16)):
            tokens, errors = drawn(torch.from_numpy(logits).to(device), rows, config)
            assert errors == [FINE] * len(params)
            for i, (token, wanted) in enumerate(zip(tokens, want, strict=True)):
                assert token == wanted or is_at_the_border(logits[i], params[i], token, wanted), (params[i], token)
        whole = torch.from_numpy(logits).to(device)
        alone, _ = drawn(whole[3:4], rows_of(params[3:4], vocab_size, [22]), None, spare=0)
        assert alone == drawn(whole, rows, None)[0][3:4]


@pytest.mark.gpu
def test_bfloat16_logits_and_penalties_of_whole_vocabularies(device):
    rng = np.random.default_rng(8)
    rows = penalised_rows(32_000, rng)
    logits = torch.from_numpy(rng.normal(0, 3, (6, 32_000)).astype(np.float32)).bfloat16()
    adjusted = logits.float().to(device)
    entries = LogitEntries(6, 32_000, 4096, device)
    entries.fill(rows)
    adjust_logits(adjusted, entries)
    assert drawn(adjusted, rows, None)[0] == sample_on_cpu(logits.float(), rows).tokens.tolist()
    plain = rows_of([SamplingParams(seed=i, top_p=0.9) for i in range(6)], 32_000)
    assert drawn(logits.to(device), plain, None)[0] == sample_on_cpu(logits.float(), plain).tokens.tolist()


@pytest.mark.gpu
def test_a_captured_graph_samples_what_its_buffers_hold(device):
    logits = torch.empty(8, 32_000, device=device)
    parameters = SamplerRows(8, 32_000, device)
    tokens = torch.full((8,), POISON, dtype=torch.int32, device=device)
    errors = torch.full((8,), POISON, dtype=torch.int32, device=device)
    rng = np.random.default_rng(9)
    logits.normal_()
    parameters.fill(rows_of([SamplingParams()] * 8, 32_000))
    sample(logits, parameters, tokens, errors)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, parameters, tokens, errors)
    for used in (8, 3, 5):
        host = torch.from_numpy(rng.normal(0, 2, (8, 32_000)).astype(np.float32))
        rows = rows_of([SamplingParams(seed=used * 100 + i, top_k=40, top_p=0.8) for i in range(used)], 32_000)
        logits.copy_(host)
        parameters.fill(rows)
        tokens.fill_(POISON)
        graph.replay()
        want = sample_on_cpu(host[:used], rows).tokens.tolist()
        assert tokens.tolist() == [*want, *[POISON] * (8 - used)]
