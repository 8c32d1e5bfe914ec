"""A loaded target: prepared weights, and the names by which others know it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from specla.kernels.dense import numerics_tag
from specla.rpc.errors import InvalidRequestError, UnsupportedModelError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import TargetWeights, prepare
from specla.verifier_service.targets.weights import load_checkpoint

ARITHMETIC = 2
"""Raised whenever a change of the code changes the bits of a text."""


@dataclass(frozen=True)
class Target:
    """What a verifier runs.

    Attributes:
        weights: ready for passes.
        weight_bytes: bytes they take.
        model_name: for people.
        numerics_id: equal ids give equal bits for equal requests: device class, dtype, mode, build and weights.
        tokenizer_hash: SHA-256 of tokenizer.json, hexadecimal.
    """

    weights: TargetWeights
    weight_bytes: int
    model_name: str
    numerics_id: str
    tokenizer_hash: str

    @classmethod
    def load(cls, config: VerifierConfig) -> "Target":
        """Load a checkpoint for the configured device and mode, and for PyTorch's present number of threads.

        Raises:
            InvalidRequestError: a device that is not supported.
            UnsupportedModelError: a checkpoint that cannot be run.
        """
        if config.device == "cuda":
            raise InvalidRequestError("device", "device is 'cuda'", hint="This version runs targets on 'cpu'")
        folder = config.target
        model = GatedDeltaNetConfig.from_folder(folder)
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.is_file():
            raise UnsupportedModelError(f"{tokenizer} does not exist", hint="A target needs its tokenizer.json")
        checkpoint = load_checkpoint(folder, model)
        weights = prepare(model, checkpoint.tensors, config.numerics, config.cpu_kernels)
        return cls(
            weights=weights,
            weight_bytes=weights.nbytes,
            model_name=_model_name(folder),
            numerics_id=_numerics_id(config, weights, checkpoint.digest),
            tokenizer_hash=hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        )


def _model_name(folder: Path) -> str:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(values.get("_name_or_path") or folder.resolve().name)


def _numerics_id(config: VerifierConfig, weights: TargetWeights, digest: str) -> str:
    parts = (
        "cpu",
        "float32",
        config.numerics,
        f"arithmetic-{ARITHMETIC}",
        weights.kernels,
        numerics_tag(weights.dense_weights()),
        f"threads-{torch.get_num_threads()}",
        f"chunk-{config.prefill_chunk}",
        digest[:16],
    )
    return "/".join(parts)
