"""A Gated DeltaNet target's weights as the GPU's kernels take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specla.kernels.gpu.convolution import ConvolutionParameters
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import EMBEDDINGS, HEAD

_ALIGNED = 8  # numbers of 16 bits in 16 bytes


class InputWidths(NamedTuple):
    """Where the mixer's projections of one row lie, side by side."""

    convolved: int
    """D: q, k and v."""
    heads: int
    """HV: a, then b, of each value head."""
    gates: int
    """Of a and b and the padding behind them."""
    gate: int
    """Of the output gate, 0 without one."""

    @classmethod
    def of(cls, config: GatedDeltaNetConfig) -> InputWidths:
        """For a model."""
        heads = config.value_heads
        gates = -(-2 * heads // _ALIGNED) * _ALIGNED
        return cls(config.conv_dim, heads, gates, config.value_dim if config.use_gate else 0)

    @property
    def total(self) -> int:
        """Of all."""
        return self.convolved + self.gates + self.gate

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Views of [R, total]: x [R, D], a and b [R, HV], the output gate [R, HV V]."""
        x, gates, gate = projected.split([self.convolved, self.gates, self.gate], 1)
        return x, gates[:, : self.heads], gates[:, self.heads : 2 * self.heads], gate if self.gate else None


class GpuLayer(NamedTuple):
    """One block. Matrices [outputs, inputs] in the model's dtype, the weights of norms in float32."""

    mixer_norm: Tensor
    """[hidden]."""
    inputs: Tensor
    """[D + G + HV V, hidden]: the convolution's inputs q, k and v, then a and b of the gates in a width G that keeps
    what follows aligned, then the output gate, if the model has one (see `InputWidths`)."""
    convolution: ConvolutionParameters
    output_norm: Tensor
    """[V], of each head's output."""
    output: Tensor
    """[hidden, HV V]."""
    mlp_norm: Tensor
    """[hidden]."""
    gate_up: Tensor
    """[2 M, hidden]: for each channel its gate, then what it gates."""
    down: Tensor
    """[hidden, M]."""


@dataclass(frozen=True)
class GpuWeights:
    """The model on one device.

    Attributes:
        config: its shape.
        dtype: of matrices and activations: bfloat16, float16 or float32.
        embeddings: [vocab, hidden].
        layers: in order.
        norm: float32 [hidden], of the final norm.
        head: [vocab, hidden]; the embeddings where the checkpoint ties them.
    """

    config: GatedDeltaNetConfig
    dtype: torch.dtype
    embeddings: Tensor
    layers: tuple[GpuLayer, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def load(
        cls,
        config: GatedDeltaNetConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> GpuWeights:
        """From a checkpoint's tensors, as `load_checkpoint` gives them."""

        def matrix(*names: str) -> Tensor:
            return torch.cat([tensors[name] for name in names]).to(device, dtype).contiguous()

        def numbers(name: str) -> Tensor:
            return tensors[name].to(device, torch.float32, copy=True).contiguous()  # aligned, unlike a file's

        layers = []
        for i in range(config.num_hidden_layers):
            attn, mlp = f"model.layers.{i}.attn.", f"model.layers.{i}.mlp."
            taps = torch.cat([tensors[f"{attn}{name}_conv1d.weight"] for name in "qkv"]).squeeze(1).T  # [W, D]
            layers.append(
                GpuLayer(
                    mixer_norm=numbers(f"model.layers.{i}.attn_norm.weight"),
                    inputs=_inputs(config, tensors, attn).to(device, dtype).contiguous(),
                    convolution=ConvolutionParameters(
                        taps.to(device, torch.float32).contiguous(),
                        numbers(f"{attn}A_log"),
                        numbers(f"{attn}dt_bias"),
                        config.allow_neg_eigval,
                    ),
                    output_norm=numbers(f"{attn}o_norm.weight"),
                    output=matrix(f"{attn}o_proj.weight"),
                    mlp_norm=numbers(f"model.layers.{i}.mlp_norm.weight"),
                    gate_up=_interleaved(tensors[f"{mlp}gate_proj.weight"], tensors[f"{mlp}up_proj.weight"])
                    .to(device, dtype)
                    .contiguous(),
                    down=matrix(f"{mlp}down_proj.weight"),
                )
            )
        embeddings = matrix(EMBEDDINGS)
        head = embeddings if config.tie_word_embeddings else matrix(HEAD)
        return cls(config, dtype, embeddings, tuple(layers), numbers("model.norm.weight"), head)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.norm.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        found: list[Tensor] = [self.embeddings, self.norm]
        if self.head is not self.embeddings:
            found.append(self.head)
        for layer in self.layers:
            found += [x for x in layer if isinstance(x, Tensor)]
            found += [x for x in layer.convolution if isinstance(x, Tensor)]
        return sum(x.nbytes for x in found)


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two matrices in turn, as `product` takes them for SwiGLU."""
    return torch.stack((gate, up), 1).flatten(0, 1)


def _inputs(config: GatedDeltaNetConfig, tensors: Mapping[str, Tensor], attn: str) -> Tensor:
    """The merged projection of the mixer's inputs."""
    widths = InputWidths.of(config)
    parts = [tensors[f"{attn}{name}_proj.weight"] for name in "qkvab"]
    parts.append(parts[0].new_zeros(widths.gates - 2 * widths.heads, config.hidden_size))
    if widths.gate:
        parts.append(tensors[f"{attn}g_proj.weight"])
    return torch.cat(parts)
