"""Launches every GPU kernel on small shapes, for compute-sanitizer to watch: `make sanitize-gpu`.

Launches have odd sizes, unused places and, where a kernel allows it, several programs that share a tile. Tensors come
one by one from the driver (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a step past the end of one is seen. Results are
only looked at for NaN: what they must be is the tests' matter.

    python tools/sanitize_kernels.py [--no-specialized]

leaves out kernels whose warps each do something else: of these racecheck reports the word through which the compiler
tells them what, which all threads of a group write alike.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from specla.kernels.gpu.adjusting import LogitEntries, adjust_logits
from specla.kernels.gpu.between_mixers import DenseRow, DenseWeights, MeetingPlace, between_mixers
from specla.kernels.gpu.chunk_batch import CHUNK, ChunkInputs, ChunkText
from specla.kernels.gpu.chunk_convolution import chunk_convolution
from specla.kernels.gpu.chunk_delta import ChunkWorkspace, chunk_delta_rule, key_pitch
from specla.kernels.gpu.chunk_swiglu import chunk_swiglu
from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.convolution import ConvolutionParameters, tree_convolution
from specla.kernels.gpu.embedding import embed
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import FactorisedTile, verify_factorised, why_unfit
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.norms import add_rms_norm, gated_norm
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.gpu.product import product, product_parts
from specla.kernels.gpu.product_streamed import on_hopper
from specla.kernels.gpu.product_wide import WideTile
from specla.kernels.gpu.sampler_rows import SamplerConfig, SamplerRows
from specla.kernels.gpu.sampling import sample
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.gpu.streamed import StreamedTile
from specla.kernels.sampling import RowSampling, SamplingParams, SessionSampling
from specla.kernels.topology import Topology

_TAPS = 4
_LARGE = ((1, 21, 6), (18, 3, 0))
"""Rows and pending factors of each session."""
_SMALL = ((1, 16, 6), (16, 3, 0))
_ODD = (1, 2, 48, 80)  # H, HV, K, V: widths that are no powers of two
_USUAL = (1, 2, 64, 128)  # widths that the kernels in Gluon take
_DTYPE = torch.bfloat16
_VOCAB = 1000
_MANY = 40  # places for sessions, of which few are used: the exact kernel for batches
_ROWS, _USED = 7, 5  # of activations, and those that count


def main() -> int:
    """Runs all launches; a kernel that writes NaN is an error, the rest is the sanitizer's to find."""
    if not torch.cuda.is_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 1
    for shape, sizes, groups in ((_ODD, _LARGE, 1), (_ODD, _LARGE, 3), (_USUAL, _LARGE, 3), (_USUAL, _SMALL, 1)):
        launch_layer(shape, *sizes, groups)
        print(f"a layer of {shape}, rows {sizes[0]}, {groups} programs a tree: launched", flush=True)
    for sizes in (_LARGE, ((1, 1, 1), (3, 9, 0))):
        launch_layer(_USUAL, *sizes, 1, places=_MANY)
        print(f"a layer of {_USUAL}, rows {sizes[0]}, in a bucket of {_MANY} sessions: launched", flush=True)
    others = [
        ("norms and embedding", launch_norms),
        ("products", launch_products),
        ("a chunk of a prompt", launch_chunk),
        ("sampler", launch_sampler),
    ]
    if on_hopper(torch.device("cuda")) and "--no-specialized" not in sys.argv:
        others += [("products of many rows", launch_wide_products), ("one row between mixers", launch_between_mixers)]
    for name, launch in others:
        launch()
        torch.cuda.synchronize()
        print(f"{name}: launched", flush=True)
    return 0


def launch_layer(
    shape: tuple[int, int, int, int], sizes: Sequence[int], pending: Sequence[int], groups: int, places: int = 0
) -> None:
    """Convolution, all forms of verification that fit and a flush, for trees of different sizes in one batch.

    `places` for sessions, one more than there are at the least.
    """
    (heads, value_heads, key_width, value_width), dtype = shape, _DTYPE
    device, slots = "cuda", len(sizes)
    bucket = Bucket(
        sessions=max(slots + 1, places),
        rows=max(sum(sizes) + 3, places),
        tree_rows=max(sizes),
        pending=max(pending),
        taps=_TAPS,
        groups=groups,
    )
    factors = bucket.tree_rows + bucket.pending + _TAPS - 1
    channels = 2 * heads * key_width + value_heads * value_width
    pool = FactorPool(
        torch.randn(slots, factors, heads, key_width, device=device).to(dtype),
        torch.randn(slots, factors, value_heads, value_width, device=device),
        -torch.rand(slots, factors, value_heads, device=device),
        torch.randn(slots, factors, channels, device=device).to(dtype),
    )
    parameters = ConvolutionParameters(
        torch.randn(_TAPS, channels, device=device),
        torch.randn(value_heads, device=device),
        torch.randn(value_heads, device=device),
    )
    batch = PassBatch(bucket, device)
    batch.fill(_sessions(sizes, pending, factors))
    rows = LayerRows.empty(bucket.rows, *shape, dtype, device)
    x = torch.randn(bucket.rows, channels, device=device).to(dtype)
    gates = torch.randn(bucket.rows, value_heads, device=device)
    tree_convolution(x, gates, gates, parameters, pool, batch, rows)
    state = torch.randn(slots, value_heads, key_width, value_width, device=device)
    o = torch.empty(bucket.rows, value_heads, value_width, device=device)
    workspace = SerialWorkspace.empty(bucket, value_heads, key_width, value_width, device)
    verify_serial(rows, state, pool, batch, o, workspace)
    _refuse_nan(o[: sum(sizes)])
    tiles = (
        FactorisedTile(16, 16),
        FactorisedTile(32, 16),
        HeldTile(1),
        HeldTile(2),
        HeldTile(4),
        StreamedTile(32, 3),
    )
    for tile in tiles:
        if not why_unfit(tile, bucket, key_width, value_width, dtype):
            o.fill_(float("nan"))
            verify_factorised(rows, state, pool, batch, o, tile)
            _refuse_nan(o[: sum(sizes)])
    flush(state, pool, batch.slot, batch.pending, batch.pending_len)
    if not bool(torch.isfinite(state).all()):
        raise ValueError("a state is not finite")


def launch_norms() -> None:
    """Embedding, residual and norm, gated norm: rows that do not count among others."""
    rows, width, heads = _rows(), 176, 3
    x = torch.randn(_ROWS, width, device="cuda")
    out = torch.empty(_ROWS, width, dtype=_DTYPE, device="cuda")
    embed(
        torch.arange(_ROWS, dtype=torch.int32, device="cuda"),
        torch.randn(_VOCAB, width, device="cuda").to(_DTYPE),
        x,
        rows,
    )
    weight = torch.randn(width, device="cuda")
    for y in (None, torch.randn(_ROWS, width, device="cuda").to(_DTYPE), torch.randn(3, _ROWS, width, device="cuda")):
        add_rms_norm(x, y, weight, 1e-5, out, rows)
        _refuse_nan(out[:_USED])
    o = torch.randn(_ROWS, heads, 48, device="cuda")
    gated = torch.empty(_ROWS, heads * 48, dtype=_DTYPE, device="cuda")
    for gate in (None, torch.randn(_ROWS, heads * 48, device="cuda").to(_DTYPE)):
        gated_norm(o, gate, torch.randn(48, device="cuda"), 1e-5, "silu", gated, rows)
        _refuse_nan(gated[:_USED])


def launch_products() -> None:
    """Plain and streamed ones, in parts, with SwiGLU and onto what is there."""
    rows = _rows()
    for outputs, inputs, dtype in ((40, 72, torch.float32), (264, 512, _DTYPE), (256, 2048, _DTYPE)):
        x = torch.randn(_ROWS, inputs, device="cuda").to(dtype)
        weight = torch.randn(outputs, inputs, device="cuda").to(dtype)
        parts = product_parts(outputs, inputs)
        for out, add, swiglu in (
            (torch.zeros(parts, _ROWS, outputs, device="cuda"), False, False),
            (torch.zeros(_ROWS, outputs, device="cuda"), True, False),
            (torch.zeros(_ROWS, outputs // 2, dtype=dtype, device="cuda"), False, True),
        ):
            product(x, weight, out, rows, add=add, swiglu=swiglu)
            _refuse_nan(out[..., :_USED, :])


def launch_wide_products() -> None:
    """Of many rows."""
    many, outputs, inputs = 135, 400, 512
    x, weight = (torch.randn(n, inputs, device="cuda").to(_DTYPE) for n in (many, outputs))
    out, rows = torch.zeros(many, outputs, device="cuda"), torch.full((1,), many - 3, dtype=torch.int32, device="cuda")
    product(x, weight, out, rows, tile=WideTile(192, 2))
    _refuse_nan(out)


def launch_between_mixers() -> None:
    """Two layers, where the device has the form; K of the down-projection is cut into parts."""
    hidden, values, channels, inputs = 512, 512, 1024, 1040
    place = MeetingPlace.of(torch.device("cuda"))
    assert place is not None

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(_DTYPE) / math.sqrt(shape[1])

    norm, rows, parts = torch.ones(hidden, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda"), 2
    row = DenseRow(
        matrix(1, values),
        torch.randn(1, hidden, device="cuda"),
        torch.empty(1, 1, hidden, device="cuda"),
        torch.empty(parts, 1, hidden, device="cuda"),
        *(torch.empty(1, width, dtype=_DTYPE, device="cuda") for width in (channels, inputs, hidden)),
    )
    for following in (matrix(inputs, hidden), None):
        weights = DenseWeights(
            matrix(hidden, values), norm, matrix(2 * channels, hidden), matrix(hidden, channels), norm, following
        )
        between_mixers(row, weights, 1e-6, rows, place)
    _refuse_nan(row.final)
    _refuse_nan(row.inputs)


def launch_chunk() -> None:
    """Convolution, recurrence and SwiGLU of two texts' tokens, of a shape for each form."""
    before, kept, none = range(_TAPS - 1), range(_TAPS - 1, 2 * _TAPS - 2), dict[int, int]()
    for shape, dtype in ((_ODD, torch.float32), (_USUAL, _DTYPE)):
        (heads, value_heads, key_width, value_width), tokens = shape, 2 * CHUNK
        channels = 2 * heads * key_width + value_heads * value_width
        parameters = ConvolutionParameters(
            torch.randn(_TAPS, channels, device="cuda"),
            torch.randn(value_heads, device="cuda"),
            torch.randn(value_heads, device="cuda"),
        )
        x, gates = (
            torch.randn(tokens, channels, device="cuda").to(dtype),
            torch.randn(tokens, 16, device="cuda").to(dtype),
        )
        rows = LayerRows.empty(tokens, heads, value_heads, key_pitch(key_width, dtype), value_width, dtype, "cuda")
        for part in rows:
            part.zero_()
        inputs = ChunkInputs(tokens, 3, _TAPS, 1, "cuda")
        inputs.put([ChunkText(slot, range(37 + slot), before, kept, none) for slot in (1, 0)], tokens)
        pools, a = torch.randn(2, 2 * _TAPS - 2, channels, device="cuda").to(dtype), gates[:, :value_heads]
        chunk_convolution(x, a, a, parameters, pools, inputs.batch, rows)
        states = torch.randn(2, value_heads, key_width, value_width, device="cuda")
        o = torch.zeros(tokens, value_heads, value_width, dtype=dtype, device="cuda")
        chunk_delta_rule(rows, states, inputs.batch, ChunkWorkspace.empty(tokens, value_heads, dtype, "cuda"), o)
        _refuse_nan(o)
        _refuse_nan(states)
        swiglu = torch.empty(tokens, channels // 2, dtype=dtype, device="cuda")
        chunk_swiglu(x, swiglu, inputs.batch.rows)
        _refuse_nan(swiglu[:37])


def _rows() -> Tensor:
    return torch.tensor([_USED], dtype=torch.int32, device="cuda")


def launch_sampler() -> None:
    """Sampling with and without truncation, whole rows and split ones, after penalties."""
    for splits in (1, 3):
        asked = [
            SamplingParams(seed=1, temperature=0.0),
            SamplingParams(seed=2, top_k=7, top_p=0.8, repetition_penalty=1.3),
            SamplingParams(seed=3, min_p=0.1),
        ]
        sessions = [SessionSampling(params, _VOCAB) for params in asked]
        drawn = RowSampling(sessions, range(len(asked)), [5, 6, 7])
        logits = torch.randn(len(asked) + 1, _VOCAB, device="cuda")
        entries = LogitEntries(len(asked) + 1, _VOCAB, 64, "cuda")
        entries.fill(drawn)
        adjust_logits(logits, entries)
        parameters = SamplerRows(
            len(asked) + 1, _VOCAB, "cuda", SamplerConfig(chunk=256, sweep=512, warps=4, splits=splits)
        )
        parameters.fill(drawn)
        tokens, errors = (torch.zeros(len(asked) + 1, dtype=torch.int32, device="cuda") for _ in range(2))
        sample(logits, parameters, tokens, errors)
        if bool(errors.any()):
            raise ValueError(f"rows failed: {errors.tolist()}")


def _sessions(sizes: Sequence[int], waiting: Sequence[int], factors: int) -> list[SessionPass]:
    rng = random.Random(0)
    made = []
    for slot, (size, pending) in enumerate(zip(sizes, waiting, strict=True)):
        order = rng.sample(range(factors), size + pending)
        topology = Topology.from_wire([rng.randint(max(-1, i - 4), i - 1) for i in range(size - 1)])
        made.append(
            SessionPass(
                slot=slot,
                topology=topology,
                pool_rows=order[:size],
                pending=order[size:],
                history=order[size : size + 3] if pending else (),
            )
        )
    return made


def _refuse_nan(o: Tensor) -> None:
    if bool(torch.isnan(o).any()):
        raise ValueError("an output is NaN")


if __name__ == "__main__":
    sys.exit(main())
