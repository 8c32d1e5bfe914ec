"""The target's logits against fla's own recurrence and gate, where fla is installed (it is no dependency)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generations import random_prompt
from reference_model import ReferenceModel
from torch import Tensor

from specla.kernels import reference
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import prefill_chunk, prepare
from specla.verifier_service.targets.weights import load_checkpoint

fla = pytest.importorskip("fla.ops.gated_delta_rule.naive", reason="flash-linear-attention is not installed")


@pytest.mark.parametrize("shape", [{}, {"v_heads": 4, "expand_v": 2.0}, {"gate": False}, {"neg_eigval": True}])
def test_against_flas_recurrence(
    tiny_target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        group = state.shape[0] // q.shape[1]
        q, k = (x.repeat_interleave(group, 1)[None] for x in (q, k))
        o, _ = fla.naive_recurrent_gated_delta_rule(q, k, v[None], beta[None], g[None], scale=1.0)
        return o[0].double(), o[0].double()

    def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, neg: bool) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule.gate import naive_gdn_gate

        return naive_gdn_gate(a, a_log, dt_bias).double(), torch.sigmoid(b) * (2 if neg else 1)

    monkeypatch.setattr(reference, "verify_tree", recurrence)
    monkeypatch.setattr(reference, "gates", gates)
    folder, prompt = tiny_target_of(**shape), random_prompt(320, 70, seed=1)
    config = GatedDeltaNetConfig.from_folder(folder)
    weights = prepare(config, load_checkpoint(folder, config).tensors, "exact", "compiled")
    store = StateStore(config, 1)
    hidden = prefill_chunk(weights, torch.tensor(prompt), store.recurrent_state[0], store.conv_state[0], True)
    found = hidden[-1].double() @ weights.embeddings.double().T
    wanted = ReferenceModel(folder).logits(prompt)
    assert (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt() < 1e-5
