"""Which device a verifier takes: what is refused and how, and that the CPU's engine knows nothing of GPUs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specla.client import Local
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service import backends
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.devices import device_of, dtype_of, is_out_of_memory
from specla.verifier_service.engine import Engine
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.target import Target, _gpu_numerics_id
from specla.verifier_service.targets.weights import EMBEDDINGS

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


@without_cuda
@pytest.mark.parametrize("make", [lambda config: Engine(config), lambda config: Local(verifier=config)])
def test_without_a_cuda_device_it_is_refused(tiny_target: Path, make: Any) -> None:
    with pytest.raises(InvalidRequestError, match="device is 'cuda', but") as caught:
        make(VerifierConfig(target=tiny_target, device="cuda"))
    assert caught.value.field == "device"
    assert "choose device 'cpu'" in caught.value.hint


@without_cuda
@pytest.mark.parametrize(
    ("missing", "hint"),
    [
        ("PyTorch .* is built without CUDA", "Install a CUDA build of PyTorch"),
        ("no CUDA device is found", "nvidia-smi"),
        ("Triton is not installed", "Install triton"),
        ("an old GPU has compute capability 8.6", "9.0 or later"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, missing: str, hint: str) -> None:
    """Everything up to the part in question pretends to be there."""
    monkeypatch.setattr(torch.version, "cuda", None if "PyTorch" in missing else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "no CUDA" not in missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    if "Triton" in missing:
        monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InvalidRequestError, match=missing) as caught:
        device_of(VerifierConfig(device="cuda"))
    assert hint in caught.value.hint


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_cpu_runs_float32_alone(tiny_target: Path, dtype: Any) -> None:
    with pytest.raises(InvalidRequestError, match="on the CPU") as caught:
        Engine(VerifierConfig(target=tiny_target, dtype=dtype))
    assert caught.value.field == "dtype"
    assert "float32" in caught.value.hint
    with pytest.raises(InvalidRequestError, match="int8"):
        VerifierConfig(dtype="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "dtype", "held", "wanted"),
    [
        ("cpu", "auto", torch.bfloat16, torch.float32),
        ("auto", "float32", torch.bfloat16, torch.float32),
        ("cuda", "auto", torch.bfloat16, torch.bfloat16),
        ("cuda", "auto", torch.float32, torch.float32),
        ("cuda", "float16", torch.bfloat16, torch.float16),
        ("cuda", "float32", torch.float16, torch.float32),
    ],
)
def test_the_numbers_of_a_device(device: Any, dtype: Any, held: torch.dtype, wanted: torch.dtype) -> None:
    assert dtype_of(VerifierConfig(device=device, dtype=dtype), {EMBEDDINGS: torch.zeros(1, dtype=held)}) is wanted


def test_a_gpus_numerics_are_named_by_all_that_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def name(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> str:
        return _gpu_numerics_id(VerifierConfig(device="cuda", **settings), dtype, "0123456789abcdef01")

    ways: list[dict[str, Any]] = [
        {}, {"dtype": torch.float16}, {"numerics": "fast"}, {"prefill_chunk": 128}, {"max_rows": 16}, {"max_rows": 33},
    ]  # fmt: skip
    assert len({name(**way) for way in ways}) == len(ways)
    assert name(max_rows=65) == name(max_rows=129) == name()
    assert name(max_rows=1) == name(max_rows=16)
    assert name(max_sessions=3, max_batch_rows=64) == name()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_an_engine_on_the_cpu_knows_nothing_of_gpus(tiny_target: Path, device: str) -> None:
    program = (
        "import sys, torch\n"
        "torch.cuda.is_available = torch.cuda.mem_get_info = None\n"
        "from specla.verifier_service.config import VerifierConfig\n"
        "from specla.verifier_service.engine import Engine\n"
        "engine = Engine(VerifierConfig(target=sys.argv[1], device=sys.argv[2], threads=1))\n"
        "assert engine.target.numerics_id.startswith('cpu/float32/'), engine.target.numerics_id\n"
        "assert not torch.cuda.is_initialized()\n"
        "parts = [name.split('.') for name in sys.modules]\n"
        "of_gpus = [name for name in parts if name[0] == 'triton' or name[0] == 'specla' and 'gpu' in name]\n"
        "assert not of_gpus, of_gpus\n"
    )
    command = [sys.executable, "-c", program, str(tiny_target), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@without_cuda
@pytest.mark.parametrize(
    "arguments", [["generate", "Hello"], ["serve", "verifier", "--port", "0"], ["serve", "all", "--port", "0"]]
)
def test_the_command_line_says_so(tiny_target: Path, arguments: list[str]) -> None:
    program = "import sys; from specla.client.cli.main import run; sys.argv = ['specla', *sys.argv[1:]]; run()"
    command = [sys.executable, "-c", program, *arguments, "--target", str(tiny_target), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "device is 'cuda', but" in done.stderr
    assert "choose device 'cpu'" in done.stderr


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_a_lack_of_memory_looks_like(error: Exception, wanted: bool) -> None:
    assert is_out_of_memory(error) == wanted


@pytest.mark.parametrize("free", [(100 << 20, 200 << 20), None])
def test_weights_that_do_not_fit_are_said(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, free: tuple[int, int] | None
) -> None:
    def no_room(*args: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    def left() -> tuple[int, int]:
        return free or no_room()

    monkeypatch.setattr("specla.verifier_service.target.device_of", lambda config: "cuda")
    monkeypatch.setattr(GpuWeights, "load", no_room)
    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    with pytest.raises(InvalidRequestError, match=r"MiB do not fit the GPU") as caught:
        Target.load(VerifierConfig(target=tiny_target, device="cuda"))
    assert ("100 of 200 MiB are free" if free else "not even CUDA itself") in str(caught.value)
    assert "16-bit dtype" in caught.value.hint


def test_sessions_that_find_no_room_after_all_are_said(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(VerifierConfig(target=tiny_target, threads=1))
    on_gpu = replace(engine.target, weights=object())
    faults = iter([RuntimeError("Triton Error [CUDA]: out of memory"), RuntimeError("no kernel image")])

    def fail(*args: object) -> None:
        raise next(faults)

    monkeypatch.setattr(backends, "_gpu_backend", fail)
    with pytest.raises(InvalidRequestError, match="no room for 3 sessions") as caught:
        backends.backend_for(engine.config, on_gpu, 3)
    assert caught.value.field == "memory_mib"
    with pytest.raises(RuntimeError, match="no kernel image"):
        backends.backend_for(engine.config, on_gpu, 3)
