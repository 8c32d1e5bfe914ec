"""Exact mode on the GPU kernels: a row's bits depend on its path alone, and equal those of plain decoding."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from gpu_layers import Dims, Layer, assert_nothing_else_touched, make_layer, written_factors
from torch import Tensor
from tree_cases import chain, random_tree

from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.gpu.serial_batch import batch_form
from specla.kernels.topology import Topology

SMALL = Dims(1, 2, 16, 16)
WIDE = [
    Dims(2, 2, 64, 64, torch.bfloat16),
    Dims(1, 2, 128, 128, torch.bfloat16),
    Dims(1, 4, 96, 192, torch.bfloat16),
    Dims(1, 1, 256, 256, torch.bfloat16),
    Dims(1, 1, 256, 512, torch.float16),
]
TREES = [Topology.from_wire((-1, -1, 0, 0, 2, 1, 5)), chain(4), Topology.root_only()]


def run(layer: Layer) -> tuple[Tensor, Tensor]:
    """o and u of the used rows."""
    dims, bucket = layer.dims, layer.batch.bucket
    workspace = SerialWorkspace.empty(bucket, dims.value_heads, dims.key_width, dims.value_width, layer.state.device)
    verify_serial(layer.rows, layer.state, layer.pool, layer.batch, layer.o, workspace)
    return layer.o[: sum(len(s.topology) for s in layer.sessions)], written_factors(layer)


def decode(layer: Layer) -> tuple[Tensor, Tensor]:
    """Each row as plain decoding computes it: one-row passes, each committing the row before it."""
    outputs, factors = [], []
    for b, session in enumerate(layer.sessions):
        first, rows_of = layer.first_row(b), len(session.topology)
        states: list[Tensor] = []  # after the pending factors and all rows down to each
        start = layer.state.clone()
        flush(start, layer.pool, *_lists([session.slot], [session.pending], start.device))
        for row in range(rows_of):
            parent = session.topology.parent_rows[row]
            state = (start if parent < 0 else states[parent]).clone()
            batch = PassBatch(Bucket(sessions=1, rows=1, tree_rows=1, pending=1), state.device)
            batch.fill(
                [SessionPass(slot=session.slot, topology=Topology.root_only(), pool_rows=[session.pool_rows[row]])]
            )
            one = LayerRows(*(x[first + row : first + row + 1].contiguous() for x in layer.rows))
            o = torch.empty_like(layer.o[:1])
            dims = layer.dims
            workspace = SerialWorkspace.empty(
                batch.bucket, dims.value_heads, dims.key_width, dims.value_width, o.device
            )
            verify_serial(one, state, layer.pool, batch, o, workspace)
            outputs.append(o)
            factors.append(layer.pool.u[session.slot, session.pool_rows[row]].clone()[None])
            flush(state, layer.pool, *_lists([session.slot], [[session.pool_rows[row]]], state.device))
            states.append(state)
    return torch.cat(outputs), torch.cat(factors)


def _lists(slots: Sequence[int], paths: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    width = max(1, *map(len, paths))
    padded = [[*path, *[0] * (width - len(path))] for path in paths]
    return (
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device),
    )


def check_rows(
    dims: Dims,
    trees: Sequence[Topology],
    device: torch.device,
    groups: Sequence[int],
    gates: str,
    out_dtype: torch.dtype = torch.float32,
) -> None:
    pending = [(3 * b) % 8 for b in range(len(trees))]
    first = make_layer(dims, trees, device, pending=pending, gates=gates, out_dtype=out_dtype)
    alone = decode(first.clone())
    assert alone[0].dtype == out_dtype
    for count in groups:
        layer = make_layer(dims, trees, device, pending=pending, gates=gates, groups=count, out_dtype=out_dtype)
        together = run(layer)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)), f"{count} groups"


def check_commit(dims: Dims, tree: Topology, device: torch.device) -> None:
    """A state committed by the next pass, at once or path by path or by a flush, has the bits of serial steps."""
    layer = make_layer(dims, [tree], device, pending=5, groups=2)
    session, serial = layer.sessions[0], layer.state.clone()
    for row in session.pending:
        flush(serial, layer.pool, *_lists([session.slot], [[row]], device))
    flushed = layer.state.clone()
    flush(flushed, layer.pool, *_lists([session.slot], [session.pending], device))
    assert torch.equal(flushed, serial)
    run(layer)
    assert torch.equal(layer.state, serial)
    assert not torch.equal(layer.state, make_layer(dims, [tree], device, pending=5).state)


def test_rows_have_the_bits_of_plain_decoding(device: torch.device) -> None:
    check_rows(SMALL, TREES, device, [1, 2], "mixed")


def test_commit_has_the_bits_of_serial_steps(device: torch.device) -> None:
    check_commit(SMALL, TREES[0], device)


def test_a_ring_of_pending_factors_changes_no_bit(device: torch.device) -> None:
    layer = make_layer(SMALL, TREES, device, pending=4)
    ring = replace(layer.clone(), sessions=[replace(s, write_state=False) for s in layer.sessions])
    ring.batch = PassBatch(layer.batch.bucket, device)
    ring.batch.fill(ring.sessions)
    before = layer.state.clone()
    assert all(torch.equal(a, b) for a, b in zip(run(layer), run(ring), strict=True))
    assert torch.equal(ring.state, before)
    assert not torch.equal(layer.state, before)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["mixed", "mild", "extreme"])
@pytest.mark.parametrize("outputs", ["float32", "model dtype"])
@pytest.mark.parametrize("dims", WIDE, ids=lambda d: f"{d.key_width}x{d.value_width}")
def test_rows_on_a_gpu(device: torch.device, dims: Dims, outputs: str, gates: str) -> None:
    rng = random.Random(dims.key_width)
    trees = [random_tree(rng, n) for n in (1, 2, 17, 40, 64)] + [chain(16), TREES[0], random_tree(rng, 129)]
    check_rows(dims, trees, device, [1, 2, 4, 8], gates, torch.float32 if outputs == "float32" else dims.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 129])
@pytest.mark.parametrize(
    "dims",
    [
        Dims(2, 4, 64, 64, torch.bfloat16),
        Dims(4, 16, 128, 128, torch.float16),
        Dims(2, 6, 256, 80, torch.bfloat16),
        Dims(8, 8, 256, 256, torch.bfloat16),
    ],
    ids=lambda d: f"{d.value_heads}x{d.key_width}x{d.value_width}",
)
def test_many_programs_on_a_gpu(device: torch.device, dims: Dims, rows: int) -> None:
    """The form for batches, in a bucket with places that nobody uses."""
    rng = random.Random(rows)
    trees = [random_tree(rng, rows), chain(rows), *(random_tree(rng, max(1, rows // n)) for n in (1, 2, 5)), TREES[2]]
    places = 528 * 16 // (dims.value_heads * dims.value_width) + 3
    bucket = Bucket(sessions=places, rows=max(places, sum(map(len, trees)) + 3), tree_rows=rows, pending=19)
    assert batch_form(bucket, dims.value_heads, dims.value_width) is not None
    layer = make_layer(dims, trees, device, pending=[19, 0, 8, 9, 3, 1], bucket=bucket)
    alone, committed = decode(layer.clone()), layer.state.clone()
    flush(committed, layer.pool, *_lists([s.slot for s in layer.sessions], [s.pending for s in layer.sessions], device))
    before = layer.clone()
    assert all(torch.equal(a, b) for a, b in zip(run(layer), alone, strict=True))
    assert torch.equal(layer.state, committed)
    assert_nothing_else_touched(before, layer)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dims", WIDE, ids=lambda d: f"{d.key_width}x{d.value_width}")
def test_outputs_are_rounded_alone_on_a_gpu(device: torch.device, dims: Dims, groups: int) -> None:
    """The dtype of the outputs changes nothing else, and each is the float32 one rounded."""
    rng = random.Random(dims.value_width)
    trees = [random_tree(rng, n) for n in (1, 16, 33)] + [chain(9)]
    exact, rounded = (
        make_layer(dims, trees, device, pending=[0, 1, 8, 5], groups=groups, out_dtype=dtype)
        for dtype in (torch.float32, dims.dtype)
    )
    (o, u), (o_rounded, u_rounded) = run(exact), run(rounded)
    assert torch.equal(o.to(dims.dtype), o_rounded)
    assert torch.equal(u, u_rounded)
    assert torch.equal(exact.state, rounded.state)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", WIDE, ids=lambda d: f"{d.key_width}x{d.value_width}")
def test_commit_on_a_gpu(device: torch.device, dims: Dims) -> None:
    for seed in range(3):
        check_commit(dims, random_tree(random.Random(seed), 33), device)
