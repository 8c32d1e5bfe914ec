"""SwiGLU over interleaved products: against float64."""

import pytest
import torch

from specla.kernels.gpu.chunk_swiglu import chunk_swiglu

POISON = 7777.0
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}


def check(rows, width, dtype, device):
    x = (torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows)) * 3).to(dtype).to(device)
    memory = torch.full((rows, width), POISON, dtype=dtype, device=device)
    rows -= 1
    chunk_swiglu(x, memory, torch.tensor([rows], dtype=torch.int32, device=device))
    gate, up = x[:rows].double()[:, ::2], x[:rows].double()[:, 1::2]
    want = gate * gate.sigmoid() * up
    torch.testing.assert_close(memory[:rows].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)
    assert bool((memory[rows:] == POISON).all()), "rows that are not asked for were written"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(2, 16), (4, 176), (6, 1032)])
def test_against_float64(rows, width, dtype, device):
    check(rows, width, dtype, device)


def test_what_does_not_fit_is_refused(device):
    x, out = torch.zeros(2, 32, device=device), torch.zeros(2, 16, device=device)
    rows = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 30\]: give"):
        chunk_swiglu(x[:, :30], out, rows)
    with pytest.raises(ValueError, match=r"out is torch\.float16"):
        chunk_swiglu(x, out.half(), rows)
    with pytest.raises(ValueError, match=r"rows is torch.int64"):
        chunk_swiglu(x, out, rows.long())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_on_the_device(dtype, device):
    check(333, 5632, dtype, device)
