"""The walk of the chunked gated delta rule through its chunks, for the usual widths in 16 bits; in Gluon.

The same steps as `chunk_delta.chunk_scan_kernel`. One group of four warps keeps a tile of S in the registers of its
products and asks for the next chunks' k, q, v and inverses ahead (TMA into a ring of shared memory); the scores, which
are needed last, have a single place. What products take from registers goes through shared memory as two halves.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.kernels.gpu.layouts import barrier

_WARPS = 4
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_KEY_WIDTHS = (64, 128, 256, 512)  # with the zeros behind narrower ones

_descriptors: MutableMapping[Tensor, dict[tuple[int, int], Any]] = WeakTensorKeyDictionary()
"""Of each tensor as long as it lives."""


def scans(key_width: int, dtype: torch.dtype) -> bool:
    """Whether this form runs such heads."""
    return key_width in _KEY_WIDTHS and dtype != torch.float32


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _columns(key_width: int, value_width: int, value_heads: int, device: torch.device) -> int:
    """Of V a program: 16 as long as that takes no second round of programs, or where 32 do not fit."""
    fits_once = value_heads * value_width <= 16 * _multiprocessors(device)
    return 16 if fits_once or key_width == 512 or value_width % 32 else 32


@gluon.jit
def _store_halves(x, upper, lower):
    """x in float32 to shared memory as a number of 16 bits and what it lacks."""
    first = x.to(upper.dtype)
    upper.store(first)
    lower.store((x - first.to(gl.float32)).to(lower.dtype))


@gluon.jit
def _visible():
    """What all threads have stored to shared memory is there for products."""
    fence_async_shared()
    barrier()


@gluon.jit
def _ask(k, q, v, inverse, at_k, at_q, at_v, at_inverse, ready, i, first, o_key, o_value, i_h, wanted,
         C: gl.constexpr, HV: gl.constexpr, LOWER: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Has the text's chunk i, which is chunk `first` + i of all, on its way to its place in the ring."""
    at = i % STAGES
    bar = ready.index(at)
    o_row = (first + i) * C
    o_square = o_row * HV + i_h * C
    BYTES: gl.constexpr = (
        k.block_type.nbytes + q.block_type.nbytes + v.block_type.nbytes + 2 * inverse.block_type.nbytes
    )
    mbarrier.expect(bar, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(k, [o_row, o_key], bar, at_k.index(at), pred=wanted)
    tma.async_copy_global_to_shared(v, [o_row, o_value], bar, at_v.index(at), pred=wanted)
    tma.async_copy_global_to_shared(inverse, [o_square, 0], bar, at_inverse.index(2 * at), pred=wanted)
    tma.async_copy_global_to_shared(inverse, [LOWER + o_square, 0], bar, at_inverse.index(2 * at + 1), pred=wanted)
    tma.async_copy_global_to_shared(q, [o_row, o_key], bar, at_q.index(at), pred=wanted)


@gluon.jit
def _ask_scores(scores, at_scores, bar, o_square, wanted, LOWER: gl.constexpr):
    """Has a chunk's scores on their way."""
    mbarrier.expect(bar, 2 * scores.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(scores, [o_square, 0], bar, at_scores.index(0), pred=wanted)
    tma.async_copy_global_to_shared(scores, [LOWER + o_square, 0], bar, at_scores.index(1), pred=wanted)


@gluon.jit
def _product_of_halves(a_upper, a_lower, b_upper, b_lower, acc, FIRST: gl.constexpr):
    """acc + a b; without acc where FIRST."""
    acc = warpgroup_mma(a_upper, b_lower, acc, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma(a_lower, b_upper, acc, is_async=True)
    return warpgroup_mma(a_upper, b_upper, acc, is_async=True)


@gluon.jit(do_not_specialize=["decay_stride"])
def chunk_scan_streamed_kernel(
    q, k, v, inverse, scores, p_decay, p_states, p_o, p_texts, decay_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, KEYS: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    C: gl.constexpr, LOWER: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (V / BV, HV, texts). What overlaps the kernel before is the way of S into registers.

    To ask for tiles takes a barrier each, so it is done while products run: those of a chunk's keys and queries.

    LOWER: rows of `inverse` and `scores` before their lower halves. KEYS: the state's K.
    """
    DTYPE: gl.constexpr = k.dtype
    APART: gl.constexpr = K * BV <= 4096  # there is room for u and what it adds to S beside what they come from
    P: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BV, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, P)
    i_v, i_h = gl.program_id(0), gl.program_id(1)
    p_texts += 3 * gl.program_id(2)
    first = gl.load(p_texts) // C
    chunks = (gl.load(p_texts + 1) + C - 1) // C
    p_state = p_states + gl.load(p_texts + 2).to(gl.int64) * (HV * KEYS * V)
    o_key, o_value = i_h // (HV // H) * K, i_h * V + i_v * BV
    col = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(0, P)), 0)
    row = gl.arange(0, C, layout=ROW)
    o_o = gl.expand_dims(row, 1) * (HV * V) + o_value + col
    o_k = gl.expand_dims(gl.arange(0, K, layout=ROW), 1)
    o_s = (i_h * KEYS + o_k) * V + i_v * BV + col

    at_k = gl.allocate_shared_memory(DTYPE, [STAGES, C, K], k.layout)
    at_q = gl.allocate_shared_memory(DTYPE, [STAGES, C, K], q.layout)
    at_v = gl.allocate_shared_memory(DTYPE, [STAGES, C, BV], v.layout)
    at_inverse = gl.allocate_shared_memory(DTYPE, [2 * STAGES, C, C], inverse.layout)
    at_scores = gl.allocate_shared_memory(DTYPE, [2, C, C], scores.layout)
    s_upper = gl.allocate_shared_memory(DTYPE, [K, BV], v.layout)
    s_lower = gl.allocate_shared_memory(DTYPE, [K, BV], v.layout)
    upper = gl.allocate_shared_memory(DTYPE, [C, BV], v.layout)
    lower = gl.allocate_shared_memory(DTYPE, [C, BV], v.layout)
    if APART:
        u_upper = gl.allocate_shared_memory(DTYPE, [C, BV], v.layout)
        u_lower = gl.allocate_shared_memory(DTYPE, [C, BV], v.layout)
        more_upper = gl.allocate_shared_memory(DTYPE, [C, BV], v.layout)
        more_lower = gl.allocate_shared_memory(DTYPE, [C, BV], v.layout)
    else:
        u_upper, u_lower = s_upper.slice(0, C), s_lower.slice(0, C)  # S is done with by then
        more_upper, more_lower = upper, lower
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    of_text = (o_k < KEYS) & (chunks > 0)
    s = gl.load(p_state + o_s, mask=of_text, other=0.0)  # [K, BV]
    _visible()
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        _ask(k, q, v, inverse, at_k, at_q, at_v, at_inverse, ready, i, first, o_key, o_value, i_h, i < chunks,
             C, HV, LOWER, STAGES)  # fmt: skip
    _ask_scores(scores, at_scores, ready.index(STAGES), (first * HV + i_h) * C, chunks > 0, LOWER)
    p_decay += (first * HV + i_h) * C
    p_o += first * (C * HV * V)
    from_start = gl.load(p_decay + row)
    to_end = gl.load(p_decay + decay_stride + row)
    whole = gl.load(p_decay + C - 1)
    none = gl.zeros([C, BV], gl.float32, P)
    for i in range(chunks):
        at = i % STAGES
        _store_halves(s, s_upper, s_lower)
        _visible()
        mbarrier.wait(ready.index(at), (i // STAGES) & 1)
        keys = at_k.index(at)
        by_keys = warpgroup_mma(keys, s_upper, none, use_acc=False, is_async=True)
        by_keys = warpgroup_mma(keys, s_lower, by_keys, is_async=True)
        if STAGES > 1:  # all have left the chunk before
            _ask(k, q, v, inverse, at_k, at_q, at_v, at_inverse, ready, i + STAGES - 1, first, o_key, o_value,
                 i_h, (i > 0) & (i + STAGES - 1 < chunks), C, HV, LOWER, STAGES)  # fmt: skip
            _ask_scores(scores, at_scores, ready.index(STAGES), ((first + i) * HV + i_h) * C, i > 0, LOWER)
        # The next chunk's decays; of the last chunk its own again.
        p_decay += (i + 1 < chunks).to(gl.int32) * (HV * C)
        next_from_start = gl.load(p_decay + row)
        next_to_end = gl.load(p_decay + decay_stride + row)
        next_whole = gl.load(p_decay + C - 1)
        values = at_v.index(at).load(P).to(gl.float32)
        by_keys = warpgroup_mma_wait(0, deps=[by_keys])
        _store_halves(values - gl.expand_dims(from_start, 1) * by_keys, upper, lower)
        _visible()
        u = _product_of_halves(at_inverse.index(2 * at), at_inverse.index(2 * at + 1), upper, lower, none, True)
        o = warpgroup_mma(at_q.index(at), s_upper, none, use_acc=False, is_async=True)
        u = warpgroup_mma_wait(1, deps=[u])
        if not APART:
            o = warpgroup_mma_wait(0, deps=[o])
            barrier()  # all have read the halves
        _store_halves(u * gl.expand_dims(to_end, 1), more_upper, more_lower)
        _store_halves(u, u_upper, u_lower)
        o = warpgroup_mma_wait(0, deps=[o])
        _visible()
        s = warpgroup_mma(keys.permute((1, 0)), more_lower, s * whole, is_async=True)
        s = warpgroup_mma(keys.permute((1, 0)), more_upper, s, is_async=True)
        mbarrier.wait(ready.index(STAGES), i & 1)
        o = _product_of_halves(
            at_scores.index(0), at_scores.index(1), u_upper, u_lower, o * gl.expand_dims(from_start, 1), False
        )
        s, o = warpgroup_mma_wait(0, deps=[s, o])
        if not APART:
            barrier()  # all have read the chunk
        if STAGES == 1:
            _ask(k, q, v, inverse, at_k, at_q, at_v, at_inverse, ready, i + 1, first, o_key, o_value,
                 i_h, i + 1 < chunks, C, HV, LOWER, STAGES)  # fmt: skip
            o_square = ((first + i + 1) * HV + i_h) * C
            _ask_scores(scores, at_scores, ready.index(STAGES), o_square, i + 1 < chunks, LOWER)
        gl.store(p_o + i * (C * HV * V) + o_o, o.to(p_o.dtype.element_ty))
        from_start, to_end, whole = next_from_start, next_to_end, next_whole
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(ready.index(i))
    gl.store(p_state + o_s, s, mask=of_text)


def launch_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    scores: Tensor,
    decay: Tensor,
    states: Tensor,
    o: Tensor,
    texts: Tensor,
    overlap: int,
) -> None:
    """`chunk_delta.chunk_delta_rule`'s second launch; the arguments are checked there."""
    rows, heads, key_width = k.shape
    value_heads, value_width = v.shape[1:]
    chunk, columns = scores.shape[-1], _columns(key_width, value_width, value_heads, v.device)
    chunk_scan_streamed_kernel[(value_width // columns, value_heads, len(texts))](
        _tiles(q, rows, chunk, key_width), _tiles(k, rows, chunk, key_width), _tiles(v, rows, chunk, columns),
        _tiles(inverse, -1, chunk, chunk), _tiles(scores, -1, chunk, chunk), decay, states, o, texts, decay.stride(0),
        H=heads, HV=value_heads, K=key_width, KEYS=states.shape[2], V=value_width, BV=columns, C=chunk,
        LOWER=scores.stride(0) // chunk, STAGES=1 if key_width == 512 else 2, OVERLAP=overlap,
        num_warps=_WARPS, launch_pdl=overlap > 0,
    )  # fmt: skip


def _tiles(x: Tensor, lines: int, rows: int, columns: int) -> Any:
    """x, as [lines, ...] with -1 for as many as its last dimension leaves, by tiles [rows, columns]."""
    kept = _descriptors.setdefault(x, {})
    if (rows, columns) not in kept:
        apart = x.detach()  # a view of x itself would keep it alive
        flat = apart.view(lines, -1) if lines > 0 else apart.view(-1, x.shape[-1])
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[x.dtype])
        kept[rows, columns] = TensorDescriptor.from_tensor(flat, [rows, columns], layout)
    return kept[rows, columns]
