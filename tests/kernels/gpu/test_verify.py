"""The verification kernels against the float64 reference: odd sizes, extreme gates, nothing else touched."""

import random
from collections.abc import Callable

import pytest
import torch
from gpu_layers import Dims, Layer, assert_nothing_else_touched, expected, make_layer, written_factors
from tree_cases import chain, random_tree, rms_ratio

from specla.kernels.gpu.factorised import FactorisedTile, verify_factorised
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.topology import Topology

Run = Callable[[Layer], None]


def serial(layer: Layer) -> None:
    dims, bucket = layer.dims, layer.batch.bucket
    workspace = SerialWorkspace.empty(bucket, dims.value_heads, dims.key_width, dims.value_width, layer.state.device)
    verify_serial(layer.rows, layer.state, layer.pool, layer.batch, layer.o, workspace)
    assert not workspace.arrived.any()


def factorised(tile: FactorisedTile) -> Run:
    def run(layer: Layer) -> None:
        verify_factorised(layer.rows, layer.state, layer.pool, layer.batch, layer.o, tile)

    return run


def check(layer: Layer, run: Run, tolerance: float) -> None:
    """One pass, compared with float64: outputs, factors and states."""
    before = layer.clone()
    o, u, state = expected(layer)
    run(layer)
    rows = len(o)
    assert rms_ratio(layer.o[:rows].cpu(), o) < tolerance
    assert rms_ratio(written_factors(layer).cpu(), u) < tolerance
    assert rms_ratio(layer.state.cpu(), state) < 1e-5
    assert_nothing_else_touched(before, layer)
    for session in layer.sessions:
        if not (session.write_state and session.pending):
            assert torch.equal(layer.state[session.slot], before.state[session.slot])


SMALL = Dims(1, 2, 16, 16)
TREES = [
    Topology.root_only(),
    chain(5),
    Topology.from_wire((-1, -1, 0, 0, 2, 1, 5)),
    random_tree(random.Random(3), 17),
]


@pytest.mark.parametrize("groups", [1, 3])
def test_serial_small(device: torch.device, groups: int) -> None:
    check(make_layer(SMALL, TREES, device, pending=[0, 1, 3, 6], groups=groups), serial, 1e-5)


@pytest.mark.parametrize("tile", [FactorisedTile(32, 16), FactorisedTile(16, 16)], ids=["one block", "blocks of 16"])
def test_factorised_small(device: torch.device, tile: FactorisedTile) -> None:
    check(make_layer(SMALL, TREES, device, pending=[0, 1, 3, 6]), factorised(tile), 1e-3)
