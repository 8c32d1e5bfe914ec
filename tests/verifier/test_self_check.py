"""The start-up proof of exact mode finds a product whose bits depend on the number of rows."""

from pathlib import Path

import pytest
import torch
from generations import engine_of

from specla.kernels.dense import DenseWeight
from specla.rpc.errors import InternalError
from specla.verifier_service.self_check import prove_exact
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets import gated_deltanet


@pytest.mark.parametrize("culprit", ["all rows", "one row of seventeen"])
def test_a_product_that_depends_on_its_rows_is_found(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, culprit: str
) -> None:
    weights = engine_of(tiny_target).target.weights
    store = StateStore(weights.config, 1)
    prove_exact(weights, store, max_rows=33)
    assert not store.recurrent_state.any()
    right = gated_deltanet.exact_linear

    def wrong(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        y = right(x, weight)
        if len(x) == 17:
            y[(slice(None) if culprit == "all rows" else 16), 0] *= 1 + 2**-20
        return y

    monkeypatch.setattr(gated_deltanet, "exact_linear", wrong)
    with pytest.raises(InternalError, match="the 17 rows") as error:
        prove_exact(weights, store, max_rows=33)
    assert "fast" in error.value.hint
