"""From logits to tokens on a GPU: the rule of `sampling.py` in one launch, without a sort.

Several programs share a row: each scores its share of the ids and keeps its best; the last to finish compares them.
Truncation then asks one question of the winner, whether top-k and top-p keep it, which one sum over the logits above
it answers. If they do not, nothing below it is kept either, and the best of those above it is asked next. So the token
is that of `sampling.py`, and most rows look at their logits twice.

Sums are taken in one fixed order, whatever the number of rows or of programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from specla.kernels.gpu.noise import gumbel_noise, noise_words
from specla.kernels.gpu.overlap import overlapping
from specla.kernels.gpu.sampler_rows import SamplerRows

FINE, IS_NAN, IS_INFINITE, RULED_OUT = 0, 1, 2, 3
"""Errors of a row: NaN among its logits, +inf among them, or -inf everywhere."""

_INTERPRETED = triton.knobs.runtime.interpret
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))
_NO_ID = tl.constexpr(0x7FFFFFFF)
_KEY_OF_NEGATIVE_INFINITY = tl.constexpr(-0x7F800001)


@triton.jit
def _processed(p_row, i_id, b_divisor, b_inverse, VOCAB: tl.constexpr):
    """The logits at `i_id` over `b_divisor`, float32, rounded as a division is; -inf beyond the vocabulary.

    The product with the inverse is mended by what it misses of the logit (Markstein 1990): a true division would take
    three times the instructions and a branch for every logit.
    """
    x = tl.load(p_row + i_id, mask=i_id < VOCAB, other=_NEGATIVE_INFINITY).to(tl.float32)
    product = x * b_inverse
    mended = tl.fma(tl.fma(-product, b_divisor, x), b_inverse, product)
    return tl.where(tl.abs(product) < _INFINITY, mended, product)


@triton.jit
def _better(score, i_id, largest, other_score, other_id, other_largest):
    """The higher score and its id, the lower id of equals; and the larger logit, or NaN if one is."""
    other = (other_score > score) | ((other_score == score) & (other_id < i_id))
    both = tl.maximum(largest, other_largest, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(other, other_score, score), tl.where(other, other_id, i_id), both


@triton.jit
def _winner(best, best_id, largest, INTERPRETED: tl.constexpr):
    """The highest score, the lowest id that has it, and the largest logit, or NaN if there is one."""
    if not INTERPRETED:  # where reducing several at once is slow
        return tl.reduce((best, best_id, largest), 0, _better)
    top, wrong = tl.max(best, 0), tl.max((largest != largest).to(tl.int32), 0) > 0
    return top, tl.min(tl.where(best == top, best_id, _NO_ID), 0), tl.where(wrong, float("nan"), tl.max(largest, 0))


@triton.jit
def _scored(
    p_row, p_scores, b_divisor, b_inverse, is_noisy, truncates, b_seed_low, b_seed_high, b_position, i_split,
    SPLITS: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The best score of a share of a row, its id, and the largest logit (or NaN); keeps the scores for truncation."""
    CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    o_first = i_split * CHUNKS // SPLITS
    o_last = (i_split + 1) * CHUNKS // SPLITS
    largest = tl.full([CHUNK], _NEGATIVE_INFINITY, tl.float32)
    best = tl.full([CHUNK], _NEGATIVE_INFINITY, tl.float32)
    best_id = tl.zeros([CHUNK], tl.int32)
    for i_chunk in range(o_first, o_last):
        i_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
        score = _processed(p_row, i_id, b_divisor, b_inverse, VOCAB)
        largest = tl.maximum(largest, score, propagate_nan=tl.PropagateNan.ALL)
        if is_noisy:
            i_quad = i_chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            words = noise_words(b_seed_low, b_seed_high, b_position, i_quad, CHUNK)
            score += gumbel_noise(words, INTERPRETED)
            if truncates:
                tl.store(p_scores + i_id, score, mask=i_id < VOCAB)
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, i_id, best_id)
    return _winner(best, best_id, largest, INTERPRETED)


@triton.jit
def _sum(count, above, total, other_count, other_above, other_total):
    return count + other_count, above + other_above, total + other_total


@triton.jit
def _above(
    p_row, b_x, b_kept, b_largest, b_divisor, b_inverse,
    VOCAB: tl.constexpr, SWEEP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """How many logits are above `b_x`, their weight exp(x - largest), and the weight of all from `b_kept` on."""
    count = tl.zeros([SWEEP], tl.int32)
    above = tl.zeros([SWEEP], tl.float32)
    total = tl.zeros([SWEEP], tl.float32)
    for o_chunk in range(0, VOCAB, SWEEP):
        x = _processed(p_row, o_chunk + tl.arange(0, SWEEP), b_divisor, b_inverse, VOCAB)
        weight = tl.exp(x - b_largest)
        count += (x > b_x).to(tl.int32)
        above += tl.where(x > b_x, weight, 0.0)
        total += tl.where(x >= b_kept, weight, 0.0)
    if INTERPRETED:
        return tl.sum(count, 0), tl.sum(above, 0), tl.sum(total, 0)
    return tl.reduce((count, above, total), 0, _sum)


@triton.jit
def _best_above(
    p_row, p_scores, b_x, b_low, b_divisor, b_inverse,
    VOCAB: tl.constexpr, SWEEP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The id of the best kept score among logits above `b_x` and from `b_low` on."""
    best = tl.full([SWEEP], _NEGATIVE_INFINITY, tl.float32)
    best_id = tl.zeros([SWEEP], tl.int32)
    for o_chunk in range(0, VOCAB, SWEEP):
        i_id = o_chunk + tl.arange(0, SWEEP)
        x = _processed(p_row, i_id, b_divisor, b_inverse, VOCAB)
        score = tl.load(p_scores + i_id, mask=i_id < VOCAB, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
        better = (x > b_x) & (x >= b_low) & (score > best)
        best = tl.where(better, score, best)
        best_id = tl.where(better, i_id, best_id)
    _, i_top, _ = _winner(best, best_id, best, INTERPRETED)
    return i_top


@triton.jit
def _float_of(b_key):
    """The float32 whose bits are at place `b_key` (int64) in the order of all floats."""
    bits = b_key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest(p_row, b_k, b_largest, b_divisor, b_inverse, VOCAB: tl.constexpr, SWEEP: tl.constexpr):
    """A bound that the k largest logits (and equals of the k-th) reach and no others.

    Floats in their order are numbered by integers; each pass over the row cuts the range in four.
    """
    bits = b_largest.to(tl.int32, bitcast=True)
    low = tl.zeros([], tl.int64) + _KEY_OF_NEGATIVE_INFINITY  # at least k are from here on
    high = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 1  # fewer than k are
    reached = b_k * 0
    while (high - low > 1) & (reached != b_k):
        step = high - low
        key_1 = low + tl.maximum(step // 4, 1)
        key_2 = low + tl.maximum(step // 2, 1)
        key_3 = low + tl.maximum(step * 3 // 4, 1)
        b_1, b_2, b_3 = _float_of(key_1), _float_of(key_2), _float_of(key_3)
        counts = tl.zeros([SWEEP], tl.int32)  # three of 10 bits: a lane sees fewer than 1024 chunks
        for o_chunk in range(0, VOCAB, SWEEP):
            x = _processed(p_row, o_chunk + tl.arange(0, SWEEP), b_divisor, b_inverse, VOCAB)
            counts += tl.where(x >= b_3, 0x100401, tl.where(x >= b_2, 0x401, (x >= b_1).to(tl.int32)))
        wide = counts.to(tl.int64)
        n = tl.sum((wide & 0x3FF) | ((wide & 0xFFC00) << 11) | ((wide >> 20) << 42), 0)  # three of 21 bits
        n_1, n_2, n_3 = (n & 0x1FFFFF).to(tl.int32), ((n >> 21) & 0x1FFFFF).to(tl.int32), (n >> 42).to(tl.int32)
        high = tl.where(n_3 >= b_k, high, tl.where(n_2 >= b_k, key_3, tl.where(n_1 >= b_k, key_2, key_1)))
        low = tl.where(n_3 >= b_k, key_3, tl.where(n_2 >= b_k, key_2, tl.where(n_1 >= b_k, key_1, low)))
        reached = tl.where(n_3 >= b_k, n_3, tl.where(n_2 >= b_k, n_2, tl.where(n_1 >= b_k, n_1, reached)))
    return _float_of(low)


@triton.jit
def _truncated(
    p_row, p_scores, i_token, b_k, b_top_p, b_log_min_p, b_largest, b_divisor, b_inverse,
    VOCAB: tl.constexpr, SWEEP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The best of the ids that top-k, then top-p over those, and min-p keep; `i_token` is the best of all."""
    b_kept = tl.zeros([], tl.float32) + _NEGATIVE_INFINITY  # from here on top-k keeps, where top-p must know it
    if (b_k > 0) & (b_top_p < 1.0):
        b_kept = _kth_largest(p_row, b_k, b_largest, b_divisor, b_inverse, VOCAB, SWEEP)
    b_low = tl.maximum(b_largest + b_log_min_p, b_kept)
    searching = True
    while searching:
        b_x = _processed(p_row, i_token, b_divisor, b_inverse, VOCAB)
        kept = b_x >= b_low
        if kept & ((b_k > 0) | (b_top_p < 1.0)):
            count, above, total = _above(
                p_row, b_x, b_kept, b_largest, b_divisor, b_inverse, VOCAB, SWEEP, INTERPRETED
            )  # fmt: skip
            by_count = (b_k <= 0) | (count < b_k)
            by_weight = (b_top_p >= 1.0) | (above < b_top_p * total)
            kept = (count == 0) | (by_count & by_weight)
        if not kept:
            i_token = _best_above(
                p_row, p_scores, b_x, b_low, b_divisor, b_inverse, VOCAB, SWEEP, INTERPRETED
            )  # fmt: skip
        searching = not kept
    return i_token


@triton.jit
def _sample(
    p_logits, p_tokens, p_errors,
    p_used, p_temperature, p_top_k, p_top_p, p_log_min_p, p_seed, p_position,
    p_scores, p_arrived, p_part_best, p_part_largest, p_part_id,
    o_stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, SWEEP: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs (row, share of its ids). PARTS is SPLITS rounded up to a power of two."""
    i_row, i_split = tl.program_id(0), tl.program_id(1)
    b_temperature = tl.load(p_temperature + i_row)
    b_k, b_top_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row)
    b_log_min_p, b_position = tl.load(p_log_min_p + i_row), tl.load(p_position + i_row)
    b_seed_low, b_seed_high = tl.load(p_seed + 2 * i_row), tl.load(p_seed + 2 * i_row + 1)
    b_used = tl.load(p_used + i_row)
    if OVERLAP:
        gdc_wait()
    if b_used == 0:
        return
    p_row = p_logits + i_row.to(tl.int64) * o_stride
    p_scores += i_row.to(tl.int64) * VOCAB
    is_noisy = b_temperature != 0.0
    b_divisor = tl.where(is_noisy, b_temperature, 1.0)
    b_inverse = tl.div_rn(1.0, b_divisor)
    truncates = is_noisy & ((b_k > 0) | (b_top_p < 1.0) | (b_log_min_p > _NEGATIVE_INFINITY))
    top, i_token, largest = _scored(
        p_row, p_scores, b_divisor, b_inverse, is_noisy, truncates, b_seed_low, b_seed_high, b_position, i_split,
        SPLITS, VOCAB, CHUNK, INTERPRETED,
    )  # fmt: skip
    last = True
    if SPLITS > 1:
        tl.store(p_part_best + i_row * SPLITS + i_split, top)
        tl.store(p_part_id + i_row * SPLITS + i_split, i_token)
        tl.store(p_part_largest + i_row * SPLITS + i_split, largest)
        tl.debug_barrier()  # all threads' stores come before the count that publishes them
        last = tl.atomic_add(p_arrived + i_row, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(p_arrived + i_row, 0)
            o_part = i_row * SPLITS + tl.arange(0, PARTS)
            real = tl.arange(0, PARTS) < SPLITS
            parts = tl.load(p_part_best + o_part, mask=real, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
            ids = tl.load(p_part_id + o_part, mask=real, other=_NO_ID, cache_modifier=".cg")
            sizes = tl.load(p_part_largest + o_part, mask=real, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
            top, i_token, largest = _winner(parts, ids, sizes, INTERPRETED)
        b_error = tl.where(largest == _INFINITY, 2, tl.where(largest == _NEGATIVE_INFINITY, 3, 0))
        b_error = tl.where(largest != largest, 1, b_error)
        if b_error != 0:
            i_token = -1
        elif truncates:
            i_token = _truncated(
                p_row, p_scores, i_token, b_k, b_top_p, b_log_min_p, largest, b_divisor, b_inverse, VOCAB, SWEEP,
                INTERPRETED,
            )  # fmt: skip
        tl.store(p_tokens + i_row, i_token)
        tl.store(p_errors + i_row, b_error)


def sample(
    logits: Tensor,
    parameters: SamplerRows,
    tokens: Tensor,
    errors: Tensor,
    *,
    part: slice | None = None,
    overlap: bool = False,
) -> None:
    """Draws the next token of every used row: argmax(processed / T + noise), ties to the lowest id.

    A row's token depends on its logits and parameters alone, for one `SamplerConfig` and one stride of the logits.
    `adjust_logits` comes before, where rows ask for it.

    Args:
        logits: float32, bfloat16 or float16 [R, vocab_size], or of the rows of `part`; rows may stand apart, ids side
            by side. Not written.
        parameters: of R rows; its scratch is overwritten, so calls that share it must follow one another.
        tokens: int32 or int64 [R], written where a row is used; -1 for a row that failed.
        errors: int32 [R], written where a row is used: FINE, IS_NAN, IS_INFINITE or RULED_OUT. Both may lie in pinned
            memory of the host.
        part: the rows that sample; None for all.
        overlap: whether to begin while the kernel before, which must not write parameters, still runs.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    sampled = range(len(parameters.used))[part or slice(None)]
    _check(logits, parameters, tokens, errors, len(sampled))
    config, splits, step = parameters.config, parameters.splits, len(parameters.scores)
    overlaps = overlapping(overlap)
    for first in range(0, len(sampled), step):
        here, rows = logits[first : first + step], slice(sampled.start + first, sampled.start + first + step)
        _sample[(len(here), splits)](
            here, tokens[rows], errors[rows], *parameters.tensors(rows),
            logits.stride(0),
            VOCAB=parameters.vocab_size, CHUNK=config.chunk, SWEEP=config.sweep,
            SPLITS=splits, PARTS=triton.next_power_of_2(splits), INTERPRETED=_INTERPRETED, OVERLAP=overlaps,
            num_warps=config.warps, launch_pdl=overlaps > 0,
        )  # fmt: skip


def _check(logits: Tensor, parameters: SamplerRows, tokens: Tensor, errors: Tensor, sampled: int) -> None:
    rows, vocab_size = len(parameters.used), parameters.vocab_size
    wanted = {
        "logits": (logits, (sampled, vocab_size), (torch.float32, torch.bfloat16, torch.float16)),
        "tokens": (tokens, (rows,), (torch.int32, torch.int64)),
        "errors": (errors, (rows,), (torch.int32,)),
    }
    for name, (tensor, shape, dtypes) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: give {allowed} {list(shape)}")
        reached = tensor.device == parameters.device or (name != "logits" and tensor.is_pinned())
        if tensor.stride(-1) != 1 or not reached:
            raise ValueError(
                f"{name} on {tensor.device} with strides {tensor.stride()}: give a tensor on {parameters.device} "
                "whose last dimension is contiguous"
            )
