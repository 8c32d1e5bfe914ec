"""Philox against its published answers, and the Gumbel noise made of it."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.kernels import philox

MASK = 0xFFFFFFFF


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Python integers, one counter: the definition read aloud."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # the known answers published with Random123 for philox4x32, 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, answer):
    got = philox.philox4x32(np.array(counter, dtype=np.uint32), key[0] | key[1] << 32)
    assert tuple(int(w) for w in got) == answer
    assert plain_philox(counter, key) == answer


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_every_id_gets_its_own_word(seed, position, vocab_size):
    words = philox.random_words(seed, position, vocab_size)
    for token in {0, vocab_size // 2, vocab_size - 1}:
        block = plain_philox((token // 4, position, 0, 0), (seed & MASK, seed >> 32))
        assert int(words[token % 4, token // 4]) == block[token % 4]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(1, 3000))
def test_noise_of_some_ids_is_the_noise_of_all(seed, position, vocab_size):
    noise = philox.gumbel_noise(seed, position, vocab_size)
    assert noise.shape == (vocab_size,)
    assert noise.dtype == np.float32
    ids = np.array([0, vocab_size - 1, *range(0, vocab_size, 7)])
    assert (philox.gumbel_noise_at(seed, position, ids) == noise[ids]).all()


def test_extreme_words_give_finite_noise():
    low, high = philox.noise_of_words(np.array([MASK, 0], dtype=np.uint32))
    assert low == np.float32(-np.log(24 * np.log(2)))
    assert high == pytest.approx(33 * np.log(2), rel=1e-7)


def test_noise_has_the_gumbel_distribution():
    noise = np.concatenate([philox.gumbel_noise(9, position, 20_000) for position in range(5)])
    exact = -np.log(-np.log((np.arange(len(noise)) + 0.5) / len(noise)))
    distance = np.abs(np.exp(-np.exp(-np.sort(noise.astype(np.float64)))) - np.exp(-np.exp(-exact))).max()
    assert distance < 1.63 / np.sqrt(len(noise))  # Kolmogorov-Smirnov at 1%


def test_noise_differs_between_seeds_positions_and_ids():
    base = philox.gumbel_noise(1, 2, 4096)
    assert len(np.unique(base)) > 4090
    for other in (
        philox.gumbel_noise(2, 2, 4096),
        philox.gumbel_noise(1, 3, 4096),
        philox.gumbel_noise(1 << 32, 2, 4096),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.06


def test_words_are_kept_read_only():
    words = philox.noise_words(4, 5, 100)
    assert words is philox.noise_words(4, 5, 100)
    with pytest.raises(ValueError, match="read-only"):
        words[0] = 0


@pytest.mark.parametrize(
    ("seed", "position", "vocab_size"), [(-1, 0, 8), (1 << 64, 0, 8), (0, -1, 8), (0, 1 << 32, 8), (0, 0, 0)]
)
def test_what_does_not_fit_is_refused(seed, position, vocab_size):
    with pytest.raises(ValueError, match="give"):
        philox.gumbel_noise(seed, position, vocab_size)


def test_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; from specla.kernels import philox; print(philox.WEYL_0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{0x9E3779B9}\n", done.stderr
