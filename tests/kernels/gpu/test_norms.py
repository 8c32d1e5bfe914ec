"""Norms, gates and SwiGLU between the products of a pass: against float64, a row by itself, rows that do not count."""

import pytest
import torch

from specla.kernels.gpu.norms import add_rms_norm, gated_norm

POISON = 7777.0
EPS = 1e-5
# Of a rounding to the dtype (the interpreter cuts off bits where a GPU rounds).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


class Numbers:
    """Random tensors of one seed on one device."""

    def __init__(self, device, seed=0):
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def poison(self, *shape, dtype=torch.float32):
        return torch.full(shape, POISON, dtype=dtype, device=self.device)

    def rows(self, count):
        """As a pass has it: the end of the last session's rows."""
        return torch.tensor([0, 1, count], dtype=torch.int32, device=self.device)[-1:]


def close(got, want, dtype):
    torch.testing.assert_close(
        got.double().cpu(), want.cpu(), rtol=TOLERANCE[dtype], atol=max(TOLERANCE[dtype] * 1e-2, 1e-6)
    )


def untouched(tensor):
    assert bool((tensor == POISON).all()), "rows that do not count were written"


def rms_normed(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def gate_of(gate, activation):
    gate = gate.double()
    return gate.sigmoid() * (gate if activation == "silu" else 1)


def check_add_rms_norm(device, rows, used, width, dtype, parts, seed=0):
    """`parts`: None for no y, 0 for a y of the model's dtype, otherwise [parts, R, D]."""
    numbers = Numbers(device, seed)
    x, weight = numbers(rows, width), numbers(width)
    y = None if parts is None else numbers(rows, width, dtype=dtype) if parts == 0 else numbers(parts, rows, width)
    x[used:] = POISON
    if y is not None:
        y[..., used:, :] = float("nan")
    before, out = x.clone(), numbers.poison(rows, width, dtype=dtype)
    add_rms_norm(x, y, weight, EPS, out, numbers.rows(used))
    added = 0 if y is None else y.double() if parts == 0 else y.double().sum(0)
    close(x[:used], (before.double() + added)[:used], torch.float32)
    close(out[:used], rms_normed(x[:used], weight), dtype)
    untouched(out[used:])
    untouched(x[used:])
    if parts:
        total = y[0].clone()
        for part in y[1:]:
            total += part
        assert torch.equal(x[:used], (before + total)[:used]), "parts are not summed in order"


def check_gated_norm(device, rows, used, heads, width, dtype, activation, gated=True):
    numbers = Numbers(device, heads)
    o, weight = numbers(rows, heads, width), numbers(width)
    wide = numbers(rows, heads * width + 48, dtype=dtype) * 3  # 16 bytes whatever the dtype
    gate = wide[:, 32 : 32 + heads * width] if gated else None
    o[used:], wide[used:] = float("nan"), float("nan")
    out = numbers.poison(rows, heads * width, dtype=dtype)
    gated_norm(o, gate, weight, EPS, activation, out, numbers.rows(used))
    want = rms_normed(o[:used], weight).flatten(1)
    close(out[:used], want * gate_of(gate[:used], activation) if gated else want, dtype)
    untouched(out[used:])


@pytest.mark.parametrize(
    ("rows", "used", "width", "dtype", "parts"),
    [
        (3, 3, 64, torch.float32, None),
        (2, 1, 72, torch.bfloat16, 0),
        (4, 2, 24, torch.float16, 1),
        (2, 2, 64, torch.bfloat16, 3),
        (2, 0, 64, torch.float32, 4),
    ],
)
def test_the_stream_takes_what_is_added_and_is_normed(device, rows, used, width, dtype, parts):
    check_add_rms_norm(device, rows, used, width, dtype, parts)


@pytest.mark.parametrize(
    ("rows", "used", "heads", "width", "dtype", "activation"),
    [
        (2, 2, 2, 16, torch.float32, "silu"),
        (3, 1, 3, 48, torch.bfloat16, "sigmoid"),
        (1, 1, 5, 1024, torch.float16, "silu"),
        (2, 0, 2, 16, torch.float32, "sigmoid"),
    ],
)
def test_outputs_are_normed_by_heads_and_gated(device, rows, used, heads, width, dtype, activation):
    check_gated_norm(device, rows, used, heads, width, dtype, activation)


def test_a_model_without_an_output_gate(device):
    check_gated_norm(device, 2, 2, 3, 32, torch.float32, "silu", gated=False)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_extreme_gates_give_numbers(device, activation):
    gate = torch.tensor([[-1e4, 1e4, 0.0, -90.0] * 4], device=device)
    out = torch.full((1, 16), POISON, device=device)
    ones = torch.ones(1, 1, 16, device=device)
    gated_norm(ones, gate, ones[0, 0], 0.0, activation, out, Numbers(device).rows(1))
    want = torch.tensor([0.0, 1e4, 0.0, 0.0] if activation == "silu" else [0.0, 1.0, 0.5, 0.0], device=device)
    torch.testing.assert_close(out[0, :4], want)


def test_what_does_not_fit_is_refused(device):
    numbers = Numbers(device)
    x, weight, out, rows = numbers(2, 32), numbers(32), numbers(2, 32, dtype=torch.bfloat16), numbers.rows(2)
    refused = pytest.raises(ValueError, match="give")
    with refused:
        add_rms_norm(x.bfloat16(), None, weight, EPS, out, rows)
    with refused:
        add_rms_norm(x, numbers(3, 32), weight, EPS, out, rows)
    with refused:
        add_rms_norm(x, numbers(2, 3, 32), weight, EPS, out, rows)
    with refused:
        add_rms_norm(x, None, weight[:16], EPS, out, rows)
    with refused:
        add_rms_norm(x, None, weight, EPS, numbers(2, 64)[:, :32], rows)
    with refused:
        add_rms_norm(x, None, weight, EPS, out, rows.long())
    o = numbers(2, 2, 16)
    with refused:
        gated_norm(o, numbers(2, 33)[:, 1:], numbers(16), EPS, "silu", numbers(2, 32), rows)
    with refused:
        gated_norm(o, None, numbers(16), EPS, "relu", numbers(2, 32), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "used"), [(1, 1), (16, 5), (129, 129), (256, 200)])
@pytest.mark.parametrize("width", [64, 1000, 2048, 4096])
def test_streams_of_real_widths(device, rows, used, width, dtype):
    for parts in (None, 0, 1, 4):
        check_add_rms_norm(device, rows, used, width, dtype, parts, seed=width + rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(8, 256), (48, 128), (4, 64), (6, 48), (1, 4096)])
def test_heads_of_real_widths(device, heads, width, dtype):
    for rows, used in ((1, 1), (16, 5), (129, 129)):
        for activation in ("silu", "sigmoid"):
            check_gated_norm(device, rows, used, heads, width, dtype, activation)
        check_gated_norm(device, rows, used, heads, width, dtype, "silu", gated=False)


@pytest.mark.gpu
def test_a_row_has_its_bits_at_any_place_and_beside_any_rows(device):
    numbers, width, heads = Numbers(device), 2048, 8
    stream, added, weight = numbers(width), numbers(4, width), numbers(width)
    o, gate = numbers(heads, width // heads), numbers(width, dtype=torch.bfloat16)
    want = None
    for rows in (1, 2, 7, 16, 33, 64, 129):
        for place in {0, rows // 2, rows - 1}:
            x, y = numbers(rows, width), numbers(4, rows, width)
            os, gates = numbers(rows, heads, width // heads), numbers(rows, width, dtype=torch.bfloat16)
            x[place], y[:, place], os[place], gates[place] = stream, added, o, gate
            outs = [numbers.poison(rows, width, dtype=torch.bfloat16) for _ in range(2)]
            count = numbers.rows(rows)
            add_rms_norm(x, y, weight, EPS, outs[0], count)
            gated_norm(os, gates, weight[: width // heads], EPS, "silu", outs[1], count)
            got = torch.cat([x[place], *(out[place].float() for out in outs)])
            want = got if want is None else want
            assert torch.equal(got, want), f"{rows} rows, place {place}"


@pytest.mark.gpu
@pytest.mark.parametrize("admit", ["start", "waited"])
def test_overlapping_launches_have_the_bits_of_waiting_ones(device, admit):
    numbers, rows, width = Numbers(device), 16, 2048
    x, y, weight, gate = numbers(rows, width), numbers(rows, width), numbers(width), numbers(rows, width)
    count, results = numbers.rows(rows), []
    for overlap in (False, True):
        stream, normed, mixed = x.clone(), numbers.poison(rows, width), numbers.poison(rows, width)
        for _ in range(50):
            add_rms_norm(stream, y, weight, EPS, normed, count, overlap=overlap, admit=admit)
            gated_norm(normed.view(rows, 8, 256), gate, weight[:256], EPS, "silu", mixed, count, overlap=overlap)
            add_rms_norm(stream, mixed, weight, EPS, normed, count, overlap=overlap)
        results.append((stream, normed, mixed))
    for waiting, overlapping in zip(*results, strict=True):
        assert torch.equal(waiting, overlapping)
