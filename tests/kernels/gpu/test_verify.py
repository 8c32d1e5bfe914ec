"""The verification kernels against the float64 reference: odd sizes, extreme gates, nothing else touched."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from gpu_layers import Dims, Layer, assert_nothing_else_touched, expected, make_layer, written_factors
from torch import Tensor
from tree_cases import chain, random_tree, rms_ratio

from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.factorised import AnyTile, FactorisedTile, factorised_tile, verify_factorised, why_unfit
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.gpu.streamed import StreamedTile
from specla.kernels.topology import Topology

Run = Callable[[Layer], None]


def serial(layer: Layer) -> None:
    dims, bucket = layer.dims, layer.batch.bucket
    workspace = SerialWorkspace.empty(bucket, dims.value_heads, dims.key_width, dims.value_width, layer.state.device)
    verify_serial(layer.rows, layer.state, layer.pool, layer.batch, layer.o, workspace)
    assert not workspace.arrived.any()


def factorised(tile: AnyTile | None = None) -> Run:
    def run(layer: Layer) -> None:
        verify_factorised(layer.rows, layer.state, layer.pool, layer.batch, layer.o, tile)

    return run


def check(layer: Layer, run: Run, tolerance: float, output_tolerance: float = 0.0) -> None:
    """One pass of a copy of the layer, compared with float64 session by session: outputs, factors and states."""
    before, layer = layer, layer.clone()
    wanted = expected(layer)
    run(layer)
    assert_close(layer, wanted, tolerance, output_tolerance or tolerance)
    assert_nothing_else_touched(before, layer)
    for session in layer.sessions:
        if not (session.write_state and session.pending):
            assert torch.equal(layer.state[session.slot], before.state[session.slot])


def assert_close(
    layer: Layer, wanted: tuple[Tensor, Tensor, Tensor], tolerance: float, output_tolerance: float
) -> None:
    o, u, state = wanted
    written = written_factors(layer)
    for b, session in enumerate(layer.sessions):
        mine = slice(layer.first_row(b), layer.first_row(b) + len(session.topology))
        assert rms_ratio(layer.o[mine], o[mine]) < output_tolerance, f"outputs of {session}"
        assert rms_ratio(written[mine], u[mine]) < tolerance, f"factors of {session}"
        assert rms_ratio(layer.state[session.slot], state[session.slot]) < 1e-5, f"state of {session}"


SMALL = Dims(1, 2, 16, 16)
FORK = Topology.from_wire((-1, -1, 0, 0, 2, 1, 5))
TREES = [Topology.root_only(), chain(5), FORK, random_tree(random.Random(3), 17)]


@pytest.mark.parametrize("groups", [1, 3])
def test_serial_small(device: torch.device, groups: int) -> None:
    check(make_layer(SMALL, TREES, device, pending=[0, 1, 3, 6], groups=groups), serial, 1e-5)


@pytest.mark.parametrize("tile", [FactorisedTile(32, 16), FactorisedTile(16, 16)], ids=["one block", "blocks of 16"])
def test_factorised_small(device: torch.device, tile: FactorisedTile) -> None:
    check(make_layer(SMALL, TREES, device, pending=[0, 1, 3, 6]), factorised(tile), 1e-3)


def fast_tiles(layer: Layer) -> list[AnyTile]:
    """The general form, and on a GPU all others that the layer and its bucket can have."""
    dims, bucket = layer.dims, layer.batch.bucket
    others: list[AnyTile] = [*(HeldTile(n) for n in (1, 2, 4))]
    others += [StreamedTile(32, 3, 128), StreamedTile(32, 4, 128), StreamedTile(64, 4)]
    widths = dims.key_width, dims.value_width
    return [factorised_tile(bucket.tree_rows), *(t for t in others if not why_unfit(t, bucket, *widths, dims.dtype))]


def both(layer: Layer) -> None:
    check(layer, serial, 1e-5)
    for tile in fast_tiles(layer):
        check(layer, factorised(tile), 1e-3)


@pytest.mark.parametrize("gates", ["ends", "mild"])
def test_equal_keys_and_writing_strengths_of_0_and_2(device: torch.device, gates: str) -> None:
    """Equal keys with beta 2 and no decay turn every state over: the series of powers would blow up."""
    trees = [chain(9), FORK]
    both(make_layer(SMALL, trees, device, pending=[2, 0], gates=gates, betas="ends", equal_keys=True, seed=1))


def test_decays_of_nothing_and_of_everything(device: torch.device) -> None:
    both(make_layer(SMALL, [FORK, chain(3)], device, pending=[5, 1], gates="ends", groups=2, seed=2))
    both(make_layer(Dims(1, 1, 16, 16), [FORK, chain(3)], device, pending=[5, 1], gates="extreme", seed=3))


def test_more_pending_factors_than_are_applied_together(device: torch.device) -> None:
    bucket = Bucket(sessions=3, rows=16, tree_rows=8, pending=20, groups=2)
    trees = [FORK, chain(2), Topology.root_only()]
    both(make_layer(SMALL, trees, device, pending=[20, 17, 16], bucket=bucket, write_state=[True, False, True]))


def test_states_that_are_not_to_be_written_are_not(device: torch.device) -> None:
    both(make_layer(SMALL, [FORK, chain(2)], device, pending=[3, 0], write_state=False, groups=2))


def test_a_pass_without_sessions_touches_nothing(device: torch.device) -> None:
    layer = make_layer(SMALL, [], device, bucket=Bucket(sessions=2, rows=20, tree_rows=17, groups=2))
    for run in (serial, factorised(), factorised(FactorisedTile(16, 16))):
        after = layer.clone()
        run(after)
        assert torch.equal(after.o, layer.o)
        assert torch.equal(after.state, layer.state)
        assert all(torch.equal(got, was) for got, was in zip(after.pool, layer.pool, strict=True))


def test_roots_alone_beside_a_big_tree(device: torch.device) -> None:
    trees = [Topology.root_only(), random_tree(random.Random(5), 37), Topology.root_only()]
    both(make_layer(Dims(1, 1, 16, 16), trees, device, pending=[2, 1, 0], groups=3, spare_sessions=0, spare_rows=0))


@pytest.mark.parametrize("dims", [Dims(1, 4, 16, 16), Dims(1, 1, 48, 80)], ids=["four value heads a key", "odd widths"])
def test_other_shapes(device: torch.device, dims: Dims) -> None:
    both(make_layer(dims, [chain(2), FORK], device, pending=[1, 2]))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    layer = make_layer(SMALL, [FORK], device, pending=1)
    rows, workspace = layer.rows, SerialWorkspace.empty(layer.batch.bucket, 2, 16, 16, device)

    def refused(match: str, **fields: object) -> None:
        wrong = replace(layer, **fields)  # type: ignore[arg-type]
        for kernel, last in ((verify_serial, workspace), (verify_factorised, None)):
            with pytest.raises(ValueError, match=match):
                kernel(wrong.rows, wrong.state, wrong.pool, wrong.batch, wrong.o, last)  # type: ignore[operator]

    refused("do not fit", rows=rows._replace(q=rows.q[:, :, :8]))
    refused("do not fit", rows=rows._replace(v=rows.v.double()))
    refused("do not fit", o=layer.o[1:])
    refused("contiguous", rows=rows._replace(g=rows.g.t().contiguous().t()))
    refused("want state", state=layer.state.double())
    refused("want state", pool=layer.pool._replace(u=layer.pool.u[:, 1:]))
    other = PassBatch(replace(layer.batch.bucket, groups=2), device)
    with pytest.raises(ValueError, match="was not made for"):
        verify_serial(rows, layer.state, layer.pool, other, layer.o, workspace)
    chains = SerialWorkspace.empty(replace(layer.batch.bucket, tree_rows=2), 2, 16, 16, device)
    narrow = SerialWorkspace.empty(layer.batch.bucket, 2, 8, 16, device)
    for unfit in (chains, narrow, replace(workspace, arrived=workspace.arrived[1:])):
        with pytest.raises(ValueError, match="was not made for"):
            verify_serial(rows, layer.state, layer.pool, layer.batch, layer.o, unfit)
    unfit = {
        "block_n 16 or 32": FactorisedTile(64, 16),
        "bfloat16|GPU alone": HeldTile(4),
        "GPU|width": StreamedTile(32, 3),
    }
    for match, tile in unfit.items():
        with pytest.raises(ValueError, match=match):
            verify_factorised(rows, layer.state, layer.pool, layer.batch, layer.o, tile)
    shifted = torch.empty(layer.o.numel() + 1, device=device)[1:].view(layer.o.shape)
    refused("16 bytes", o=shifted)


def test_a_batch_is_held_to_the_store_that_it_was_used_with(device: torch.device) -> None:
    layer = make_layer(SMALL, [FORK], device, pending=1)
    serial(layer)
    slots, rows = layer.state.shape[0], layer.pool.k.shape[1]
    session = layer.sessions[0]
    for beyond in (replace(session, slot=slots), replace(session, pool_rows=[*session.pool_rows[1:], rows])):
        with pytest.raises(ValueError, match="beyond the store"):
            layer.batch.fill([beyond])
    layer.batch.fill([session])
    with pytest.raises(ValueError, match="bound to"):
        layer.batch.bind(slots=slots + 1, pool_rows=rows)


# ------------------------------------------------------------------------------------------ on a GPU alone

# One bucket for large trees and one for small ones, so that few variants are compiled.
BIG = Bucket(sessions=6, rows=420, tree_rows=129, pending=20, groups=4)
LOW = Bucket(sessions=6, rows=80, tree_rows=16, pending=8)
SHAPES = [
    Dims(2, 2, 64, 64, torch.bfloat16),
    Dims(1, 4, 64, 64, torch.float16),
    Dims(2, 4, 128, 128, torch.bfloat16),
    Dims(1, 1, 128, 128, torch.float32),
    Dims(2, 2, 256, 256, torch.bfloat16),
    Dims(1, 2, 96, 192, torch.bfloat16),
    Dims(1, 4, 96, 192, torch.float32),
    Dims(1, 2, 256, 512, torch.bfloat16),
    Dims(1, 1, 256, 512, torch.float16),
]
SIZES = [(129, 1, 17, 64), (40, 128, 65, 2), (3, 33, 127, 16, 100), ()]


def named(dims: Dims) -> str:
    return f"{dims.heads}-{dims.value_heads}x{dims.key_width}x{dims.value_width}-{str(dims.dtype)[6:]}"


def batches(bucket: Bucket, sizes: Sequence[Sequence[int]]) -> list[list[Topology]]:
    """Trees of the sizes asked for, and a chain, a star and a root alone."""
    rng, most = random.Random(len(sizes)), bucket.tree_rows
    star = Topology.from_wire([-1] * (most - 1))
    return [[random_tree(rng, n) for n in some] for some in sizes] + [[chain(most), Topology.root_only(), star]]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", SHAPES, ids=named)
def test_large_trees_on_a_gpu(device: torch.device, dims: Dims) -> None:
    rng = random.Random(dims.key_width)
    for i, trees in enumerate(batches(BIG, SIZES)):
        pending = [rng.choice([0, 1, 3, 16, 17, 20]) for _ in trees]
        writes = [rng.random() < 0.7 for _ in trees]
        for gates in ("mixed", "mild", "extreme"):
            both(
                make_layer(dims, trees, device, pending=pending, bucket=BIG, write_state=writes, gates=gates, seed=i),
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dims", SHAPES, ids=named)
def test_small_trees_on_a_gpu(device: torch.device, dims: Dims) -> None:
    for i, trees in enumerate(batches(LOW, [(1, 2, 3), (16, 15, 9, 7, 12, 16), (1, 1, 1, 1, 1)])):
        for gates in ("mixed", "mild", "extreme"):
            pending = [(3 * b + i) % 9 for b in range(len(trees))]
            both(make_layer(dims, trees, device, pending=pending, bucket=LOW, gates=gates, seed=10 + i))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [SHAPES[2], SHAPES[3]], ids=named)
def test_hard_systems_on_a_gpu(device: torch.device, dims: Dims) -> None:
    """Equal keys, strengths and decays at their ends, over the longest chain and through blocks of 16 and 32."""
    for gates in ("ends", "mild"):
        layer = make_layer(
            dims,
            [chain(129), random_tree(random.Random(1), 129), FORK],
            device,
            pending=[20, 0, 7],
            bucket=BIG,
            gates=gates,
            betas="ends",
            equal_keys=True,
        )
        both(layer)
        check(layer, factorised(FactorisedTile(16, 32, 64)), 1e-3)


@pytest.mark.gpu
def test_every_fast_form_is_tried_on_a_gpu(device: torch.device) -> None:
    tiles = fast_tiles(make_layer(SHAPES[4], [chain(3)], device, bucket=LOW))
    assert [type(t) for t in tiles] == [FactorisedTile, *[HeldTile] * 3, *[StreamedTile] * 3]
    assert fast_tiles(make_layer(SHAPES[1], [chain(3)], device, bucket=LOW))[1:] == []
    big = fast_tiles(make_layer(SHAPES[7], [chain(3)], device, bucket=BIG))
    assert big[1:] == [HeldTile(2), HeldTile(4)]


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", [LOW, BIG], ids=["one block", "blocks"])
@pytest.mark.parametrize("dims", [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[7]], ids=named)
def test_held_states_commit_with_the_bits_of_a_flush_on_a_gpu(device: torch.device, dims: Dims, bucket: Bucket) -> None:
    trees = [chain(16), FORK, chain(2)]
    layer = make_layer(dims, trees, device, pending=[8, 0, 3], bucket=bucket)
    flushed = layer.clone()
    flush(flushed.state, flushed.pool, layer.batch.slot, layer.batch.pending, layer.batch.pending_len)
    factorised(HeldTile(4))(layer)
    assert torch.equal(layer.state, flushed.state)
    assert not torch.equal(layer.state, make_layer(dims, trees, device, bucket=bucket).state)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 32, 33, 48, 49, 64, 65, 80, 81, 112, 113, 128])
def test_buckets_that_end_anywhere_in_a_chunk_on_a_gpu(device: torch.device, rows: int) -> None:
    """Chunks are 32 or 64 rows; a last one of up to 16 is shared out over the warps."""
    trees = [random_tree(random.Random(rows), rows), chain(rows), random_tree(random.Random(1), rows // 2 + 1)]
    bucket = Bucket(sessions=4, rows=3 * rows, tree_rows=rows, pending=8)
    layer = make_layer(SHAPES[0], trees, device, pending=[5, 0, 8], bucket=bucket, gates="mild", seed=rows)
    for warps in (2, 4):
        check(layer, factorised(HeldTile(warps)), 1e-3)


@pytest.mark.gpu
def test_outputs_in_the_dtype_of_a_model_on_a_gpu(device: torch.device) -> None:
    trees = [random_tree(random.Random(2), 16), chain(5)]
    layer = make_layer(SHAPES[0], trees, device, pending=[3, 8], bucket=LOW, out_dtype=torch.bfloat16)
    check(layer, serial, 1e-5, output_tolerance=3e-3)
    check(layer, factorised(), 1e-3, output_tolerance=3e-3)


@pytest.mark.gpu
def test_slots_beyond_32_bits_on_a_gpu(device: torch.device) -> None:
    """States that lie more than 2^31 elements behind the first: the same bits as near ones."""
    dims = SHAPES[7]
    near = make_layer(dims, [random_tree(random.Random(4), 16), chain(16)], device, pending=[8, 3], bucket=LOW)
    slots = 2**31 // (dims.value_heads * dims.key_width * dims.value_width) + near.state.shape[0]
    shift = slots - near.state.shape[0]
    far = replace(near.clone(), batch=PassBatch(LOW, device))
    far.sessions = [replace(s, slot=s.slot + shift) for s in near.sessions]
    far.batch.fill(far.sessions)
    far.state = torch.empty(slots, *near.state.shape[1:], device=device)
    far.state[shift:] = near.state
    far.pool = FactorPool(*(torch.empty(slots, *x.shape[1:], dtype=x.dtype, device=device) for x in near.pool))
    for whole, part in zip(far.pool, near.pool, strict=True):
        whole[shift:] = part
    for run in (serial, factorised()):
        here, there = near.clone(), replace(far, o=far.o.clone())
        there.state[shift:] = near.state
        run(here)
        run(there)
        assert torch.equal(here.o, there.o)
        assert torch.equal(here.state, there.state[shift:])
        assert torch.equal(written_factors(here), written_factors(there))
    there.state[shift:] = near.state
    pending, lengths = far.batch.pending, far.batch.pending_len
    flush(there.state, there.pool, far.batch.slot, pending, lengths)
    here = near.clone()
    flush(here.state, here.pool, near.batch.slot, pending, lengths)
    assert torch.equal(here.state, there.state[shift:])
