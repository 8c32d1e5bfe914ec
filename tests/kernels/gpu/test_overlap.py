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

from specla.kernels.gpu.factorised import verify_factorised
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.topology import Topology

pytestmark = pytest.mark.gpu

DIMS = [
    Dims(2, 4, 128, 128, torch.bfloat16),
    Dims(8, 8, 256, 256, torch.bfloat16),
    Dims(1, 2, 96, 192, torch.bfloat16),
    Dims(2, 2, 64, 64, torch.float32),
]
SIZES = {"small": (16, 1, 9), "large": (64, 17, 3, 40)}
KERNELS = {"serial, 1 group": 1, "serial, 4 groups": 4, "fast": 0}

Launch = Callable[[bool], None]


def make_layers(dims: Dims, count: int, sizes: Sequence[int], groups: int, device: torch.device) -> list[Layer]:
    """The same contents at every call, each layer fed by the one before."""
    rng = random.Random(len(sizes))
    trees: list[Topology] = [*(random_tree(rng, n) for n in sizes), chain(max(sizes))]
    bucket = Bucket(
        sessions=len(trees) + 1, rows=sum(map(len, trees)) + 3, tree_rows=max(sizes), pending=8, groups=max(groups, 1)
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


def launcher(layers: Sequence[Layer], groups: int) -> tuple[Launch, SerialWorkspace]:
    """Verifies all layers in turn, with or without overlap."""
    dims, bucket, device = layers[0].dims, layers[0].batch.bucket, layers[0].state.device
    workspace = SerialWorkspace.empty(bucket, dims.value_heads, dims.key_width, dims.value_width, device)

    def launch(overlap: bool) -> None:
        for layer in layers:
            if groups:
                verify_serial(layer.rows, layer.state, layer.pool, layer.batch, layer.o, workspace, overlap=overlap)
            else:
                verify_factorised(layer.rows, layer.state, layer.pool, layer.batch, layer.o, overlap=overlap)

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


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"{d.key_width}x{d.value_width}")
def test_overlapping_layers_have_the_same_bits(
    device: torch.device, dims: Dims, kernel: str, size: str, count: int
) -> None:
    groups = KERNELS[kernel]
    overlapping, apart, untouched = (make_layers(dims, count, SIZES[size], groups, device) for _ in range(3))
    launch, workspace = launcher(overlapping, groups)
    graph = capture(overlapping, launch)
    launch_apart, _ = launcher(apart, groups)
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
