"""Tree passes of Gated DeltaNet layers on a CPU, compiled: what lies between the matrix products, one call a step.

The PyTorch forms (convolution.py, rowwise.py, gated_delta.py, commit.py) spend most of a pass on the way from one small
operation to the next. Here a layer's convolution, norms, gates, recurrence and output gate are one function, compiled
by numba, and a state is read while it lies in the nearest cache.

Bits: every operation is IEEE float32, in the order written; the gates alone go through float64 and are rounded once.
Nothing is contracted or reordered, loops vectorise along channels only, and exp is a polynomial of ours. So a row's
bits depend on its own path alone, whatever the tree, the batch or the vector unit, and a state committed from factors
has the bits of one formed inside a pass.

Functions take NumPy arrays, C-contiguous, float32 unless said otherwise; dimensions as in the PyTorch forms.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specla.kernels.jit import compiled as _compiled

Array = NDArray[Any]

_f4 = np.float32
_ZERO, _ONE = _f4(0.0), _f4(1.0)
L2_EPS = 1e-6  # of the normalisation of q and k, fixed in fla's kernels
_SOFTPLUS_LINEAR = 20.0  # beyond it softplus(x) is x to float32's last bit, as PyTorch has it

_LEAST_EXP, _MOST_EXP = _f4(-87.0), _f4(88.0)  # 2^n stays a normal number
_LOG2_E = _f4(1.44269504)
_LN2_HIGH, _LN2_LOW = _f4(0.693359375), _f4(-2.12194440e-4)  # the high part has trailing zeros: n * high is exact
_P5, _P4, _P3 = _f4(1.9875691500e-4), _f4(1.3981999507e-3), _f4(8.3334519073e-3)  # minimax for (e^r - 1 - r) / r^2
_P2, _P1, _P0 = _f4(4.1665795894e-2), _f4(1.6666665459e-1), _f4(5.0000001201e-1)


@_compiled
def _exp(x: Any) -> Any:
    """e^x within 1.5 units in the last place, x cut to [-87, 88], NaN kept: Cephes' reduction and polynomial."""
    cut = min(max(x, _LEAST_EXP), _MOST_EXP)
    n = np.floor(cut * _LOG2_E + _f4(0.5))
    r = cut - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    p = p * r * r + r + _ONE
    power = p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return power if x == x else x


@_compiled
def _silu(x: Any) -> Any:
    return x / (_ONE + _exp(-x))


@_compiled
def add_and_norm(x: Array, delta: Array, eps: float, total: Array, normed: Array) -> None:
    """total = x + delta and normed = total / sqrt(sum total^2 + eps), all [R, D]; `total` may be `x`."""
    for r in range(x.shape[0]):
        squares = _ZERO
        for d in range(x.shape[1]):
            value = x[r, d] + delta[r, d]
            total[r, d] = value
            squares += value * value
        scale = _ONE / np.sqrt(squares + _f4(eps))
        for d in range(x.shape[1]):
            normed[r, d] = total[r, d] * scale


@_compiled
def swiglu(both: Array, out: Array) -> None:
    """out = silu(gate) up for both [R, 2 D], gate and up side by side; out [R, D]."""
    width = out.shape[1]
    for r in range(out.shape[0]):
        for d in range(width):
            out[r, d] = _silu(both[r, d]) * both[r, width + d]


@_compiled
def gather_inputs(projected: Array, window: Array, slots: Array, layer: int, inputs: Array) -> None:
    """The convolution's inputs [B (W - 1) + R, D]: the sessions' windows, oldest first, and then the rows.

    Args:
        projected: [R, P], a row's raw inputs first.
        window: [slots, W - 1, L, D], the store.
        slots: int64 [B].
        layer: whose windows.
        inputs: written.
    """
    before, channels = window.shape[1], inputs.shape[1]
    for b in range(slots.shape[0]):
        for w in range(before):
            inputs[b * before + w] = window[slots[b], w, layer]
    first = slots.shape[0] * before
    for r in range(projected.shape[0]):
        inputs[first + r] = projected[r, :channels]


@_compiled
def convolve(inputs: Array, taps: Array, weight: Array, y: Array) -> None:
    """y [R, D] = silu of the causal convolution along every row's own path.

    Args:
        inputs: [N, D], from `gather_inputs`.
        taps: int64 [W, R], where each row's inputs lie, oldest first.
        weight: [W, D].
        y: written.
    """
    width, channels = weight.shape
    for r in range(y.shape[0]):
        out, source, tap = y[r], inputs[taps[0, r]], weight[0]
        for d in range(channels):
            out[d] = source[d] * tap[d]
        for w in range(1, width):
            source, tap = inputs[taps[w, r]], weight[w]
            for d in range(channels):
                out[d] += source[d] * tap[d]
        for d in range(channels):
            out[d] = _silu(out[d])


@_compiled
def normalise(y: Array, q: Array, k: Array) -> None:
    """q and k, both [R, H, K], from the first 2 H K channels of y: each head by its length, q also by K^-1/2."""
    rows, heads, width = q.shape
    q_scale = _f4(1.0 / math.sqrt(width))
    for r in range(rows):
        for h in range(heads):
            q_raw, k_raw = y[r, h * width : (h + 1) * width], y[r, (heads + h) * width : (heads + h + 1) * width]
            q_row, k_row = q[r, h], k[r, h]
            q_squares, k_squares = _ZERO, _ZERO
            for i in range(width):
                q_squares += q_raw[i] * q_raw[i]
                k_squares += k_raw[i] * k_raw[i]
            q_factor = q_scale / np.sqrt(q_squares + _f4(L2_EPS))
            k_factor = _ONE / np.sqrt(k_squares + _f4(L2_EPS))
            for i in range(width):
                q_row[i] = q_raw[i] * q_factor
                k_row[i] = k_raw[i] * k_factor


@_compiled
def gate(
    projected: Array, at: int, bias: Array, decay_rate: Array, beta_scale: float, alpha: Array, beta: Array
) -> None:
    """Decay alpha = exp(decay_rate softplus(a + bias)) and beta = beta_scale sigmoid(b), both [R, HV], via float64.

    Args:
        projected: [R, P], a and then b from column `at` on.
        at: that column.
        bias: [HV or more].
        decay_rate: [HV], -exp(a_log).
        beta_scale: the largest beta.
        alpha, beta: written.
    """
    heads = alpha.shape[1]
    for r in range(alpha.shape[0]):
        for h in range(heads):
            a = float(projected[r, at + h] + bias[h])
            softplus = a if a > _SOFTPLUS_LINEAR else math.log1p(math.exp(a))
            alpha[r, h] = _f4(math.exp(decay_rate[h] * softplus))
            beta[r, h] = _f4(beta_scale / (1.0 + math.exp(-float(projected[r, at + heads + h]))))


@_compiled
def recur(
    q: Array,
    k: Array,
    v: Array,
    v_at: int,
    alpha: Array,
    beta: Array,
    state: Array,
    slots: Array,
    layer: int,
    offsets: Array,
    parents: Array,
    kept: Array,
    scratch: Array,
    u: Array,
    o: Array,
) -> None:
    """The gated delta rule over trees, head by head and row by row: outputs o and factors u, both [R, HV, V].

    With S the state of a row's parent and r = S^T k: u = beta v - (alpha beta) r, o = alpha S^T q + (q . k) u, and the
    row's own state is alpha S + k u^T, formed only for rows that others continue.

    Args:
        q, k: [R, H, K].
        v: [R, P], a row's values from column `v_at` on.
        v_at: that column.
        alpha, beta: [R, HV].
        state: [slots, L, HV, K, V], the store; read only.
        slots: int64 [B].
        layer: whose states.
        offsets: int64 [B + 1], session b's rows are offsets[b] to offsets[b + 1].
        parents: int64 [R], -1 for roots; parents come before their children.
        kept: int64 [R], where in `scratch` a row's state goes, -1 for rows that nobody continues.
        scratch: [at least as many as one session keeps, K, V], overwritten.
        u, o: written.
    """
    heads, K = q.shape[1], q.shape[2]
    value_heads, V = u.shape[1], u.shape[2]
    group = value_heads // heads
    recalled, read = np.empty(V, np.float32), np.empty(V, np.float32)
    for b in range(slots.shape[0]):
        for h in range(value_heads):
            stored = state[slots[b], layer, h]
            for r in range(offsets[b], offsets[b + 1]):
                S = stored if parents[r] < 0 else scratch[kept[parents[r]]]
                q_row, k_row, u_row = q[r, h // group], k[r, h // group], u[r, h]
                for j in range(V):
                    read[j], recalled[j] = _ZERO, _ZERO
                overlap = _ZERO
                for i in range(K):
                    q_i, k_i, S_i = q_row[i], k_row[i], S[i]
                    overlap += q_i * k_i
                    for j in range(V):
                        read[j] += q_i * S_i[j]
                        recalled[j] += k_i * S_i[j]
                decay, strength = alpha[r, h], beta[r, h]
                pull, first = decay * strength, v_at + h * V
                v_row, o_row = v[r, first : first + V], o[r, h]
                for j in range(V):
                    u_row[j] = strength * v_row[j] - pull * recalled[j]
                    o_row[j] = decay * read[j] + overlap * u_row[j]
                if kept[r] >= 0:
                    own = scratch[kept[r]]
                    for i in range(K):
                        k_i, S_i, own_i = k_row[i], S[i], own[i]
                        for j in range(V):
                            own_i[j] = decay * S_i[j] + k_i * u_row[j]


@_compiled
def gate_output(o: Array, projected: Array, at: int, with_silu: bool, eps: float, out: Array) -> None:
    """out [R, HV V] = o / sqrt(sum o^2 + eps) for each head, by the activated gate where there is one.

    Args:
        o: [R, HV, V].
        projected: [R, P], the gate from column `at` on; `at` is -1 where there is none.
        at: that column.
        with_silu: whether the gate's activation is silu; else sigmoid.
        eps: the norm's epsilon times V.
        out: written.
    """
    rows, heads, width = o.shape
    for r in range(rows):
        for h in range(heads):
            first = h * width
            o_row, out_row = o[r, h], out[r, first : first + width]
            squares = _ZERO
            for j in range(width):
                squares += o_row[j] * o_row[j]
            scale = _ONE / np.sqrt(squares + _f4(eps))
            if at < 0:
                for j in range(width):
                    out_row[j] = o_row[j] * scale
                continue
            gate_row = projected[r, at + first : at + first + width]
            if with_silu:
                for j in range(width):
                    out_row[j] = o_row[j] * scale * _silu(gate_row[j])
            else:
                for j in range(width):
                    out_row[j] = o_row[j] * scale / (_ONE + _exp(-gate_row[j]))


@_compiled
def commit(state: Array, slots: Array, k: Array, u: Array, alpha: Array, paths: Array, offsets: Array) -> None:
    """Apply accepted paths to the stored states, S <- alpha S + k u^T a row, each state read and written once.

    Args:
        state: [slots, L, HV, K, V], written at the named slots alone.
        slots: int64 [n].
        k: [L, R, H, K], of the pass that verified the paths.
        u: [L, R, HV, V].
        alpha: [L, R, HV].
        paths: int64, the accepted rows, path after path, root first.
        offsets: int64 [n + 1], path p is paths[offsets[p]:offsets[p + 1]].
    """
    layers, value_heads, K, V = state.shape[1:]
    group = value_heads // k.shape[2]
    for p in range(slots.shape[0]):
        for layer in range(layers):
            for h in range(value_heads):
                stored = state[slots[p], layer, h]
                for i in range(K):
                    S_i = stored[i]
                    for place in range(offsets[p], offsets[p + 1]):
                        row = paths[place]
                        decay, k_i, u_row = alpha[layer, row, h], k[layer, row, h // group, i], u[layer, row, h]
                        for j in range(V):
                            S_i[j] = decay * S_i[j] + k_i * u_row[j]


@_compiled
def advance_windows(window: Array, slots: Array, inputs: Array, sources: Array) -> None:
    """Move windows on to the last accepted rows.

    Args:
        window: [slots, W - 1, L, D], written at the named slots alone.
        slots: int64 [n].
        inputs: [L, N, D], from `gather_inputs`.
        sources: int64 [n, W - 1], where each new window lies in `inputs`, oldest first.
    """
    for p in range(slots.shape[0]):
        for w in range(window.shape[1]):
            for layer in range(window.shape[2]):
                window[slots[p], w, layer] = inputs[layer, sources[p, w]]


@_compiled
def mix(
    projected: Array,
    window: Array,
    weight: Array,
    bias: Array,
    decay_rate: Array,
    beta_scale: float,
    state: Array,
    slots: Array,
    layer: int,
    offsets: Array,
    parents: Array,
    taps: Array,
    kept: Array,
    scratch: Array,
    y: Array,
    inputs: Array,
    k: Array,
    u: Array,
    alpha: Array,
    gates_at: int,
    gate_at: int,
    with_silu: bool,
    eps: float,
    out: Array,
) -> None:
    """A layer's mixer between its two projections: all of the above in one call, arguments as there."""
    rows, H, K = k.shape
    HV, V = u.shape[1], u.shape[2]
    gather_inputs(projected, window, slots, layer, inputs)
    convolve(inputs, taps, weight, y)
    q, beta, o = (
        np.empty((rows, H, K), np.float32),
        np.empty((rows, HV), np.float32),
        np.empty((rows, HV, V), np.float32),
    )
    normalise(y, q, k)
    gate(projected, gates_at, bias, decay_rate, beta_scale, alpha, beta)
    recur(q, k, y, 2 * H * K, alpha, beta, state, slots, layer, offsets, parents, kept, scratch, u, o)
    gate_output(o, projected, gate_at, with_silu, eps, out)
