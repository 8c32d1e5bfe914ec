"""Launches every GPU kernel on small shapes, for compute-sanitizer to watch: `make sanitize-gpu`.

Launches have odd sizes, unused places and, where a kernel allows it, several programs that share a tile. Tensors come
one by one from the driver (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a step past the end of one is seen. Results are
only looked at for NaN: what they must be is the tests' matter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from specla.kernels.gpu.adjusting import LogitEntries, adjust_logits
from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.convolution import ConvolutionParameters, tree_convolution
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import FactorisedTile, verify_factorised, why_unfit
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
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


def main() -> int:
    """Runs all launches; a kernel that writes NaN is an error, the rest is the sanitizer's to find."""
    if not torch.cuda.is_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 1
    for shape, sizes, groups in ((_ODD, _LARGE, 1), (_ODD, _LARGE, 3), (_USUAL, _LARGE, 3), (_USUAL, _SMALL, 1)):
        launch_layer(shape, *sizes, groups)
        print(f"a layer of {shape}, rows {sizes[0]}, {groups} programs a tree: launched", flush=True)
    launch_sampler()
    torch.cuda.synchronize()
    print("sampler: launched", flush=True)
    return 0


def launch_layer(shape: tuple[int, int, int, int], sizes: Sequence[int], pending: Sequence[int], groups: int) -> None:
    """Convolution, all forms of verification that fit and a flush, for trees of different sizes in one batch."""
    (heads, value_heads, key_width, value_width), dtype = shape, _DTYPE
    device, slots = "cuda", len(sizes)
    bucket = Bucket(
        sessions=slots + 1,
        rows=sum(sizes) + 3,
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
