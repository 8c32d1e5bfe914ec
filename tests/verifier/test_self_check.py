"""The start-up proof of exact mode finds a product whose bits depend on the number of rows."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from generations import engine_of
from safetensors.torch import load_file, save_file

from specla.kernels.dense import DenseWeight
from specla.rpc.errors import InternalError
from specla.verifier_service.self_check import prove_exact
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets import compiled_pass, torch_pass
from specla.verifier_service.targets.gated_deltanet import Linear, PassFactors


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
    assert engine.target.weights.config.conv_size == width
