"""All rows of a batch through the model, in the form that the weights were prepared for."""

from collections.abc import Sequence

from torch import Tensor

from specla.kernels.tree import TreeBatch
from specla.verifier_service.targets.gated_deltanet import TargetWeights, TreePass
from specla.verifier_service.targets.torch_pass import torch_tree_pass


def tree_pass(
    weights: TargetWeights,
    tokens: Tensor,
    batch: TreeBatch,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Sequence[int],
    want_logits: bool = True,
) -> TreePass:
    """Run all rows of a batch of sessions through the model; the stored state is read, never written.

    Args:
        weights: the model.
        tokens: int64 [R], the batch's rows.
        batch: which row follows which.
        recurrent_state: float32 [slots, L, HV, K, V], as it stands before each session's root.
        conv_state: float32 [slots, W - 1, L, D], likewise.
        slots: [B], each session's slot.
        want_logits: whether to multiply by the head.
    """
    if weights.kernels == "torch":
        return torch_tree_pass(weights, tokens, batch, recurrent_state, conv_state, slots, want_logits)
    # Imported here: the PyTorch form must run where numba does not.
    from specla.verifier_service.targets.compiled_pass import compiled_tree_pass

    return compiled_tree_pass(weights, tokens, batch, recurrent_state, conv_state, slots, want_logits)
