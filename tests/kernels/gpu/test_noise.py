"""The noise in Triton: the words of philox.py bit for bit, its noise to 1e-6."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from specla.kernels.gpu.noise import gumbel_noise, noise_words
from specla.kernels.philox import SMALLEST_NOISE, noise_of_words
from specla.kernels.philox import noise_words as wanted_words

IDS = 2048


@triton.jit
def _words(p_words, p_key, FIRST: tl.constexpr, IDS: tl.constexpr):
    i_quad = FIRST // 4 + tl.arange(0, IDS // 4)
    words = noise_words(tl.load(p_key), tl.load(p_key + 1), tl.load(p_key + 2), i_quad, IDS)
    tl.store(p_words + tl.arange(0, IDS), words.to(tl.int32, bitcast=True))


@triton.jit
def _noise(p_words, p_noise, COUNT, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(p_words + at, mask=at < COUNT, other=0).to(tl.uint32, bitcast=True)
    tl.store(p_noise + at, gumbel_noise(words, INTERPRETED), mask=at < COUNT)


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (2**64 - 1, 2**32 - 1), (0x123456789ABCDEF0, 77), (1 << 63, 1 << 31)]
)
@pytest.mark.parametrize("first", [0, 32768])
def test_words_have_the_same_bits(seed, position, first, device):
    key = np.array([seed & 0xFFFFFFFF, seed >> 32, position], dtype=np.uint32).view(np.int32)
    words = torch.full((IDS,), -1, dtype=torch.int32, device=device)
    _words[(1,)](words, torch.from_numpy(key).to(device), FIRST=first, IDS=IDS)
    assert (words.cpu().numpy().view(np.uint32) == wanted_words(seed, position, first + IDS)[first:]).all()


def check_noise(words, device):
    noise = torch.full((len(words),), float("nan"), device=device)
    block = 4096
    _noise[(triton.cdiv(len(words), block),)](
        torch.from_numpy(words.view(np.int32)).to(device),
        noise,
        len(words),
        BLOCK=block,
        INTERPRETED=triton.knobs.runtime.interpret,
    )
    got, want = noise.double().cpu().numpy(), noise_of_words(words).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs((got - want) / np.maximum(np.abs(want), 1.0)).max() < 1e-6
    return got


def test_noise_of_the_ends_of_every_power_and_in_between(device):
    rng = np.random.default_rng(0)
    powers = np.array([1 << i for i in range(32)], dtype=np.uint64)
    near = np.concatenate([powers + d for d in range(4)] + [powers - 1, powers * 3 // 2])
    words = np.concatenate([near, (1 << 32) - 1 - near, rng.integers(0, 1 << 32, 2000, dtype=np.uint64)])
    got = check_noise((words & 0xFFFFFFFF).astype(np.uint32), device)
    assert got.max() == pytest.approx(22.8739, abs=1e-3)  # the noise of word 0
    ends = check_noise(np.arange((1 << 32) - 300, 1 << 32, dtype=np.uint64).astype(np.uint32), device)
    assert np.abs(ends[-100:] - float(SMALLEST_NOISE)).max() < 1e-6


@pytest.mark.gpu
def test_noise_of_many_words(device):
    words = (np.arange(1 << 22, dtype=np.uint64) * 1021).astype(np.uint32)
    check_noise(words, device)
