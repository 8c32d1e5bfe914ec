"""The convolution over trees: right, exact, and without a trace of rejected rows."""

import random
from collections.abc import Iterator

import pytest
import torch
from tree_cases import random_tree, rms_ratio

from specla.kernels import reference
from specla.kernels.convolution import advance_window, tree_convolution
from specla.kernels.topology import Topology
from specla.kernels.tree import pack


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [2, 4, 5, 8])
@pytest.mark.parametrize("channels", [40, 96])
def test_agrees_with_the_reference(width: int, channels: int) -> None:
    rng, generator = random.Random(width), torch.Generator().manual_seed(channels)
    for sizes in ([1], [9], [1, 1, 1], [5, 1, 12]):
        batch = pack([random_tree(rng, n) for n in sizes])
        x = torch.randn(batch.rows, channels, generator=generator)
        window = torch.randn(len(sizes), width - 1, channels, generator=generator)
        weight = torch.randn(width, channels, generator=generator)
        y = tree_convolution(x, window, weight, batch).y
        for b, topology in enumerate(batch.topologies):
            rows = slice(batch.offsets[b], batch.offsets[b + 1])
            expected = reference.convolution(x[rows], window[b], weight, topology.parent_rows)
            assert rms_ratio(y[rows], expected) < 1e-6


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("channels", [48, 1536])
def test_a_rows_bits_do_not_depend_on_the_pass(width: int, channels: int, threads: int) -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    root = pack([Topology.root_only()])
    weight = torch.randn(width, channels, generator=generator)
    for sizes in ([2], [5], [9], [33], [1] * 8, [3, 17, 1, 6]):
        batch = pack([random_tree(rng, n) for n in sizes])
        x = torch.randn(batch.rows, channels, generator=generator)
        windows = torch.randn(len(sizes), width - 1, channels, generator=generator)
        together = tree_convolution(x, windows, weight, batch)
        before = {-1 - b: windows[b : b + 1] for b in range(len(sizes))}
        for row, parent in enumerate(batch.parents):
            session = int(batch.row_session[row])
            alone = tree_convolution(x[row : row + 1], before[parent if parent >= 0 else -1 - session], weight, root)
            assert torch.equal(alone.y[0], together.y[row])
            window = torch.empty(1, width - 1, channels)
            advance_window(window, [0], alone.inputs, root, [0])
            before[row] = window


def test_the_window_advances_along_accepted_rows_alone() -> None:
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    batch = pack([random_tree(rng, n) for n in (7, 1, 12, 4)])
    x = torch.randn(batch.rows, 32, generator=generator)
    store = torch.randn(6, 3, 32, generator=generator)
    slots = [4, 0, 1, 3]
    before = store.clone()
    inputs = tree_convolution(x, store[slots], torch.randn(4, 32, generator=generator), batch).inputs
    assert torch.equal(store, before), "a pass reads the stored windows"
    paths = [batch.path(0, 6), batch.path(1, 0), batch.path(2, 5), []]
    advance_window(store, slots, inputs, batch, [path[-1] if path else None for path in paths])
    for slot, path in zip(slots, paths, strict=True):
        assert torch.equal(store[slot], reference.advance_window(before[slot], x, path))
    for slot in (2, 3, 5):
        assert torch.equal(store[slot], before[slot])


def test_shapes_that_do_not_fit_are_refused() -> None:
    batch = pack([Topology.root_only()])
    with pytest.raises(ValueError, match="do not fit 1 rows of 1 sessions"):
        tree_convolution(torch.zeros(2, 8), torch.zeros(1, 3, 8), torch.zeros(4, 8), batch)
    with pytest.raises(ValueError, match="do not fit"):
        tree_convolution(torch.zeros(1, 8), torch.zeros(1, 4, 8), torch.zeros(4, 8), batch)
