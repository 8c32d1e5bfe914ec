"""The start-up proof of exact mode finds a product whose bits depend on the number of rows."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from generations import engine_of
from safetensors.torch import load_file, save_file

from specla.kernels.dense import DenseWeight
from specla.kernels.gpu.selector import Selector
from specla.rpc.errors import InternalError
from specla.verifier_service.cpu_backend import CpuBackend, CpuPassRows
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.self_check import prove_exact, prove_passes
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets import compiled_pass, torch_pass
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import Linear, PassFactors, TargetWeights
from specla.verifier_service.targets.weights import load_checkpoint


@pytest.mark.parametrize("form", [compiled_pass, torch_pass])
@pytest.mark.parametrize("culprit", ["all rows", "one row of seventeen"])
def test_a_product_that_depends_on_its_rows_is_found(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, culprit: str, form: ModuleType
) -> None:
    weights = engine_of(tiny_target, cpu_kernels=form.__name__.rpartition(".")[2].removesuffix("_pass")).target.weights
    store = StateStore(weights.config, 1)
    prove_exact(weights, store, max_rows=33)
    assert not store.recurrent_state.any()
    right: Linear = form.exact_linear

    def wrong(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        y = right(x, weight)
        if len(x) == 17:
            y[(slice(None) if culprit == "all rows" else 16), 0] *= 1 + 2**-20
        return y

    monkeypatch.setattr(form, "exact_linear", wrong)
    with pytest.raises(InternalError, match="the 17 rows") as error:
        prove_exact(weights, store, max_rows=33)
    assert "fast" in error.value.hint


@pytest.mark.parametrize("form", [compiled_pass, torch_pass])
def test_a_commit_of_other_bits_is_found(tiny_target: Path, monkeypatch: pytest.MonkeyPatch, form: ModuleType) -> None:
    weights = engine_of(tiny_target, cpu_kernels=form.__name__.rpartition(".")[2].removesuffix("_pass")).target.weights
    factors = next(value for name, value in vars(form).items() if name.endswith("Factors") and hasattr(value, "apply"))
    right = factors.apply

    def wrong(
        self: PassFactors,
        recurrent_state: torch.Tensor,
        conv_state: torch.Tensor,
        slots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        right(self, recurrent_state, conv_state, slots, paths)
        recurrent_state[slots[0], 0, 0] *= 1 + 2**-20

    monkeypatch.setattr(factors, "apply", wrong)
    with pytest.raises(InternalError, match="are committed"):
        prove_exact(weights, StateStore(weights.config, 1), max_rows=33)


class SpoilsCompany(CpuBackend):
    """Bits of a session's rows depend on the sessions before it."""

    def run(self, lineup: Lineup, *how: Any, **more: Any) -> CpuPassRows:
        out = super().run(lineup, *how, **more)
        assert out._out.logits is not None
        out._out.logits[-1, 0] += 2.0**-20 * (len(lineup.slots) - 1)
        return out


def test_a_pass_whose_bits_depend_on_its_sessions_is_found(tiny_target: Path) -> None:
    weights = engine_of(tiny_target).target.weights
    assert isinstance(weights, TargetWeights)
    prove_passes(SpoilsCompany(weights, StateStore(weights.config, 1)), 320, max_rows=5)  # alone in its passes
    backend = SpoilsCompany(weights, StateStore(weights.config, 2))
    with pytest.raises(InternalError, match="the sessions in its pass"):
        prove_passes(backend, 320, max_rows=5)


def test_passes_of_one_row(tiny_target: Path) -> None:
    """Passes of one row are compared with the same pass behind another session's."""
    weights = engine_of(tiny_target).target.weights
    assert isinstance(weights, TargetWeights)
    store = StateStore(weights.config, 2)
    prove_passes(CpuBackend(weights, store), 320, max_rows=1)
    assert store.free_slots == 2
    assert not store.recurrent_state.any()


@pytest.mark.slow
def test_the_gpus_passes_keep_the_promise(tiny_target: Path) -> None:
    """In Triton's interpreter where there is no GPU."""
    model = GatedDeltaNetConfig.from_folder(tiny_target)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    weights = GpuWeights.load(model, load_checkpoint(tiny_target, model).tensors, torch.float32, place)
    backend = GpuBackend(weights, "exact", Selector.for_device("NVIDIA H200"), slots=2, max_rows=3)
    prove_passes(backend, model.vocab_size, max_rows=3)
    assert backend.free_slots == 2
    assert not backend.store.states.any()


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("width", [2, 3, 5, 7, 8])
def test_exact_mode_runs_convolutions_of_any_width(
    tiny_target_of: Callable[..., Path], tmp_path: Path, width: int, kernels: str
) -> None:
    source = tiny_target_of(hidden=48, heads=3, expand_v=3.0)  # 240 channels: no whole number of vectors
    folder = shutil.copytree(source, tmp_path / "target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"conv_size": width}))
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(width)
    for name, x in tensors.items():
        if "conv1d" in name:
            tensors[name] = torch.randn(*x.shape[:2], width, generator=random)
    save_file(tensors, folder / "model.safetensors")
    engine = engine_of(folder, cpu_kernels=kernels)  # proves itself
    assert engine.config.numerics == "exact"
    assert engine.target.config.conv_size == width
