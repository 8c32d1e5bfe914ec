"""Dense products: rows do not depend on each other, values are right, and the choice of a form is honest."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specla.kernels import dense
from specla.kernels.dense import DenseError, DenseWeight, Form, exact_linear, fast_linear

MODEL_SHAPES = [(2064, 512), (512, 512), (3072, 512), (512, 1536), (8192, 512)]
ODD_SHAPES = [(40, 48), (1, 64), (3, 5), (64, 1), (1, 1), (100, 2048), (320, 64), (64, 300), (130, 130)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", MODEL_SHAPES + ODD_SHAPES, ids=str)
def test_every_width_gives_the_same_bits(shape, threads):
    weight = DenseWeight(random(*shape))
    x = random(dense.MAX_ROWS, shape[1], seed=1)
    whole = exact_linear(x, weight)
    small = threads == 1 and shape[0] < 2000
    widths = range(1, dense.MAX_ROWS + 1) if small else (*range(1, 18), 24, 33, 50, 64, 65, 100, 129, 200, 255)
    different = [R for R in widths if not torch.equal(exact_linear(x[-R:], weight), whole[-R:])]
    assert different == []


@pytest.mark.parametrize("shape", [(2064, 512), (512, 1536), (40, 48), (3, 5)], ids=str)
def test_neither_place_nor_neighbours_nor_memory_matter(shape, threads):
    weight = DenseWeight(random(*shape))
    row = random(1, shape[1], seed=1)
    alone = exact_linear(row, weight)[0]
    draw = torch.Generator().manual_seed(2)
    for attempt in range(60):
        R, offset = (int(torch.randint(1, limit, (), generator=draw)) for limit in (dense.MAX_ROWS + 1, 16))
        place = int(torch.randint(0, R, (), generator=draw))
        buffer = torch.empty(R * shape[1] + 16)[offset : offset + R * shape[1]].view(R, shape[1])
        buffer.copy_(random(R, shape[1], seed=attempt) * 10.0 ** (attempt % 9 - 4))
        if attempt % 6 == 0:
            buffer.fill_([torch.nan, torch.inf, 0.0][attempt // 6 % 3])
        buffer[place] = row[0]
        assert torch.equal(exact_linear(buffer, weight)[place], alone)


@pytest.mark.parametrize("rows", [257, 300, 513, 1000])
def test_more_rows_than_one_call_takes_have_the_same_bits(rows, threads):
    weight, x = DenseWeight(random(300, 512)), random(rows, 512, seed=1)
    whole = exact_linear(x, weight)
    for row in (0, 100, 255, 256, rows - 1):
        assert torch.equal(exact_linear(x[row : row + 1], weight)[0], whole[row])


def test_strided_rows_have_the_same_bits():
    weight, wide = DenseWeight(random(300, 96)), random(20, 200, seed=1)
    assert torch.equal(exact_linear(wide[:, 7:103], weight), exact_linear(wide[:, 7:103].contiguous(), weight))
    assert torch.equal(exact_linear(wide[::3, :96], weight), exact_linear(wide[:, :96].contiguous(), weight)[::3])


@settings(max_examples=40)
@given(st.integers(1, 150), st.integers(1, 150), st.integers(0, 20), st.booleans())
def test_values_are_those_of_a_float64_product(out_features, in_features, rows, as_bfloat16):
    plain = random(out_features, in_features)
    plain = plain.bfloat16() if as_bfloat16 else plain
    weight, x = DenseWeight(plain, keep_plain=True), random(rows, in_features, seed=1)
    true = x.double() @ plain.double().t()
    scale = (x.abs().double() @ plain.abs().double().t()).clamp_min(1e-30)
    for product in (exact_linear(x, weight), fast_linear(x, weight)):
        assert product.shape == (rows, out_features)
        assert product.dtype == torch.float32
        assert ((product - true).abs() <= 1e-5 * scale).all()


@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_error_is_within_the_bound_for_the_models_shapes(shape):
    plain, x = random(*shape).bfloat16(), random(16, shape[1], seed=1)
    true = x.double() @ plain.double().t()
    error = exact_linear(x, DenseWeight(plain)).double() - true
    assert error.square().mean().sqrt() <= 1e-6 * true.square().mean().sqrt()


@pytest.mark.parametrize("form", [f for f in dense.FORMS if dense.is_available(f)], ids=str)
def test_every_form_has_right_values(form):
    plain, x = random(70, 90), random(13, 90, seed=1)
    product = exact_linear(x, DenseWeight(plain, form=form))
    assert torch.allclose(product, (x.double() @ plain.double().t()).float(), atol=1e-4, rtol=1e-5)


def test_the_last_resort_is_exact_everywhere():
    for shape in ((64, 300), (3, 5)):
        assert dense.row_dependence(DenseWeight(random(*shape), form=Form("rows"))) is None


def test_fast_differs_for_one_row_only():
    weight, x = DenseWeight(random(512, 512), keep_plain=True), random(5, 512, seed=1)
    assert torch.equal(fast_linear(x, weight), exact_linear(x, weight))
    assert torch.allclose(fast_linear(x[:1], weight), exact_linear(x[:1], weight), atol=1e-4)
    without = DenseWeight(random(512, 512))
    assert torch.equal(fast_linear(x[:1], without), exact_linear(x[:1], without))


class Broken(DenseWeight):
    """A product as BLAS libraries have them: one row goes another way."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        good = super().product(x)
        return good * (1 + 2**-22) if len(x) == self.bad_rows else good

    bad_rows = 1


@pytest.mark.parametrize("bad_rows", [1, 2, 5, 8, 16, 64])
def test_a_product_that_depends_on_the_number_of_rows_is_refused(bad_rows, monkeypatch):
    monkeypatch.setattr(Broken, "bad_rows", bad_rows)
    good, broken = DenseWeight(random(40, 48)), Broken(random(40, 48))
    dense.verify_row_independence([good])
    with pytest.raises(DenseError, match=rf"\[40, 48\] is not exact.*between {bad_rows} and 256 rows"):
        dense.verify_row_independence([good, broken])


def test_a_wrong_product_and_a_leaking_neighbour_are_found():
    class Wrong(DenseWeight):
        def product(self, x: torch.Tensor) -> torch.Tensor:
            return super().product(x) * 1.001

    class Leaking(DenseWeight):
        def product(self, x: torch.Tensor) -> torch.Tensor:
            return super().product(x) + x.sum() * 0

    assert "off by" in str(dense.row_dependence(Wrong(random(40, 48)), random(40, 48)))
    assert "NaN" in str(dense.row_dependence(Leaking(random(40, 48))))


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(2, 7), torch.zeros(2, 8, dtype=torch.float64)], ids=str)
def test_input_of_another_shape_or_type_is_refused(x):
    weight = DenseWeight(random(5, 8))
    for linear in (exact_linear, fast_linear):
        with pytest.raises(DenseError, match="give float32"):
            linear(x, weight)


@pytest.mark.parametrize(
    "plain", [torch.zeros(4), torch.zeros(2, 7, dtype=torch.int8), torch.zeros(2, 2, device="meta")]
)
def test_weights_that_are_no_float_matrix_on_the_cpu_are_refused(plain):
    with pytest.raises(DenseError, match="give a float32 or bfloat16 matrix"):
        DenseWeight(plain)


def test_the_tag_names_build_and_bits():
    weight = DenseWeight(random(40, 48))
    tag = dense.numerics_tag([weight, weight])
    assert tag == dense.numerics_tag([weight])
    assert tag.startswith(f"torch-{torch.__version__}/")
    assert f"/{weight.form}/" in tag
    other = DenseWeight(random(40, 48), form=Form("rows"))
    assert dense.numerics_tag([other]) != tag


OTHER_CPU = """
import torch
from specla.kernels.dense import DenseWeight, verify_row_independence
weights = [DenseWeight(torch.randn(shape)) for shape in [(512, 512), (320, 64), (40, 48), (3, 5)]]
verify_row_independence(weights)
print(torch.backends.cpu.get_cpu_capability(), *(w.form for w in weights))
"""


@pytest.mark.parametrize(("name", "mkl", "onednn"), [("avx2", "AVX2", "AVX2"), ("default", "SSE4_2", "SSE41")])
def test_older_cpus_find_a_form_that_keeps_the_promise(name, mkl, onednn):
    older = {"ATEN_CPU_CAPABILITY": name, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_CPU],
        env=os.environ | older,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    capability, *forms = done.stdout.split()
    assert capability.lower() == name
    assert {form.split("/")[0] for form in forms} <= {"packed", "blocked", "rows"}
