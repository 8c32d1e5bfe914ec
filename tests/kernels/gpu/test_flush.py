"""The flush: one launch for layers and sessions, against float64, and its two forms against each other, bit for bit."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from gpu_layers import POISON, Dims, log_decays
from torch import Tensor
from torch.nn.functional import normalize
from tree_cases import rms_ratio

from specla.benchmarks.kernels.reference64 import commit64
from specla.kernels.gpu.commit import flush, flush_tiles
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.flush_streamed import flush_streamed, streams


class Case(NamedTuple):
    """Arguments of `flush`."""

    state: Tensor
    pool: FactorPool
    slot: Tensor
    pending: Tensor
    pending_len: Tensor

    def flushed(self, form: object) -> Tensor:
        """The states after one of the forms; all else must be as it was."""
        state, pool = self.state.clone(), FactorPool(*(x.clone() for x in self.pool))
        form(state, pool, *self[2:])  # type: ignore[operator]
        for now, was in zip(pool, self.pool, strict=True):
            assert torch.equal(now, was)
        return state


def make_case(
    dims: Dims, lengths: Sequence[int], device: torch.device, *, layers: int = 0, width: int = 0, gates: str = "mixed"
) -> Case:
    """A session of each length in shuffled slots, every fourth place without one; pool rows not named are poisoned."""
    H, HV, K, V, dtype = dims.heads, dims.value_heads, dims.key_width, dims.value_width, dims.dtype
    places, width = len(lengths), width or max(lengths)
    slots, F = places + 2, width + 5
    generator = torch.Generator().manual_seed(places + width)
    shape = (layers,) * bool(layers) + (slots,)
    pool = FactorPool(
        normalize(torch.randn(*shape, F, H, K, generator=generator), dim=-1).to(dtype),
        torch.full((*shape, F, HV, V), POISON),
        log_decays(gates, generator, *shape, F, HV),
        torch.zeros(*shape, F, 1, dtype=dtype),
    )
    slot = torch.randperm(slots, generator=generator)[:places].to(torch.int32)
    pending = torch.full((places, width), F - 1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        rows = torch.randperm(F, generator=generator)[:length]
        pending[b, :length] = rows
        pool.u[..., slot[b], rows, :, :] = torch.randn(*shape[:-1], length, HV, V, generator=generator)
    slot[3::4] = -1
    state = torch.randn(*shape, HV, K, V, generator=generator)
    return Case(
        state.to(device),
        FactorPool(*(x.to(device) for x in pool)),
        slot.to(device),
        pending.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def check_against_float64(case: Case) -> None:
    after = case.flushed(flush)
    left = set(range(case.state.shape[-4])) - {int(s) for s in case.slot}
    for slot in left:
        assert torch.equal(after[..., slot, :, :, :], case.state[..., slot, :, :, :])
    for b, slot in enumerate(case.slot.tolist()):
        if slot < 0:
            continue
        rows = case.pending[b, : int(case.pending_len[b])].long()
        for i in range(case.state.shape[0] if case.state.dim() == 5 else 1):
            state, got, k, u, g, _ = (x[i] if case.state.dim() == 5 else x for x in (case.state, after, *case.pool))
            wanted = commit64(state[slot][None].double(), k[slot, rows][None], u[slot, rows][None], g[slot, rows][None])
            assert rms_ratio(got[slot], wanted[0]) < 2e-6, f"layer {i}, {len(rows)} factors"
            assert torch.equal(got[slot], state[slot]) == (len(rows) == 0)


@pytest.mark.parametrize("layers", [0, 2])
def test_small(device: torch.device, layers: int) -> None:
    check_against_float64(make_case(Dims(1, 2, 16, 32), [2, 0, 1, 3, 4], device, layers=layers))


def test_nothing_pending_at_all(device: torch.device) -> None:
    case = make_case(Dims(1, 1, 16, 16), [1, 1], device)
    none = case._replace(pending=case.pending[:, :0].contiguous(), pending_len=torch.zeros_like(case.pending_len))
    assert torch.equal(none.flushed(flush), case.state)


def test_shapes_that_are_streamed() -> None:
    widths = (32, 64, 96, 128, 192, 256, 320, 512)
    assert [v for v in widths if streams(64, v)] == [64, 128, 192, 256, 320, 512]
    assert [v for v in widths if streams(128, v)] == [64, 128, 192, 256, 320, 512]
    assert [v for v in widths if streams(192, v)] == [128, 256, 512]  # runs of 128 rows for 64 columns
    assert [v for v in widths if streams(256, v)] == [64, 128, 192, 256, 320, 512]
    assert not any(streams(96, v) for v in widths)


# ------------------------------------------------------------------------------------------ on a GPU alone

STREAMED = [
    Dims(2, 4, 64, 64, torch.float16),
    Dims(1, 1, 128, 64, torch.bfloat16),
    Dims(1, 2, 64, 192, torch.float32),
    Dims(4, 12, 128, 128, torch.bfloat16),
    Dims(2, 2, 128, 320, torch.float16),
    Dims(1, 1, 192, 128, torch.float32),
    Dims(8, 8, 256, 256, torch.bfloat16),
    Dims(2, 2, 256, 256, torch.float32),
    Dims(1, 2, 256, 512, torch.float16),
]
TILED = [Dims(1, 2, 96, 192, torch.bfloat16), Dims(1, 2, 48, 80, torch.float32), Dims(2, 2, 192, 64, torch.float16)]
LENGTHS = [*range(21), 8, 4]


def named(dims: Dims) -> str:
    return f"{dims.heads}-{dims.value_heads}x{dims.key_width}x{dims.value_width}-{str(dims.dtype)[6:]}"


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [*STREAMED, *TILED], ids=named)
def test_against_float64_on_a_gpu(device: torch.device, dims: Dims) -> None:
    check_against_float64(make_case(dims, LENGTHS, device))
    check_against_float64(make_case(dims, [5, 8, 1], device, layers=3))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", STREAMED, ids=named)
def test_both_forms_have_the_same_bits_on_a_gpu(device: torch.device, dims: Dims) -> None:
    cases = [
        make_case(dims, LENGTHS, device),
        make_case(dims, LENGTHS, device, layers=3, gates="extreme"),
        make_case(dims, [4], device, layers=2, width=16),
        make_case(dims, [3, 0, 1], device, gates="mild"),
        make_case(dims, [1], device),
    ]
    for case in cases:
        tiled, streamed = (case.flushed(form).view(torch.int32) for form in (flush_tiles, flush_streamed))
        assert torch.equal(tiled, streamed)
        assert torch.equal(case.flushed(flush).view(torch.int32), streamed)
        assert not torch.equal(case.state.view(torch.int32), streamed)
