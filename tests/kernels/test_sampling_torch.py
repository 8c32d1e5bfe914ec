"""The tensor form of the sampler against the NumPy one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specla.kernels.philox import gumbel_noise
from specla.kernels.sampling import RowSampling, SamplingParams, SessionSampling, sample
from specla.kernels.sampling_torch import gumbel_noise_tensor, sample_tensor


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=4),
    st.integers(1, 900),
)
def test_noise_has_the_same_bits(draws, size):
    seeds, positions = zip(*draws, strict=True)
    noise = gumbel_noise_tensor(list(seeds), list(positions), size).numpy()
    assert noise.dtype == np.float32
    for row, (seed, position) in zip(noise, draws, strict=True):
        assert (row == gumbel_noise(seed, position, size)).all()


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 5, 40, 500]),
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


@settings(max_examples=150)
@given(st.lists(any_params, min_size=1, max_size=4), st.integers(0, 2**32))
def test_same_tokens_and_logprobs(params, seed):
    rng = np.random.default_rng(seed)
    sessions = [
        SessionSampling(p, 60, rng.integers(0, 60, 5).tolist(), rng.integers(0, 60, 5).tolist()) for p in params
    ]
    row_session = [i for i in range(len(params)) for _ in range(3)]
    parents = [row - 1 if row % 3 else -1 for row in range(len(row_session))]
    tokens = rng.integers(0, 60, len(row_session)).tolist()
    rows = RowSampling(sessions, row_session, [10 + r % 3 for r in range(len(row_session))], parents, tokens)
    logits = torch.from_numpy(rng.normal(0, 2, (len(row_session), 60)).astype(np.float32))
    before = logits.clone()
    got, want = sample_tensor(logits, rows), sample(logits, rows)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.errors == want.errors == {}
    assert got.logprobs == want.logprobs
    assert torch.equal(logits, before)


def test_same_errors_and_ties():
    logits = torch.zeros(5, 30)
    logits[1, 3], logits[2, 4], logits[3] = float("nan"), float("inf"), -float("inf")
    logits[4, [5, 9]] = 2.0
    rows = RowSampling([SessionSampling(SamplingParams(temperature=0), 30)], [0] * 5, [0] * 5)
    got, want = sample_tensor(logits, rows), sample(logits, rows)
    assert got.tokens.tolist() == want.tokens.tolist() == [0, -1, -1, -1, 5]
    assert got.errors == want.errors
    with pytest.raises(ValueError, match="float32"):
        sample_tensor(logits.double(), rows)
