"""The model that passes are timed with: the shape of the public 1.47B Gated DeltaNet, with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import expected_shapes

SHAPE = GatedDeltaNetConfig(
    vocab_size=32_000,
    hidden_size=2048,
    num_hidden_layers=24,
    num_heads=8,
    head_dim=256,
    expand_v=1.0,
    intermediate_size=5632,
)
DTYPE = torch.bfloat16

_MATRICES = ("proj.weight", "embeddings.weight", "lm_head.weight")


class RandomTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors, drawn when they are asked for: the same ones each time.

    Products keep the size of what goes in; gates and decays are spread as a trained model's are.
    """

    def __init__(
        self, config: GatedDeltaNetConfig, device: torch.device | str, rounded: torch.dtype = torch.float32
    ) -> None:
        """For a model's shape; matrices are rounded to a dtype."""
        self._shapes, self._device, self._rounded = expected_shapes(config), device, rounded

    def __getitem__(self, name: str) -> Tensor:
        """float32, on the device."""
        shape, seed = self._shapes[name], list(self._shapes).index(name)
        if "norm" in name:
            return torch.ones(shape, device=self._device)
        drawn = torch.Generator(self._device).manual_seed(seed)
        if name.endswith(("A_log", "dt_bias")):
            return 2 * torch.rand(shape, device=self._device, generator=drawn) - 1
        found: Tensor = torch.randn(shape, device=self._device, generator=drawn) * shape[-1] ** -0.5
        return found.to(self._rounded).float() if name.endswith(_MATRICES) else found

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """How many."""
        return len(self._shapes)


def random_weights(device: torch.device | str, config: GatedDeltaNetConfig = SHAPE) -> GpuWeights:
    """The model as the GPU's passes take it."""
    return GpuWeights.load(config, RandomTensors(config, device), DTYPE, device)
