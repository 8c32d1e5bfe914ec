"""How many sessions fit a GPU: counted without one, and against what PyTorch allocates on one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specla.kernels.gpu.selector import Selector
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.engine import Engine
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.memory import CUDA, RESERVE, GpuMemoryAccount, held_bytes
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.memory import MIB
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import load_checkpoint

LAYERS, HEADS, WIDTH = 24, 8, 256
MODEL = GatedDeltaNetConfig(
    vocab_size=32000, hidden_size=2048, num_hidden_layers=LAYERS, num_heads=HEADS, head_dim=WIDTH, expand_v=1.0
)
STATE = LAYERS * HEADS * WIDTH * WIDTH * 4
ROW = LAYERS * HEADS * (2 * WIDTH + 4 * WIDTH + 4 + 2 * 3 * WIDTH)  # k, u, g and x


@pytest.fixture
def account() -> GpuMemoryAccount:
    selector = Selector.for_device("NVIDIA H200")
    return GpuMemoryAccount(MODEL, torch.bfloat16, "fast", selector, 256, weights=2500 * MIB, free=140_000 * MIB)


def test_a_slot_is_its_state_and_rows_of_factors(account: GpuMemoryAccount) -> None:
    assert account.state_per_session == STATE == 48 * MIB
    one, two = (held_bytes(account._backend(slots, 16).store) for slots in (1, 2))
    pools = two - one - STATE
    assert pools % ROW == 0
    assert 16 + 3 <= pools // ROW <= 24


def test_a_session_takes_little_more_than_its_state(account: GpuMemoryAccount) -> None:
    assert account.overhead(64) <= 1.4
    assert account.overhead(64) == account.backend_bytes(64, 16) / (64 * STATE)
    assert account.overhead(256) < account.overhead(64) < account.overhead(16)


@pytest.mark.parametrize("limit_mib", [0, 4000, 40_000])
def test_as_many_sessions_as_fit(account: GpuMemoryAccount, limit_mib: int) -> None:
    limit = limit_mib * MIB or account.weights + 0.9 * account.free
    count = account.slots(65536, 16, limit_mib)

    def needed(sessions: int) -> int:
        return account.weights + RESERVE + account.backend_bytes(sessions, 16)

    assert needed(count) <= limit < needed(count + 1)
    assert account.slots(5, 16, limit_mib) == 5
    assert account.slots(65536, 65, limit_mib) < count


def test_limits_that_hold_no_session(account: GpuMemoryAccount) -> None:
    with pytest.raises(InvalidRequestError, match="2600 MiB hold no session") as caught:
        account.slots(16, 16, 2600)
    least = int(caught.value.hint.split()[1])
    assert account.slots(16, 16, least) == 1
    with pytest.raises(InvalidRequestError, match="no session"):
        account.slots(16, 16, least - 1)
    with pytest.raises(InvalidRequestError, match="the GPU has 142500 MiB"):
        account.slots(16, 16, 142_501)
    with pytest.raises(InvalidRequestError, match="no session"):
        replace(account, free=100 * MIB).slots(16, 16, 0)


def test_what_the_hint_names_makes_a_session_smaller(account: GpuMemoryAccount) -> None:
    account = replace(account, prefill_chunk=2048)
    with pytest.raises(InvalidRequestError, match="lower max_rows or prefill_chunk"):
        account.slots(16, 129, 2600)
    least = account.backend_bytes(1, 129)
    assert replace(account, max_batch_rows=16).backend_bytes(1, 129) == least
    assert account.backend_bytes(1, 16) < least
    assert replace(account, prefill_chunk=128).backend_bytes(1, 129) < least


def test_all_sessions_with_as_many_rows_at_once_take_little_more_than_their_states(account: GpuMemoryAccount) -> None:
    account = replace(account, max_batch_rows=64 * 16, prefill_chunk=2048)
    assert account.overhead(64) <= 1.4


def test_what_has_gone_from_the_device_is_compared_with_the_account(
    account: GpuMemoryAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = account.allocated_bytes(8, 16) + CUDA
    for beyond in (-MIB, 5 * MIB):
        free = account.free - counted - beyond
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * free))
        assert account.taken() == counted + beyond
        assert account.beyond(8, 16) == beyond


def test_every_storage_is_counted_once() -> None:
    x = torch.empty(10, 100, device="meta")
    assert held_bytes({"a": x, "b": [x[2:], x.view(-1)], "c": torch.empty(7)}) == 4000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_what_is_counted_is_what_is_allocated(tiny_target: Path, numerics: str) -> None:
    model = GatedDeltaNetConfig.from_folder(tiny_target)
    weights = GpuWeights.load(model, load_checkpoint(tiny_target, model).tensors, torch.float32, "cuda")
    selector = Selector.for_device(torch.cuda.get_device_name())
    account = GpuMemoryAccount.of(weights, numerics, selector, max_batch_rows=256)  # type: ignore[arg-type]
    before = torch.cuda.memory_allocated()
    backend = GpuBackend(weights, account.mode, selector, slots=8, max_rows=16, max_batch_rows=256)
    taken = torch.cuda.memory_allocated() - before
    counted = account.allocated_bytes(8, 16)
    assert account.backend_bytes(8, 16) == counted + CUDA
    assert counted <= taken <= counted + 64 * 512  # an allocation is rounded up to 512 bytes
    assert backend.free_slots == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_limit_makes_the_slots(tiny_target: Path) -> None:
    def engine(memory_mib: int) -> Engine:
        return Engine(VerifierConfig(target=tiny_target, device="cuda", max_sessions=64, memory_mib=memory_mib))

    with pytest.raises(InvalidRequestError, match="hold no session") as caught:
        engine(1)
    least = int(caught.value.hint.split()[1])
    made = engine(least)
    assert 1 <= made.max_sessions <= 64
    assert made.free_slots == made.max_sessions
    assert engine(0).max_sessions == 64
