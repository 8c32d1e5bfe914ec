"""From one mixer's output to the next mixer's inputs in one launch, for a single row on Hopper.

Output projection, residual and norm, gate-up with SwiGLU, down-projection, residual and norm, the next layer's input
projection. Separate launches wait for each other with nothing on its way from memory but what a ring of their own
holds. Here all multiprocessors take part in all of it and meet between two products. Which weights a program
multiplies is known from the start, so one warp asks for them through all four products: while programs meet and norm
the row, memory brings the weights that come next.

Not as fast as it can: whoever meets waits for a few words from L2, and behind deep queues of weights these took 3 to 4
us instead of 1. So few blocks are under way while a product's row is not there yet, and more once it is.

Every output is the chain of products of product_streamed.py, and the norm sums as norms.py does, so the bits are those
of separate launches. A program norms the whole row for itself: one meeting less, and nothing to fetch. With more rows
that costs more than it saves, and separate launches were faster (docs/decisions.md).
"""

from __future__ import annotations

import math
import threading
from typing import ClassVar, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specla.kernels.gpu.norms import check_rows, check_tensor
from specla.kernels.gpu.one_row import BLOCK, HALF_BLOCK, PLACES, TILE, WARPS, between_mixers_kernel
from specla.kernels.gpu.product_streamed import on_hopper, ring, streams

# Of a row: a thread of norms.py has one run of it, of two numbers or more. Of a single one the square is rounded on its
# way to another lane, and lanes' sums differ.
_LEAST, _MOST = 512, 2048
_REGISTERS = 72  # a thread, so that the mixer's kernels have room beside


class Pace(NamedTuple):
    """How a program's weights come. No part of it changes a bit; `Pace()` is the fastest of those timed on an H200."""

    stages: int = 11
    """Blocks of 16 KB in the ring. The mixer's kernels need some shared memory beside it."""
    flight: int = 6
    """Blocks under way once a product's row is there."""
    low_flight: int = 2
    """Blocks under way before."""
    ahead: int = 10
    """A product's blocks that are asked for before its row is there."""
    early: int = 6
    """Gate-up's blocks that are asked for before the output projection's row is there."""


class DenseWeights(NamedTuple):
    """What lies between two mixers. Matrices [outputs, inputs] of one 16-bit dtype, norms in float32."""

    output: Tensor
    """[D, V], V the width of a mixer's output."""
    mlp_norm: Tensor
    """[D]."""
    gate_up: Tensor
    """[2 M, D], gates and what they gate in turns."""
    down: Tensor
    """[D, M]."""
    next_norm: Tensor
    """[D], before the next mixer; the final norm behind the last layer."""
    next_inputs: Tensor | None
    """[I, D], the next layer's input projection; None behind the last layer."""


class DenseRow(NamedTuple):
    """The row's activations."""

    mixed: Tensor
    """Model dtype [1, V], the mixer's output."""
    stream: Tensor
    """float32 [1, D], the residual stream, which is added to."""
    from_mixer: Tensor
    """float32 [P, 1, D], scratch: P is how many parts K of the output projection is cut into."""
    from_mlp: Tensor
    """The same of the down-projection; may be the same memory."""
    activated: Tensor
    """Model dtype [1, M], scratch."""
    inputs: Tensor
    """Model dtype [1, I], the next layer's inputs; not written behind the last layer."""
    final: Tensor
    """Model dtype [1, D], the normed row behind the last layer; not written elsewhere."""


class MeetingPlace:
    """Where the programs of launches meet; one a device, for all that its default stream runs.

    All of a launch's programs must run at once, one a multiprocessor, so of two such launches side by side neither
    might end. Those of one stream take turns, whoever starts them: all launches that meet must be in the device's
    default stream. Processes take turns as well, unless they share multiprocessors (by MPS): then one of them at most
    may have such launches. Nor may a process that can use only some of the multiprocessors that its device reports.

    Attributes:
        arrived: int64 [1], how many programs have arrived, ever.
        stream: float32 [1, 2048], the residual stream between the two norms of a launch.
    """

    _of_devices: ClassVar[dict[int, MeetingPlace]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        """One that nobody else knows: for whoever sees to it that its launches take turns with all others that meet."""
        self.arrived = torch.zeros(1, dtype=torch.int64, device=device)
        self.stream = torch.zeros(1, _MOST, device=device)

    @classmethod
    def of(cls, device: torch.device) -> MeetingPlace | None:
        """The device's, for whoever runs in its default stream; None in another stream or on another kind of device."""
        if triton.knobs.runtime.interpret or not on_hopper(device):
            return None
        if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        with cls._making:
            if index not in cls._of_devices:
                cls._of_devices[index] = cls(torch.device("cuda", index))
            return cls._of_devices[index]


def why_apart(weights: DenseWeights, parts: tuple[int, int]) -> str | None:
    """Why weights take separate launches, for whoever asks; None if this form takes them.

    Args:
        weights: of any layer.
        parts: how many parts K of the output and the down-projection are cut into.
    """
    hidden, dtype, device = weights.output.shape[0], weights.output.dtype, weights.output.device
    if triton.knobs.runtime.interpret:
        return "the interpreter does not run it"
    if not on_hopper(device):
        return f"{device} is not a GPU of the Hopper generation"
    programs = _programs(device)
    if not _LEAST <= hidden <= _MOST or hidden & (hidden - 1):
        return f"rows of {hidden} are no power of two from {_LEAST} to {_MOST}"
    if min(parts) < 1 or dtype not in (torch.bfloat16, torch.float16):
        return f"{parts} parts of K, weights of {dtype}: 16 bits and one part at the least are taken"
    for weight, count in zip(_matrices(weights), (parts[0], 1, parts[1], 1), strict=False):
        outputs, inputs = weight.shape
        if not streams(outputs, inputs, count, dtype) or inputs % (count * BLOCK):
            return f"a weight {list(weight.shape)} in {count} parts of K is not cut into tiles of 64 and blocks of 128"
        if count > 1 and math.ceil(outputs / TILE) * count > programs:
            return f"a weight {list(weight.shape)} in {count} parts of K has more units than {programs} programs"
    if max(hidden, *(w.shape[1] // p for w, p in ((weights.output, parts[0]), (weights.down, parts[1])))) > _MOST:
        return f"more than {_MOST} numbers of a row are multiplied at a time"
    return None


def between_mixers(
    row: DenseRow,
    weights: DenseWeights,
    eps: float,
    rows: Tensor,
    place: MeetingPlace,
    *,
    overlap: bool = False,
    pace: Pace = Pace(),  # noqa: B008
) -> None:
    """What `product` and `add_rms_norm` make of a row between two mixers, bit for bit.

    Weights are on their way before the kernel before has ended; the next launch may begin once this one has waited.

    Args:
        row: what comes in, scratch, and what comes out.
        weights: of one layer, and of the next one what comes before its mixer.
        eps: of both norms.
        rows: int32 [1], how many rows count, 0 or 1.
        place: of the stream's launches.
        overlap: whether to begin while the kernel before may still run; that one must write neither `rows` nor
            weights.
        pace: how weights come.

    Raises:
        ValueError: shapes, dtypes, layout or device do not belong together, or the weights do not take this form (see
            `why_apart`).
    """
    _check(row, weights, rows, place, pace)
    hidden, following = weights.output.shape[0], weights.next_inputs
    sizes = [
        (*weight.shape, parts)
        for weight, parts in zip(_matrices(weights), (len(row.from_mixer), 1, len(row.from_mlp), 1), strict=False)
    ]
    if following is None:
        sizes.append((0, hidden, 1))
    behind = weights.down if following is None else following
    programs = _programs(row.stream.device)
    between_mixers_kernel[(programs,)](
        _row_blocks(row.mixed),
        _row_blocks(row.activated),
        _weight_blocks(weights.output, TILE),
        _weight_blocks(weights.gate_up, TILE),
        _weight_blocks(weights.down, TILE),
        _weight_blocks(behind, TILE),
        _weight_blocks(weights.gate_up, TILE // 2),
        _weight_blocks(behind, TILE // 2),
        row.stream,
        place.stream,
        row.from_mixer,
        row.from_mlp,
        weights.mlp_norm,
        weights.next_norm,
        row.activated,
        row.inputs,
        row.final,
        rows,
        place.arrived,
        eps,
        ALL=tuple(sizes),
        PROGRAMS=programs,
        PACE=tuple(pace),
        BLOCKS=triton.next_power_of_2(max(inputs // parts for _, inputs, parts in sizes) // HALF_BLOCK),
        OVERLAP=overlap,
        num_warps=WARPS,
        maxnreg=_REGISTERS,
        launch_pdl=overlap,
    )


def _programs(device: torch.device) -> int:
    """One a multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _matrices(weights: DenseWeights) -> list[Tensor]:
    """In the order of the products."""
    return [w for w in (weights.output, weights.gate_up, weights.down, weights.next_inputs) if w is not None]


def _row_blocks(x: Tensor) -> TensorDescriptor:
    """Of a row, in as many places as a product has; those past the first are zeros."""
    return TensorDescriptor(x, [1, x.shape[1]], [x.shape[1], 1], [PLACES, HALF_BLOCK], ring(2))


def _weight_blocks(weight: Tensor, tile: int) -> TensorDescriptor:
    """Of so many outputs, by pairs (see product_streamed.py)."""
    outputs, inputs = weight.shape
    by_pairs = [outputs // 16, 2, 8, inputs], [16 * inputs, inputs, 2 * inputs, 1]
    return TensorDescriptor(weight, *by_pairs, [tile // 16, 2, 8, HALF_BLOCK], ring(4))


def _check(row: DenseRow, weights: DenseWeights, rows: Tensor, place: MeetingPlace, pace: Pace) -> None:
    """Raises ValueError as `between_mixers` says."""
    device, dtype, single = row.stream.device, weights.output.dtype, (torch.float32,)
    hidden, values = weights.output.shape
    channels = weights.down.shape[1]
    check_tensor("mixed", row.mixed, (1, values), (dtype,), device)
    check_tensor("stream", row.stream, (1, hidden), single, device)
    for name, parts in (("from_mixer", row.from_mixer), ("from_mlp", row.from_mlp)):
        check_tensor(name, parts, (len(parts), 1, hidden), single, device)
    check_tensor("activated", row.activated, (1, channels), (dtype,), device)
    check_tensor("output", weights.output, (hidden, values), (torch.bfloat16, torch.float16), device)
    check_tensor("gate_up", weights.gate_up, (2 * channels, hidden), (dtype,), device)
    check_tensor("down", weights.down, (hidden, channels), (dtype,), device)
    for name, norm in (("mlp_norm", weights.mlp_norm), ("next_norm", weights.next_norm)):
        check_tensor(name, norm, (hidden,), single, device)
    if weights.next_inputs is None:
        check_tensor("final", row.final, (1, hidden), (dtype,), device)
    else:
        check_tensor("next_inputs", weights.next_inputs, (weights.next_inputs.shape[0], hidden), (dtype,), device)
        check_tensor("inputs", row.inputs, (1, weights.next_inputs.shape[0]), (dtype,), device)
    check_rows(rows, device)
    if place.stream.device != device:
        raise ValueError(f"the place is on {place.stream.device}: give one of {device}")
    reason = why_apart(weights, (len(row.from_mixer), len(row.from_mlp)))
    if reason is not None:
        raise ValueError(f"{reason}: use `product` and `add_rms_norm`")
    flights = pace.flight, pace.low_flight
    if pace.stages < 2 or min(flights) < 1 or max(flights) > pace.stages or not 0 <= pace.early <= pace.ahead:
        raise ValueError(f"{pace}: give 2 stages or more, flights from 1 to the stages, and no more early than ahead")
