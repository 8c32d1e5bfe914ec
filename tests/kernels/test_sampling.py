"""The sampler: refusals, order of processing, draws, distribution, independence of rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specla.kernels import sampling
from specla.kernels.philox import gumbel_noise
from specla.kernels.sampling import RowSampling, SamplingError, SamplingParams, SessionSampling, sample

NAN, INF = float("nan"), float("inf")


def draw_one(logits, params: SamplingParams, position: int = 0, prompt=(), output=()) -> int:
    row = np.asarray(logits, dtype=np.float32)[None]
    session = SessionSampling(params, row.shape[1], prompt, output)
    return int(sample(torch.from_numpy(row), RowSampling([session], [0], [position])).tokens[0])


def processed(logits, params: SamplingParams, prompt=(), output=(), path=()) -> list[float]:
    row = np.asarray(logits, dtype=np.float32)
    return sampling.adjusted_logits(row, SessionSampling(params, len(row), prompt, output), path).tolist()


def kept(logits, **params) -> list[int]:
    row = np.asarray(logits, dtype=np.float32)
    return np.flatnonzero(row >= sampling.truncation_threshold(row, SamplingParams(**params))).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (NAN, INF, -0.1, 1e-5)],
        ("top_k", -1),
        *[("top_p", v) for v in (0.0, -0.1, 1.01, NAN)],
        *[("min_p", v) for v in (-0.1, 1.01, NAN)],
        *[("repetition_penalty", v) for v in (0.0, -1.0, 1e-38, 9e-4, 1001.0, INF, NAN)],
        *[(f, v) for f in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, NAN)],
        *[("logit_bias", v) for v in ({10: 1.0}, {-1: 1.0}, {3: NAN}, {3: INF}, {3: 3.4e38}, {3: -10001.0})],
        *[("banned_ids", v) for v in (frozenset({10}), frozenset({-1}), frozenset(range(10)))],
        *[("seed", v) for v in (-1, 1 << 64)],
        *[("top_logprobs", v) for v in (-1, 11)],
    ],
)
def test_unusable_parameters_are_refused_by_name(field, value):
    with pytest.raises(SamplingError, match=field) as caught:
        SamplingParams(**{field: value}).validate(10)
    assert caught.value.field == field
    assert caught.value.what
    assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize("value", [0.0, 1e-4, float(np.float32(1e-4)), 1.0, 5.0])
def test_usable_temperatures(value):
    SamplingParams(temperature=value, top_p=1.0, min_p=1.0, seed=(1 << 64) - 1).validate(10)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the shortlist's limit: it then holds every token
@pytest.mark.parametrize("bias", [-1e4, 1e4])
@pytest.mark.parametrize("penalty", [1e-3, 1e3])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 3e38])
def test_no_usable_parameters_overflow(bias, penalty, temperature):
    logits = np.array([[-1e6, -1.0, 0.0, 1.0, 1e6]], dtype=np.float32)
    everywhere = dict.fromkeys(range(5), bias)
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, frequency_penalty=-2.0, logit_bias=everywhere
    )
    params.validate(5)
    session = SessionSampling(params, 5, range(5), range(5))
    result = sample(torch.from_numpy(logits), RowSampling([session], [0], [0]))
    assert result.errors == {}
    assert np.isfinite(sampling.adjusted_logits(logits[0], session, ())).all()


def test_bans_repetition_presence_frequency_and_bias_by_hand():
    logits = [2.0, -2.0, 1.0, 4.0, 0.5]
    assert processed(logits, SamplingParams(temperature=0, logit_bias={1: 3.0})) == [2.0, 1.0, 1.0, 4.0, 0.5]
    assert processed(logits, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[0], output=[1, 1]) == [
        *(1.0, -4.0, 1.0, 4.0, 0.5)
    ]
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    assert processed(logits, params, prompt=[3, 3], output=[0, 0, 2]) == [1.0, -2.0, 0.25, 4.0, 0.5]
    assert processed(logits, params, output=[0], path=[0, 2]) == [1.0, -2.0, 0.25, 4.0, 0.5]
    assert processed(logits, SamplingParams(temperature=2.0, banned_ids=frozenset({3})))[:4] == [1.0, -1.0, 0.5, -INF]


def test_bias_comes_before_repetition_and_bans_come_last():
    params = SamplingParams(
        temperature=0,
        logit_bias={0: 3.0, 1: 9.0},
        repetition_penalty=2.0,
        banned_ids=frozenset({1}),
        presence_penalty=1,
    )
    assert processed([1.0, 0.0, 0.0], params, output=[0]) == [1.0, -INF, 0.0]


def test_truncation_edges():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert kept(logits, top_k=2) == [0, 1]
    assert kept(logits, top_k=4) == kept(logits, top_k=99) == kept(logits) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [0]
    assert kept(logits, top_p=0.39) == [0]
    assert kept(logits, top_p=0.41) == kept(logits, top_p=0.69) == [0, 1]
    assert kept(logits, top_p=0.95) == kept(logits, top_p=1 - 1e-9) == [0, 1, 2, 3]
    assert kept(logits, min_p=0.45) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


def test_top_p_counts_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert kept(logits, top_p=0.65) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]  # 0.4 of 0.7


def test_equal_logits_stay_together_at_a_border():
    assert kept([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2) == [0, 1, 2, 4]
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.3) == [0, 1, 2, 3]


def test_a_nucleus_beyond_the_first_guess_is_found():
    logits = np.linspace(0, 0.01, 4 * sampling.NUCLEUS_GUESS, dtype=np.float32)
    count = len(kept(logits, top_p=0.5))
    weights = np.exp(logits.astype(np.float64))[::-1]
    assert count == int(np.searchsorted(np.cumsum(weights), 0.5 * weights.sum())) + 1


@pytest.mark.parametrize("dtype_rows", [1, 3])
def test_greedy_ties_go_to_the_lowest_id(dtype_rows):
    logits = torch.zeros(dtype_rows, 20_000)
    logits[:, [77, 900, 19_999]] = 5.0
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={3: 0.5})):
        session = SessionSampling(params, 20_000)
        rows = RowSampling([session], [0] * dtype_rows, list(range(dtype_rows)))
        assert sample(logits, rows).tokens.tolist() == [77] * dtype_rows


def test_a_draw_is_the_argmax_of_logits_and_noise():
    logits = np.random.default_rng(0).normal(0, 2, 5000).astype(np.float32)
    for position in range(20):
        expected = int((logits / np.float32(0.7) + gumbel_noise(11, position, 5000)).argmax())
        assert draw_one(logits, SamplingParams(temperature=0.7, seed=11), position) == expected


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 5.0, 300.0, 1e5]), st.integers(2, 3000))
def test_the_shortlist_never_loses_the_winner(seed, spread, size):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 1, size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.1] = -np.inf
    logits[0] = 0.0
    for position in range(4):
        expected = int((logits + gumbel_noise(seed, position, size)).argmax())
        assert draw_one(logits, SamplingParams(seed=seed), position) == expected


def test_a_faulty_row_fails_alone():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    alone = logits.clone()
    logits[1, 7], logits[2, 0], logits[3] = NAN, INF, -INF
    for params in (SamplingParams(temperature=0), SamplingParams(seed=3, top_k=5), SamplingParams(seed=3)):
        session = SessionSampling(params, 50)
        result = sample(logits, RowSampling([session], [0] * 5, [0, 1, 2, 3, 4]))
        expected = sample(alone, RowSampling([session], [0] * 5, [0, 1, 2, 3, 4])).tokens
        assert result.tokens.tolist() == [expected[0], -1, -1, -1, expected[4]]
        assert set(result.errors) == {1, 2, 3}
        assert "1 of 50 logits are NaN" in result.errors[1]
        assert "infinite" in result.errors[2]
        assert "ruled out" in result.errors[3]


def test_bans_that_leave_nothing_are_an_error_of_the_row():
    session = SessionSampling(SamplingParams(temperature=0, banned_ids=frozenset({1})), 3)
    result = sample(torch.tensor([[-INF, 1.0, -INF]]), RowSampling([session], [0], [0]))
    assert result.tokens.tolist() == [-1]
    assert "ruled out" in result.errors[0]


def test_wrong_shapes_and_types_are_refused():
    session = SessionSampling(SamplingParams(), 8)
    with pytest.raises(ValueError, match="one of each"):
        sample(torch.zeros(2, 8), RowSampling([session], [0], [0]))
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(1, 8, dtype=torch.float64), RowSampling([session], [0], [0]))


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 9: -4.0}]),
    banned_ids=st.sampled_from([frozenset(), frozenset({1, 2})]),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.sampled_from([None, 0, 3]),
)


def random_batch(params: list[SamplingParams], seed: int, size: int = 60) -> tuple[torch.Tensor, RowSampling]:
    """Sessions with trees of up to six rows each."""
    rng = np.random.default_rng(seed)
    sessions, row_session, positions, parents, tokens = [], [], [], [], []
    for i, wish in enumerate(params):
        sessions.append(
            SessionSampling(wish, size, rng.integers(0, size, 4).tolist(), rng.integers(0, size, 9).tolist())
        )
        root, depth = len(parents), [0]
        for node in range(int(rng.integers(1, 7))):
            parent = int(rng.integers(0, node)) if node else -1
            parents.append(root + parent if node else -1)
            depth.append(depth[parent + 1] + 1 if node else 0)
            positions.append(13 + (depth[-1] if node else 0))
            tokens.append(int(rng.integers(0, size)))
            row_session.append(i)
    logits = torch.from_numpy((rng.normal(0, 2, (len(parents), size))).astype(np.float32))
    return logits, RowSampling(sessions, row_session, positions, parents, tokens)


@settings(max_examples=80)
@given(st.lists(any_params, min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_row_alone_draws_what_it_draws_in_the_batch(params, seed):
    logits, rows = random_batch(params, seed)
    batch = sample(logits, rows)
    for i in range(len(logits)):
        session = rows.sessions[rows.row_session[i]]
        path = rows.path(i)
        chain = RowSampling(
            [session],
            [0] * (len(path) + 1),
            [rows.positions[i]] * (len(path) + 1),
            list(range(-1, len(path))),
            [0, *path],
        )
        alone = sample(logits[i].expand(len(path) + 1, -1), chain)
        assert alone.tokens[-1] == batch.tokens[i]
        assert alone.logprobs.get(len(path)) == batch.logprobs.get(i)


@settings(max_examples=80)
@given(any_params, st.integers(0, 2**32), st.lists(st.integers(0, 39), max_size=8))
def test_committing_a_path_changes_no_bit(params, seed, path):
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 3, 40).astype(np.float32)
    prompt, output = rng.integers(0, 40, 5).tolist(), rng.integers(0, 40, 7).tolist()
    drafted = sampling.adjusted_logits(row, SessionSampling(params, 40, prompt, output), path)
    committed = SessionSampling(params, 40, prompt, output)
    committed.extend(path)
    assert sampling.adjusted_logits(row, committed, ()).tobytes() == drafted.tobytes()
    resumed = SessionSampling(params, 40, prompt, output + path)
    assert sampling.adjusted_logits(row, resumed, ()).tobytes() == drafted.tobytes()


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    params = SamplingParams(temperature=0, banned_ids=frozenset({1, 3}), top_logprobs=3)
    result = sample(logits, RowSampling([SessionSampling(params, 4)], [0], [0]))
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert result.tokens.tolist() == [2]
    assert result.logprobs[0].chosen == pytest.approx(float(expected[2]), abs=1e-12)
    assert [i for i, _ in result.logprobs[0].top] == [1, 3, 2]
    assert [p for _, p in result.logprobs[0].top] == pytest.approx([float(expected[i]) for i in (1, 3, 2)], abs=1e-12)


def test_no_logprobs_unless_asked():
    session = SessionSampling(SamplingParams(), 4)
    assert sample(torch.zeros(1, 4), RowSampling([session], [0], [0])).logprobs == {}


LOGITS = np.log(np.array([0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02], dtype=np.float64)).astype(np.float32)
SEEDS = 20_000


def chi_square_limit(freedom: int) -> float:
    """The 99.99% quantile, by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    assert (expected >= 5).all()
    return float(((counts - expected) ** 2 / expected).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, softmax(LOGITS)),
        ({"temperature": 0.7}, softmax(LOGITS / 0.7)),
        ({"top_k": 4}, softmax(LOGITS[:4])),
        ({"temperature": 1.5, "top_p": 0.6}, softmax(LOGITS[:4] / 1.5)),
    ],
)
def test_draws_over_seeds_have_the_processed_distribution(params, expected):
    counts = np.zeros(len(LOGITS))
    for seed in range(SEEDS):
        counts[
            sampling.draw(LOGITS / np.float32(params.get("temperature", 1)), SamplingParams(seed=seed, **params), 7)
        ] += 1
    assert counts[len(expected) :].sum() == 0
    assert chi_square(counts[: len(expected)], expected) < chi_square_limit(len(expected) - 1)


def test_draws_over_positions_have_the_distribution_too():
    params = SamplingParams(seed=5)
    counts = np.bincount([sampling.draw(LOGITS, params, position) for position in range(SEEDS)], minlength=len(LOGITS))
    assert chi_square(counts, softmax(LOGITS)) < chi_square_limit(len(LOGITS) - 1)


@pytest.mark.parametrize("fault", ["noise too weak", "draft accepted, then drawn from the whole distribution"])
def test_the_chi_square_test_catches_a_wrong_sampler(fault):
    counts = np.zeros(len(LOGITS))
    for seed in range(SEEDS):
        noise = gumbel_noise(seed, 0, len(LOGITS))
        if fault == "noise too weak":
            token = (LOGITS + np.float32(0.95) * noise).argmax()
        else:
            accepted = np.random.default_rng(seed).random() < 0.22  # the chance of the drafted token 1
            token = 1 if accepted else (LOGITS + noise).argmax()
        counts[token] += 1
    assert chi_square(counts, softmax(LOGITS)) > chi_square_limit(len(LOGITS) - 1)
