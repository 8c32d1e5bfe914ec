"""x W^T for few rows: against float64, the bits of a row beside any number of others, parts of K, fused ends."""

from itertools import product as product_of

import pytest
import torch

from specla.kernels.gpu.norms import add_rms_norm
from specla.kernels.gpu.product import product, product_parts
from specla.kernels.gpu.product_streamed import ProductTile, on_hopper, streamed_tile, streams
from specla.kernels.gpu.product_wide import WideTile, wide_tile

POISON = 7777.0
ROW_COUNTS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128, 129, 255, 256, 257, 384, 511, 512)
SHARED = 227 * 1024  # bytes a program may have on an H200
MODEL_SHAPES = [(8224, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (32000, 2048)]
# Largest error over the largest output: of sums in float32, and of a rounding to the output's dtype.
SUMS = 5e-5
ROUNDED = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Numbers:
    """Random tensors of one seed on one device."""

    def __init__(self, device, seed=0):
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype)

    def poison(self, *shape, dtype=torch.float32):
        return torch.full(shape, POISON, dtype=dtype, device=self.device)

    def rows(self, count):
        return torch.tensor([0, 1, count], dtype=torch.int32, device=self.device)[-1:]


def check(device, shape, rows, used, dtype, *, parts=None, out_dtype=torch.float32, swiglu=False, add=False, tile=None):
    """One product against float64; rows that do not count are neither read nor written. Returns the output."""
    outputs, inputs = shape
    numbers = Numbers(device, outputs + inputs)
    x, weight = numbers(rows, inputs, dtype=dtype), (numbers(outputs, inputs) * inputs**-0.5).to(dtype)
    x[used:] = float("nan")
    width = outputs // 2 if swiglu else outputs
    out = numbers.poison(*(() if parts is None else (parts,)), rows, width, dtype=out_dtype)
    if add:
        out[:used] = numbers(used, width)
    before = out.clone()
    product(x, weight, out, numbers.rows(used), swiglu=swiglu, add=add, tile=tile)
    want = x[:used].double() @ weight.double().T
    if swiglu:
        gate, up = want[:, 0::2], want[:, 1::2]
        want = gate * gate.sigmoid() * up
    if add:
        want += before[:used].double()
    if parts is not None:
        assert parts == 1 or not torch.equal(out[0, :used], out[1, :used])
        got = out[:, :used].double().sum(0)
    else:
        got = out[:used].double()
    if used:
        assert torch.isfinite(got).all()
        error = (got - want).abs().max() / want.abs().max()
        assert error < SUMS + ROUNDED[out_dtype], f"{shape}, {rows} rows: error {float(error)}"
    assert torch.equal(out[..., used:, :], before[..., used:, :]), "rows that do not count were written"
    return out[..., :used, :]


@pytest.mark.parametrize(
    ("shape", "rows", "used", "dtype"),
    [
        ((32, 64), 1, 1, torch.float32),
        ((40, 72), 3, 2, torch.bfloat16),
        ((17, 200), 17, 17, torch.float32),
        ((64, 8), 2, 0, torch.float16),
    ],
)
def test_products_are_those_of_float64(device, shape, rows, used, dtype):
    check(device, shape, rows, used, dtype)
    check(device, shape, rows, used, dtype, out_dtype=dtype)


def test_gates_and_what_they_gate_in_turns(device):
    check(device, (72, 64), 3, 2, torch.float32, swiglu=True)
    check(device, (72, 64), 1, 1, torch.bfloat16, swiglu=True, out_dtype=torch.bfloat16)


def test_extreme_gates_give_numbers(device):
    weight = torch.zeros(16, 64, device=device)
    weight[0::2, 0] = torch.tensor([-1e4, 1e4, 0.0, -90.0] * 2, device=device)
    weight[1::2, 0] = 1.0
    x, out = torch.zeros(1, 64, device=device), torch.full((1, 8), POISON, device=device)
    x[0, 0] = 1.0
    product(x, weight, out, Numbers(device).rows(1), swiglu=True)
    torch.testing.assert_close(out[0, :4], torch.tensor([0.0, 1e4, 0.0, 0.0], device=device))


def test_a_product_is_added_to_what_is_there(device):
    check(device, (40, 64), 3, 2, torch.float32, add=True)


def test_parts_of_k_are_summed_by_the_norm_behind(device):
    numbers, rows = Numbers(device), 2
    x, weight, stream = numbers(rows, 128), numbers(32, 128), numbers(rows, 32)
    parts, normed, count = numbers.poison(2, rows, 32), numbers.poison(rows, 32), numbers.rows(rows)
    want = stream.double() + x.double() @ weight.double().T
    product(x, weight, parts, count)
    torch.testing.assert_close(parts[0].double(), x[:, :64].double() @ weight[:, :64].double().T, rtol=1e-5, atol=1e-5)
    add_rms_norm(stream, parts, torch.ones(32, device=device), 1e-5, normed, count)
    torch.testing.assert_close(stream.double(), want, rtol=1e-5, atol=1e-5)


def test_a_row_has_its_bits_beside_any_others(device):
    numbers = Numbers(device)
    row, weight = numbers(64), numbers(32, 64)
    got = []
    for rows, place in ((1, 0), (5, 4), (16, 3), (18, 17)):
        x, out = numbers(rows, 64), numbers.poison(rows, 32)
        x[place] = row
        product(x, weight, out, numbers.rows(rows))
        got.append(out[place])
    assert all(torch.equal(got[0], other) for other in got[1:])


def test_parts_hang_on_the_shape_alone():
    assert [product_parts(*shape) for shape in MODEL_SHAPES] == [1, 4, 1, 4, 1]
    assert product_parts(64, 64) == 1
    assert product_parts(2048, 5632 + 8) == 1


def test_which_form_and_tile_a_shape_takes():
    for outputs, inputs in MODEL_SHAPES:
        parts = product_parts(outputs, inputs)
        assert streams(outputs, inputs, parts, torch.bfloat16)
        assert not streams(outputs, inputs, parts, torch.float32)
        for rows in ROW_COUNTS:
            tile = streamed_tile(outputs, inputs, parts, rows)
            assert inputs % (parts * tile.block_k) == 0
            assert tile.outputs <= outputs
            assert tile.rows == min(256, max(8, 1 << (rows - 1).bit_length()))
            assert tile.stages >= 2
            assert tile.stages * (tile.outputs + tile.rows) * tile.block_k * 2 <= SHARED
            assert tile.outputs * tile.rows <= 128 * 32 * tile.warps  # sums: half the registers
    assert not streams(2048, 2048 + 32, 1, torch.bfloat16)
    assert not streams(48, 2048, 1, torch.bfloat16)
    assert not streams(2056, 2048, 1, torch.bfloat16)


def test_many_rows_take_wide_tiles_where_these_share_out_more_evenly():
    def of(shape, rows):
        parts = product_parts(*shape)
        return wide_tile(shape[0], parts, rows, streamed_tile(*shape, parts, rows))

    gate_up = (11264, 2048)
    assert [of(gate_up, rows) for rows in (1, 64, 128, 129, 256, 512)] == [None] * 3 + [WideTile(192, 5)] * 3
    assert all(of(shape, 256) is None for shape in MODEL_SHAPES if shape != gate_up)
    assert of((96, 2048), 512) is None


def test_other_devices_take_the_general_form():
    assert not on_hopper(torch.device("cpu"))


def test_what_does_not_fit_is_refused(device):
    numbers, refused = Numbers(device), pytest.raises(ValueError, match="give")
    x, weight, out, rows = numbers(2, 64), numbers(32, 64), numbers(2, 32), numbers.rows(2)
    with refused:
        product(x, weight[:, :32].contiguous(), out, rows)
    with refused:
        product(x, weight.bfloat16(), out, rows)
    with refused:
        product(x, weight, numbers(3, 32), rows)
    with refused:
        product(x, weight, numbers(32, 2).T, rows)
    with refused:
        product(x, weight, numbers(3, 2, 32), rows)  # 64 is not three parts
    with refused:
        product(x, weight, numbers(2, 2, 32), rows, add=True)
    with refused:
        product(x, weight, numbers(2, 16), rows, swiglu=True, add=True)
    with refused:
        product(x.bfloat16(), weight.bfloat16(), out.bfloat16(), rows, add=True)
    with refused:
        product(x, weight, out, torch.tensor([2.0], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize(
    ("rows", "used"), [(1, 1), (8, 3), (16, 16), (32, 17), (64, 64), (129, 129), (256, 65), (512, 511)]
)
def test_products_of_a_model(device, shape, rows, used):
    check(device, shape, rows, used, torch.bfloat16)
    check(device, shape, rows, used, torch.bfloat16, parts=product_parts(*shape))
    if rows in (16, 129):  # every form is compiled anew
        check(device, shape, rows, used, torch.bfloat16, out_dtype=torch.bfloat16)
        check(device, shape, rows, used, torch.float16, swiglu=True, out_dtype=torch.float16)
        check(device, shape, rows, used, torch.bfloat16, add=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 16), (100, 72), (1026, 320), (66, 64), (1090, 64), (3000, 1000), (1024, 6144), (4098, 2112)]
)
def test_odd_shapes(device, shape, dtype):
    for rows, used in ((1, 1), (5, 4), (16, 16), (33, 33), (70, 65)):
        check(device, shape, rows, used, dtype)
    if dtype is torch.bfloat16:
        check(device, shape, 16, 9, dtype, add=True)
        if shape[0] % 2 == 0:
            check(device, shape, 16, 9, dtype, swiglu=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [
        ProductTile(64, 256, 3, 8, 4),
        ProductTile(64, 128, 4, 16, 4),
        ProductTile(64, 128, 4, 16, 4, early=0),
        ProductTile(64, 64, 6, 32, 4, early=2),
        ProductTile(64, 64, 16, 32, 4),
        ProductTile(64, 64, 2, 32, 4),
        ProductTile(128, 128, 3, 16, 8),
        ProductTile(128, 64, 2, 64, 4),
        ProductTile(128, 64, 6, 128, 8),
        ProductTile(64, 64, 4, 256, 4),
        ProductTile(128, 64, 4, 256, 8),
        WideTile(192, 5),
        WideTile(192, 2),
        WideTile(128, 6),
    ],
)
@pytest.mark.parametrize("shape", [(8224, 2048), (2048, 5120)])
def test_tiles_change_no_bits(device, shape, tile):
    for rows, used in ((5, 5), (64, 40), (300, 257)):
        for parts in (None, 4):
            plain = check(device, shape, rows, used, torch.bfloat16, parts=parts)
            other = check(device, shape, rows, used, torch.bfloat16, parts=parts, tile=tile)
            assert torch.equal(plain, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[(shape, torch.bfloat16) for shape in [*MODEL_SHAPES, (100, 72)]],
        ((2048, 5632), torch.float16),
        ((2048, 2048), torch.float32),
    ],
)
def test_a_row_has_its_bits_in_every_bucket_and_at_every_place(device, shape, dtype):
    """1 to 512 rows; the row stands first, last and between, its neighbours are numbers, infinities and NaN."""
    outputs, inputs = shape
    numbers = Numbers(device)
    row, weight = numbers(inputs, dtype=dtype), numbers(outputs, inputs, dtype=dtype)
    parts, wanted = product_parts(outputs, inputs), {}
    for rows in ROW_COUNTS:
        neighbours = numbers(rows, inputs, dtype=dtype)
        if rows % 3 == 0:
            neighbours[::2], neighbours[1::2] = float("inf"), float("nan")
        for place in {0, rows // 2, rows - 1}:
            x = neighbours.clone()
            x[place] = row
            for key, out in {
                "whole": numbers.poison(rows, outputs),
                "parts": numbers.poison(parts, rows, outputs),
                "rounded": numbers.poison(rows, outputs, dtype=dtype),
                "gated": numbers.poison(rows, outputs // 2),
            }.items():
                product(x, weight, out, numbers.rows(rows), swiglu=key == "gated")
                got = out[..., place, :]
                assert torch.equal(wanted.setdefault(key, got), got), f"{key}: {rows} rows, place {place}"


@pytest.mark.gpu
def test_overlapping_launches_have_the_bits_of_waiting_ones(device):
    """A chain like a model's: norm, product with gates, product in parts, norm; weights of every layer their own."""
    numbers, rows, width, mid, layers = Numbers(device), 16, 2048, 5632, 6
    up = [numbers(2 * mid, width, dtype=torch.bfloat16) * 0.02 for _ in range(layers)]
    down = [numbers(width, mid, dtype=torch.bfloat16) * 0.02 for _ in range(layers)]
    x, weight, count = numbers(rows, width), torch.ones(width, device=device), numbers.rows(rows)
    results = []
    ways = [(False, "waited", "waited"), *((True, *way) for way in product_of(("waited", "start"), repeat=2))]
    for overlap, admit, products_admit in ways:
        stream = x.clone()
        normed, gated = (
            numbers.poison(rows, width, dtype=torch.bfloat16),
            numbers.poison(rows, mid, dtype=torch.bfloat16),
        )
        parts = numbers.poison(4, rows, width)
        for i in range(layers):
            y = parts if i else None
            add_rms_norm(stream, y, weight, 1e-5, normed, count, overlap=overlap, admit=admit)
            product(normed, up[i], gated, count, swiglu=True, overlap=overlap, admit=products_admit)
            product(gated, down[i], parts, count, overlap=overlap, admit=products_admit)
        add_rms_norm(stream, parts, weight, 1e-5, normed, count, overlap=overlap)
        results.append((stream, normed))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])
