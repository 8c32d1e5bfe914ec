"""The noise every sampled token is drawn with: Philox4x32-10 words turned into Gumbel noise, in NumPy.

A token is argmax(logits + noise), and the noise is a pure function of (seed, position, token id). So a verifier, a
drafter that wants to agree with it, and a program in another language all get the same noise without talking. Imports
no torch: training-free drafters use it. `sampling_torch.py` holds the same function for tensors on a device.

The rule, word by word (`docs/protocol.md` has test vectors):
    counter = (id div 4, position, 0, 0)            four 32-bit words, word 0 first
    key     = (seed mod 2^32, seed div 2^32)        two 32-bit words, low word first
    r       = word (id mod 4) of Philox4x32-10(counter, key)
    u       = min((r + 1/2) 2^-32, 1 - 2^-24)       float64, exact
    noise   = -log(-log1p(-u))                      float64, rounded once to float32
The logarithms are taken in float64 because their last bit differs between mathematics libraries; after the rounding
to float32 that difference is gone except about once in 10^9 values.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
MASK_32 = 0xFFFFFFFF
ROUNDS = 10
SMALLEST_NOISE = np.float32(-np.log(-np.log1p(-(1.0 - 2.0**-24))))  # the noise of the largest u

Words = NDArray[np.uint64]


def _word(value: int) -> Words:
    """A constant as a 0-d array: NumPy takes it a third faster than a scalar, and there are a hundred in a row."""
    return np.array(value, dtype=np.uint64)


_SHIFT, _MASK, _M0, _M1 = _word(32), _word(MASK_32), _word(MULTIPLIER_0), _word(MULTIPLIER_1)


def round_keys(seed: int) -> list[tuple[int, int]]:
    """The ten (word 0, word 1) keys of a 64-bit seed: the key itself, then bumped by the Weyl constants each round."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed {seed} does not fit 64 bits: give an integer in [0, 2^64)")
    low, high = seed & MASK_32, seed >> 32
    return [((low + i * WEYL_0) & MASK_32, (high + i * WEYL_1) & MASK_32) for i in range(ROUNDS)]


def _rounds(c0: Words, c1: Words, c2: Words, c3: Words, keys: list[tuple[int, int]]) -> None:
    """Runs one round a key over four arrays of 32-bit words held in uint64, in place."""
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    for k0, k1 in keys:
        np.multiply(c0, _M0, out=p0)
        np.multiply(c2, _M1, out=p1)
        np.right_shift(p1, _SHIFT, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, _word(k0), out=c0)
        np.right_shift(p0, _SHIFT, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, _word(k1), out=c2)
        np.bitwise_and(p1, _MASK, out=c1)
        np.bitwise_and(p0, _MASK, out=c3)


def philox4x32(counter: NDArray[np.uint32], seed: int) -> NDArray[np.uint32]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    Args:
        counter: uint32 [..., 4], word 0 first.
        seed: the 64-bit key; its low word is key word 0.

    Returns:
        uint32 [..., 4].

    Raises:
        ValueError: the seed is outside [0, 2^64) or the counter's last axis is not 4.
    """
    counter = np.asarray(counter)
    if counter.shape[-1:] != (4,):
        raise ValueError(f"a counter has 4 words on its last axis, not shape {counter.shape}")
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    _rounds(c0, c1, c2, c3, round_keys(seed))
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


@lru_cache(maxsize=4)
def _first_products(quads: int) -> tuple[Words, Words]:
    """High and low words of MULTIPLIER_0 * (id div 4): round 1 is the same for every seed and position but for xors."""
    product = np.arange(quads, dtype=np.uint64) * _M0
    return product >> _SHIFT, product & _MASK


def random_words(seed: int, position: int, vocab_size: int) -> NDArray[np.uint64]:
    """r of every token id at one position.

    uint64 [4, ceil(vocab_size / 4)], each below 2^32; id i stands at [i mod 4, i div 4].
    Rounds 1 and 2 are written out: counter words 2 and 3 are 0 and word 1 is one number, so most of their work is on
    scalars (a sixth of the whole is saved).
    """
    _check_position(position)
    keys = round_keys(seed)
    high, low = _first_products(-(-vocab_size // 4))
    c0_scalar = (position ^ keys[0][0]) & MASK_32
    p0_scalar = MULTIPLIER_0 * c0_scalar
    words = np.empty((4, len(high)), dtype=np.uint64)
    c0, c1, c2, c3 = words
    np.bitwise_xor(high, _word(keys[0][1]), out=c2)
    product = c2 * _M1
    np.right_shift(product, _SHIFT, out=c0)
    np.bitwise_xor(c0, _word(keys[1][0]), out=c0)
    np.bitwise_and(product, _MASK, out=c1)
    np.bitwise_xor(low, _word((p0_scalar >> 32) ^ keys[1][1]), out=c2)
    c3.fill(p0_scalar & MASK_32)
    _rounds(c0, c1, c2, c3, keys[2:])
    return words


def noise_of_words(words: NDArray[np.unsignedinteger]) -> NDArray[np.float32]:
    """Gumbel noise of 32-bit words: float32, the same shape; between -2.82 and 22.88."""
    value = words.astype(np.float64)
    value += 0.5
    value *= -(2.0**-32)
    np.log1p(value, out=value)
    np.negative(value, out=value)
    np.log(value, out=value)
    noise = np.negative(value, out=value).astype(np.float32)
    # The bound on u as a bound on its noise, which falls as u rises: the same result in a fifth of the time.
    return np.maximum(noise, SMALLEST_NOISE, out=noise)


@lru_cache(maxsize=64)
def noise_words(seed: int, position: int, vocab_size: int) -> NDArray[np.uint32]:
    """The 32-bit word behind the noise of every token id at one position: uint32 [vocab_size], read-only.

    The last 64 results are kept: the nodes of a tree at one depth share a position, and a position whose draft was
    rejected comes again in the next pass.

    Raises:
        ValueError: the seed is outside [0, 2^64), the position outside [0, 2^32), or vocab_size is below 1.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}: give 1 or more")
    planes = random_words(seed, position, vocab_size)
    words = np.empty((planes.shape[1], 4), dtype=np.uint32)
    words.T[...] = planes
    flat = words.reshape(-1)[:vocab_size]
    flat.flags.writeable = False
    return flat


def gumbel_noise(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """The noise of every token id at one position: float32 [vocab_size].

    Raises:
        ValueError: as `noise_words`.
    """
    return noise_of_words(noise_words(seed, position, vocab_size))


def gumbel_noise_at(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The noise of some token ids at one position, without computing the others: float32, the shape of `ids`.

    Raises:
        ValueError: the seed is outside [0, 2^64) or the position outside [0, 2^32).
    """
    _check_position(position)
    ids = np.asarray(ids, dtype=np.int64)
    counter = np.zeros((*ids.shape, 4), dtype=np.uint32)
    counter[..., 0] = ids >> 2
    counter[..., 1] = position
    words = np.take_along_axis(philox4x32(counter, seed), (ids & 3)[..., None], axis=-1)[..., 0]
    return noise_of_words(words)


def _check_position(position: int) -> None:
    if not 0 <= position < 1 << 32:
        raise ValueError(f"position {position} does not fit 32 bits: give an integer in [0, 2^32)")
