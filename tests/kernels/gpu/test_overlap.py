"""Layers that overlap, each kernel beginning while the one before it ends: the bits of launches one after the other.

A layer's v is the output of the layer before, so that a kernel that reads its rows too early is seen; state, pool and
batch are a layer's own, the workspace is one for all. Graphs are replayed without a pause: the last layer of a replay
and the first of the next use the workspace in turn, with an odd number of layers too.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from gpu_layers import Dims, Layer, assert_nothing_else_touched, make_layer
from tree_cases import chain, random_tree

from specla.kernels.gpu.factorised import AnyTile, factorised_tile, verify_factorised, why_unfit
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.gpu.streamed import StreamedTile
from specla.kernels.topology import Topology

pytestmark = pytest.mark.gpu

USUAL = [Dims(2, 4, 128, 128, torch.bfloat16), Dims(8, 8, 256, 256, torch.bfloat16)]
OTHER = [Dims(1, 2, 96, 192, torch.bfloat16), Dims(2, 2, 64, 64, torch.float32)]
SMALL, LARGE = (16, 1, 9), (64, 17, 3, 40)

Kernel = int | AnyTile
"""How many groups the serial kernel has, or the tile of a fast one."""

CASES: list[tuple[Dims, tuple[int, ...], Kernel]] = [
    *((dims, sizes, groups) for dims in USUAL + OTHER for sizes in (SMALL, LARGE) for groups in (1, 4)),
    *((dims, sizes, factorised_tile(max(sizes))) for dims in USUAL + OTHER for sizes in (SMALL, LARGE)),
    *((dims, SMALL, HeldTile(warps)) for dims in USUAL for warps in (1, 4)),
    *((dims, LARGE, HeldTile(warps)) for dims in USUAL for warps in (2, 4)),
    *((dims, SMALL, tile) for dims in USUAL for tile in (StreamedTile(32, 3, 128), StreamedTile(32, 4, 128))),
]

Launch = Callable[[bool], None]


def make_layers(dims: Dims, count: int, sizes: Sequence[int], kernel: Kernel, device: torch.device) -> list[Layer]:
    """The same contents at every call, each layer fed by the one before."""
    rng = random.Random(len(sizes))
    trees: list[Topology] = [*(random_tree(rng, n) for n in sizes), chain(max(sizes))]
    bucket = Bucket(
        sessions=len(trees) + 1,
        rows=sum(map(len, trees)) + 3,
        tree_rows=max(sizes),
        pending=8,
        groups=kernel if isinstance(kernel, int) else 1,
    )
    layers: list[Layer] = []
    for i in range(count):
        layer = make_layer(
            dims,
            trees,
            device,
            pending=[(3 * b + i) % 9 for b in range(len(trees))],
            bucket=bucket,
            write_state=[(b + i) % 3 != 1 for b in range(len(trees))],
            seed=i,
            gates="mild" if i % 2 else "mixed",
            out_dtype=dims.dtype,
        )
        if layers:
            layer.rows = layer.rows._replace(v=layers[-1].o)
        layers.append(layer)
    return layers


def launcher(layers: Sequence[Layer], kernel: Kernel) -> tuple[Launch, SerialWorkspace]:
    """Verifies all layers in turn, with or without overlap."""
    dims, bucket, device = layers[0].dims, layers[0].batch.bucket, layers[0].state.device
    workspace = SerialWorkspace.empty(bucket, dims.value_heads, dims.key_width, dims.value_width, device)

    def launch(overlap: bool) -> None:
        for layer in layers:
            arguments = layer.rows, layer.state, layer.pool, layer.batch, layer.o
            if isinstance(kernel, int):
                verify_serial(*arguments, workspace, overlap=overlap)
            else:
                verify_factorised(*arguments, kernel, overlap=overlap)

    return launch, workspace


def capture(layers: Sequence[Layer], launch: Launch) -> torch.cuda.CUDAGraph:
    """All layers with overlap in one graph, compiled before and the layers' contents as they were."""
    before = [layer.clone() for layer in layers]
    launch(True)
    for layer, was in zip(layers, before, strict=True):
        for now, then in zip(contents(layer), contents(was), strict=True):
            now.copy_(then)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(True)
    return graph


def contents(layer: Layer) -> list[torch.Tensor]:
    return [layer.state, *layer.pool, layer.o]


def named(case: tuple[Dims, tuple[int, ...], Kernel]) -> str:
    dims, sizes, kernel = case
    form = f"{kernel} groups" if isinstance(kernel, int) else f"{type(kernel).__name__}{tuple(kernel)}"
    return f"{dims.key_width}x{dims.value_width}-{max(sizes)} rows-{form}"


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_overlapping_layers_have_the_same_bits(
    device: torch.device, case: tuple[Dims, tuple[int, ...], Kernel], count: int
) -> None:
    dims, sizes, kernel = case
    overlapping, apart, untouched = (make_layers(dims, count, sizes, kernel, device) for _ in range(3))
    if not isinstance(kernel, int):
        bucket = overlapping[0].batch.bucket
        assert not why_unfit(kernel, bucket, dims.key_width, dims.value_width, dims.dtype)
    launch, workspace = launcher(overlapping, kernel)
    graph = capture(overlapping, launch)
    launch_apart, _ = launcher(apart, kernel)
    for replays in (1, 2, 5):
        for _ in range(replays):
            graph.replay()
        for _ in range(replays):
            launch_apart(False)
            torch.cuda.synchronize()
        for i, (got, wanted, before) in enumerate(zip(overlapping, apart, untouched, strict=True)):
            for now, then in zip(contents(got), contents(wanted), strict=True):
                assert torch.equal(now, then), f"layer {i} after {replays} more replays"
            assert_nothing_else_touched(before, got)
            assert not torch.equal(got.state, before.state)
            assert bool(got.o[: sum(map(len, (s.topology for s in got.sessions)))].isfinite().all())
    assert not workspace.arrived.any()
