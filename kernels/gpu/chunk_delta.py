"""The chunked gated delta rule on a GPU: consecutive tokens of one session, or several, in two launches a layer.

Within a chunk of C tokens every factor u depends on those before it through a unit lower triangular system (I + A). The
first launch solves it for all chunks and heads at once. The second walks through the chunks in order, each program with
a tile of the state on chip:

    u = (I + A)^-1 diag(beta) (v - e^G (k S)),  o = e^G (q S) + P u,  S <- e^G_C S + k^T (e^(G_C - G) u)

with G the sum of g from the chunk's beginning and P_ij = q_i . k_j e^(G_i - G_j) for j <= i (Yang et al., "Gated Delta
Networks", 2024). k stays as the model has it, and what the kernel itself computes enters products as two halves of the
model's dtype, so that a state differs from float32 arithmetic by some 2^-16 only. The usual widths walk in the form of
chunk_scan.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.kernels.gpu.chunk_batch import CHUNK, ChunkBatch
from specla.kernels.gpu.chunk_scan import launch_scan, scans
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.overlap import overlapping, wait_for_previous

_WIDE_CHUNK = 16  # in float32, whose tiles of 64 rows do not fit
_KEYS = 64  # columns of k and q that the first launch takes at a time
_SOLVE_WARPS = 4
_COLUMNS = 16  # of V a program of the second launch has
_SCAN_WARPS = 2  # four would take other products (wgmma), which Triton 3.6 gets wrong here
_BLOCK = tl.constexpr(16)
_LEAST_DECAY = tl.constexpr(-110.0)  # exp of it is 0 in float32
_COARSE = tl.constexpr(1024.0)
_ALIGNED = 16  # bytes


class ChunkWorkspace(NamedTuple):
    """What the first launch leaves to the second, for up to N chunks."""

    inverse: Tensor
    """model dtype [P, N, HV, C, C], (I + A)^-1 diag(beta) as P halves: 2 of 16 bits, 1 in float32."""
    scores: Tensor
    """model dtype [P, N, HV, C, C], q k^T with decays, lower triangular; likewise."""
    decay: Tensor
    """float32 [2, N, HV, C]: e^G, from the chunk's beginning to after a token; and from there to the chunk's end."""

    @classmethod
    def empty(
        cls, tokens: int, value_heads: int, dtype: torch.dtype, device: torch.device | str, chunk: int | None = None
    ) -> ChunkWorkspace:
        """For so many tokens at the most; C is `chunk`, which the sums' order hangs on, or what suits the dtype."""
        chunk = (_WIDE_CHUNK if dtype == torch.float32 else CHUNK) if chunk is None else chunk
        chunks = triton.cdiv(tokens, chunk)
        squares = (halves_of(dtype), chunks, value_heads, chunk, chunk)
        return cls(
            torch.empty(squares, dtype=dtype, device=device),
            torch.empty(squares, dtype=dtype, device=device),
            torch.empty(2, chunks, value_heads, chunk, device=device),
        )


def key_pitch(key_width: int, dtype: torch.dtype) -> int:
    """The width of q and k for heads of such keys, zeros behind theirs: what products take at once in 16 bits."""
    return key_width if dtype == torch.float32 else max(64, triton.next_power_of_2(key_width))


def halves_of(dtype: torch.dtype) -> int:
    """How many numbers of a dtype stand for one float32."""
    return 1 if dtype == torch.float32 else 2


@triton.jit
def _dot(a, b, acc=None):
    """Numbers of 16 bits as they are; float32 in three products of tf32."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _halves(x, DTYPE: tl.constexpr):
    """x in float32 as a number of DTYPE and what it lacks."""
    upper = x.to(DTYPE)
    return upper, (x - upper.to(tl.float32)).to(DTYPE)


@triton.jit
def _dot_halves(upper, lower, b, acc, DTYPE: tl.constexpr):
    """acc + (upper + lower) b of b in float32."""
    b_upper, b_lower = _halves(b, DTYPE)
    return tl.dot(upper, b_upper, tl.dot(lower, b_upper, tl.dot(upper, b_lower, acc)))


@triton.jit
def _sums_of_decays(g):
    """Running sums of g [C], as two parts: multiples of 2^-10 below 2^13, which are exact, and small remainders.

    So a difference of two sums is right to 2^-30 however strong a decay lies before both.
    """
    g = tl.maximum(g, _LEAST_DECAY)
    coarse = tl.floor(g * _COARSE + 0.5) / _COARSE
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)


@triton.jit
def _inverse(a, C: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [C, C]: substitution in blocks of 16, elimination between them."""
    BLOCKS: tl.constexpr = C // _BLOCK
    i_b, j_b = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    split = tl.reshape(a, [BLOCKS, _BLOCK, BLOCKS, _BLOCK])
    blocks = tl.sum(tl.where(i_b == j_b, split, 0.0), 2)  # [C / 16, 16, 16], those of the diagonal
    i_r, i_c = tl.arange(0, _BLOCK)[None, :, None], tl.arange(0, _BLOCK)[None, None, :]
    solved = tl.where(i_r == i_c, 1.0, 0.0) + tl.zeros_like(blocks)
    for j in range(_BLOCK - 1):
        column = tl.sum(tl.where(i_c == j, blocks, 0.0), 2)  # 0 down to row j: rows that are final stay
        row = tl.sum(tl.where(i_r == j, solved, 0.0), 1)
        solved -= column[:, :, None] * row[:, None, :]
    x = tl.reshape(tl.where(i_b == j_b, solved[:, :, None, :], 0.0), [C, C])
    i_r, i_c = tl.arange(0, C)[:, None] // _BLOCK, tl.arange(0, C)[None, :] // _BLOCK
    if C >= 32:
        x -= _dot(_dot(x, tl.where((i_r // 2 == i_c // 2) & (i_r != i_c), a, 0.0)), x)
    if C >= 64:
        x -= _dot(_dot(x, tl.where(i_r // 2 != i_c // 2, a, 0.0)), x)
    return x


@triton.jit
def _load(p, o_column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile at pointers p, 0 in columns past WIDTH."""
    if WIDTH % BLOCK == 0:
        return tl.load(p)
    return tl.load(p, mask=o_column < WIDTH, other=0.0)


@triton.jit
def _store_square(p, x, o_square, half_stride, SPLIT: tl.constexpr):
    """x in float32 as one number of p's or as two halves."""
    if SPLIT:
        upper, lower = _halves(x, p.dtype.element_ty)
        tl.store(p + o_square, upper)
        tl.store(p + half_stride + o_square, lower)
    else:
        tl.store(p + o_square, x)


@triton.jit(do_not_specialize=["half_stride", "decay_stride"])
def chunk_solve_kernel(
    p_q, p_k, p_g, p_beta, p_inverse, p_scores, p_decay, p_owner, half_stride, decay_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (HV, chunks)."""
    i_h, i_n = tl.program_id(0), tl.program_id(1)
    owner = tl.load(p_owner + i_n * C // BLOCK)
    wait_for_previous(OVERLAP)
    if owner < 0:
        return
    o_c = tl.arange(0, C)
    o_gate = i_n * (C * HV) + i_h
    g = tl.load(p_g + o_gate + o_c * HV)
    beta = tl.load(p_beta + o_gate + o_c * HV)
    o_head = (i_n * (C * H) + i_h // (HV // H)) * K
    o_k = tl.arange(0, BK)[None, :]
    o_tile = o_c[:, None] * (H * K) + o_k  # [C, BK]
    products, scores = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        k = _load(p_k + o_head + first + o_tile, first + o_k, K, BK)
        q = _load(p_q + o_head + first + o_tile, first + o_k, K, BK)
        products = _dot(k, tl.trans(k), products)
        scores = _dot(q, tl.trans(k), scores)
    coarse, fine = _sums_of_decays(g)
    path = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    decay = tl.exp(tl.minimum(path, 0.0))  # [C, C], of the tokens after j up to i
    below = o_c[:, None] > o_c[None, :]
    o_block = i_n * HV + i_h
    o_square = o_c[:, None] * C + o_c[None, :]
    scores = tl.where(o_c[:, None] >= o_c[None, :], scores * decay, 0.0)
    _store_square(p_scores + o_block * (C * C), scores, o_square, half_stride, SPLIT)
    last = o_c == C - 1
    to_end = (tl.sum(tl.where(last, coarse, 0.0), 0) - coarse) + (tl.sum(tl.where(last, fine, 0.0), 0) - fine)
    tl.store(p_decay + o_block * C + o_c, tl.exp(coarse + fine))
    tl.store(p_decay + decay_stride + o_block * C + o_c, tl.exp(to_end))

    inverse = _inverse(tl.where(below, beta[:, None] * products * decay, 0.0), C) * beta[None, :]
    _store_square(p_inverse + o_block * (C * C), inverse, o_square, half_stride, SPLIT)


@triton.jit(do_not_specialize=["half_stride", "decay_stride"])
def chunk_scan_kernel(
    p_q, p_k, p_v, p_inverse, p_scores, p_decay, p_states, p_o, p_texts, half_stride, decay_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of V, HV, texts). KEYS: the state's K."""
    DTYPE: tl.constexpr = p_k.dtype.element_ty
    wait_for_previous(OVERLAP)
    i_v, i_h = tl.program_id(0), tl.program_id(1)
    p_texts += 3 * tl.program_id(2)
    first, tokens = tl.load(p_texts), tl.load(p_texts + 1)
    if tokens == 0:
        return
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    o_square = o_c[:, None] * C + o_c[None, :]
    o_key = o_c[:, None] * (H * K) + o_k[None, :]  # [C, BK]
    o_value = o_c[:, None] * (HV * V) + o_v  # [C, BV]
    p_state = p_states + (tl.load(p_texts + 2).to(tl.int64) * HV + i_h) * (KEYS * V)
    o_state = o_k[:, None] * V + o_v
    m_state = (o_k < KEYS)[:, None] & (o_v < V)
    p_q += i_h // (HV // H) * K
    p_k += i_h // (HV // H) * K
    p_v += i_h * V
    p_o += i_h * V
    s = tl.load(p_state + o_state, mask=m_state, other=0.0)  # [BK, BV]
    for i_n in range(tl.cdiv(tokens, C)):
        o_row = first + i_n * C
        k = _load(p_k + o_row * (H * K) + o_key, o_k[None, :], K, BK)
        q = _load(p_q + o_row * (H * K) + o_key, o_k[None, :], K, BK)
        v = _load(p_v + o_row * (HV * V) + o_value, o_v, V, BV).to(tl.float32)
        o_block = o_row * HV + i_h * C
        scores = tl.load(p_scores + o_block * C + o_square)
        inverse = tl.load(p_inverse + o_block * C + o_square)
        from_start = tl.load(p_decay + o_block + o_c)
        whole = tl.load(p_decay + o_block + C - 1)
        to_end = tl.load(p_decay + decay_stride + o_block + o_c)

        if SPLIT:
            inverse_lower = tl.load(p_inverse + half_stride + o_block * C + o_square)
            scores_lower = tl.load(p_scores + half_stride + o_block * C + o_square)
            s_upper, s_lower = _halves(s, DTYPE)
            by_keys = tl.dot(k, s_lower, tl.dot(k, s_upper))
            by_queries = tl.dot(q, s_upper)
            rhs = v - from_start[:, None] * by_keys
            u = _dot_halves(inverse, inverse_lower, rhs, tl.zeros_like(rhs), DTYPE)
            o = _dot_halves(scores, scores_lower, u, by_queries * from_start[:, None], DTYPE)
            u_upper, u_lower = _halves(u * to_end[:, None], DTYPE)
            s = tl.dot(tl.trans(k), u_lower, tl.dot(tl.trans(k), u_upper, s * whole))
        else:
            u = _dot(inverse, v - from_start[:, None] * _dot(k, s))
            o = _dot(scores, u, _dot(q, s) * from_start[:, None])
            s = _dot(tl.trans(k), u * to_end[:, None], s * whole)
        p_out = p_o + o_row * (HV * V) + o_value
        if V % BV == 0:
            tl.store(p_out, o.to(p_o.dtype.element_ty))
        else:
            tl.store(p_out, o.to(p_o.dtype.element_ty), mask=o_v < V)
    tl.store(p_state + o_state, s, mask=m_state)


def chunk_delta_rule(
    rows: LayerRows,
    states: Tensor,
    batch: ChunkBatch,
    workspace: ChunkWorkspace,
    o: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """Runs consecutive tokens of each text and leaves the states that stand after them.

    For each head: S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q.

    Args:
        rows: the batch's rows; q normalised and scaled, g from -inf to 0, beta 0 to 2. Rows of zeros behind a text's
            last token fill its last block up and leave the state as it is. The width of q and k is `key_pitch` or, in
            any other form than the usual one, K; columns past K are zeros.
        states: float32 [slots, HV, K, V], those of the texts' slots read and written.
        batch: which rows belong to which slot's text.
        workspace: for R tokens or more.
        o: float32 or the model's dtype [R, HV, V]; rows of no text are left alone or set to zeros.
        overlap: whether to begin while the kernel before, which must not write `batch`, may still run. The next launch
            may begin once the last of these has waited.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together.
    """
    _check(rows, states, batch, workspace, o)
    tokens, heads, pitch = rows.q.shape
    value_heads, value_width = rows.v.shape[1:]
    chunk, dtype = workspace.scores.shape[-1], rows.k.dtype
    strides = workspace.inverse.stride(0), workspace.decay.stride(0)
    split, overlaps = halves_of(dtype) == 2, overlapping(overlap)
    chunk_solve_kernel[(value_heads, tokens // chunk)](
        rows.q, rows.k, rows.g, rows.beta, *workspace, batch.owner, *strides,
        H=heads, HV=value_heads, K=pitch, BK=min(_KEYS, triton.next_power_of_2(pitch)), C=chunk, BLOCK=CHUNK,
        SPLIT=split, OVERLAP=overlaps, num_warps=_SOLVE_WARPS, launch_pdl=overlaps > 0,
    )  # fmt: skip
    if states.is_cuda and not triton.knobs.runtime.interpret and scans(pitch, dtype):
        launch_scan(rows.q, rows.k, rows.v, *workspace, states, o, batch.texts, overlaps)
        return
    chunk_scan_kernel[(triton.cdiv(value_width, _COLUMNS), value_heads, len(batch.texts))](
        rows.q, rows.k, rows.v, *workspace, states, o, batch.texts, *strides,
        H=heads, HV=value_heads, K=pitch, KEYS=states.shape[2], V=value_width, BK=triton.next_power_of_2(pitch),
        BV=_COLUMNS, C=chunk, SPLIT=split, OVERLAP=overlaps, num_warps=_SCAN_WARPS, launch_pdl=overlaps > 0,
    )  # fmt: skip


def _check(rows: LayerRows, states: Tensor, batch: ChunkBatch, workspace: ChunkWorkspace, o: Tensor) -> None:
    tokens, heads, pitch = rows.q.shape
    value_heads, value_width = rows.v.shape[1:]
    key_width = min(pitch, states.shape[2])
    batch.check(tokens, states.device)
    model, single = (rows.k.dtype,), (torch.float32,)
    halves, room, _, chunk, _ = workspace.scores.shape
    squares = (halves, room, value_heads, chunk, chunk)
    wanted = {
        "q": (rows.q, (tokens, heads, pitch), model),
        "k": (rows.k, (tokens, heads, pitch), model),
        "v": (rows.v, (tokens, value_heads, value_width), model),
        "g": (rows.g, (tokens, value_heads), single),
        "beta": (rows.beta, (tokens, value_heads), single),
        "states": (states, (states.shape[0], value_heads, key_width, value_width), single),
        "workspace.inverse": (workspace.inverse, squares, model),
        "workspace.scores": (workspace.scores, squares, model),
        "workspace.decay": (workspace.decay, (2, room, value_heads, chunk), single),
        "o": (o, (tokens, value_heads, value_width), (*model, *single)),
    }
    if value_heads % heads or key_width % 16 or value_width % 16:
        raise ValueError(
            f"{heads} key heads of {key_width} and {value_heads} value heads of {value_width}: "
            "give value heads as a multiple of the key heads, and widths that are multiples of 16"
        )
    if room * chunk < tokens or halves != halves_of(rows.k.dtype) or not tokens or tokens % CHUNK:
        raise ValueError(
            f"{tokens} rows and a workspace for {room * chunk}, of {halves} halves: "
            f"give a multiple of {CHUNK} rows, room for all, and {halves_of(rows.k.dtype)} halves"
        )
    if tokens * max(heads * pitch, value_heads * max(value_width, CHUNK)) >= 1 << 31:
        raise ValueError(f"{tokens} rows of {value_heads} heads: give fewer, whose numbers 31 bits count")
    for name, (tensor, shape, dtypes) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: give {allowed} {list(shape)}")
        if not tensor.is_contiguous() or tensor.device != states.device or tensor.data_ptr() % _ALIGNED:
            raise ValueError(
                f"{name} on {tensor.device} with strides {tensor.stride()}: give a contiguous tensor on "
                f"{states.device} that starts at a multiple of {_ALIGNED} bytes"
            )
