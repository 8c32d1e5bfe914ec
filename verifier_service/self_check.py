"""Exact mode's promise, proved at start-up on the build, processor and weights at hand."""

import torch

from specla.kernels.dense import DenseError, verify_row_independence
from specla.kernels.exactness import InexactBuildError, check_exactness
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.rpc.errors import InternalError
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.gated_deltanet import PassFactors, TargetWeights
from specla.verifier_service.targets.tree_pass import tree_pass

CHECKED_ROWS = (2, 3, 5, 8, 13, 17, 32)
STATE_SCALE = 0.1


def prove_exact(weights: TargetWeights, store: StateStore, max_rows: int) -> None:
    """Check every operation at the model's shapes, then whole passes of this model.

    Raises:
        InternalError: some row's bits depended on the rows beside it.
    """
    config = weights.config
    try:
        verify_row_independence(weights.dense_weights())
        if weights.kernels == "torch":
            check_exactness(
                heads=config.num_heads,
                value_heads=config.value_heads,
                key_width=config.head_dim,
                value_width=config.head_v_dim,
                taps=config.conv_size,
                hidden=config.hidden_size,
            )
    except (DenseError, InexactBuildError) as error:
        raise _broken_promise(str(error)) from None
    _compare_passes(weights, store, max_rows)


def _broken_promise(what: str) -> InternalError:
    return InternalError(
        what,
        hint="Exact mode cannot be kept here: choose numerics 'fast', or another build or thread count",
        metadata={"torch": torch.__version__, "threads": str(torch.get_num_threads())},
    )


@torch.inference_mode()
def _compare_passes(weights: TargetWeights, store: StateStore, max_rows: int) -> None:
    """Run two tokens through passes of several shapes, from one random state: their logits must be equal everywhere.

    Uses the store's scratch slot; leaves it empty.
    """
    slot, vocab = store.scratch_slot, weights.config.vocab_size
    random = torch.Generator().manual_seed(0)
    for x in (store.recurrent_state[slot], store.conv_state[slot]):
        x.copy_(torch.randn(x.shape, generator=random) * STATE_SCALE)
    root, candidate = (int(i) for i in torch.randint(vocab, (2,), generator=random))

    def run(root: int, candidates: Topology) -> tuple[torch.Tensor, PassFactors]:
        tokens = torch.tensor([root, *[candidate] * (len(candidates) - 1)])
        out = tree_pass(weights, tokens, pack([candidates]), store.recurrent_state, store.conv_state, [slot])
        assert out.logits is not None
        return out.logits, out.factors

    expected = torch.cat((run(root, _siblings(0))[0], run(root, _siblings(1))[0][1:]))  # the root, then the candidate
    for rows in dict.fromkeys((*(n for n in CHECKED_ROWS if n < max_rows), max_rows)):
        if rows < 2:
            continue
        found, _ = run(root, _siblings(rows - 1))
        if not (torch.equal(found[0], expected[0]) and torch.equal(found[1:], expected[1:].expand(rows - 1, -1))):
            raise _broken_promise(f"with this build of PyTorch a token's bits depend on the {rows} rows of its pass")
    below, factors = run(root, Topology.from_wire([-1, 0]))
    factors.apply(store.recurrent_state, store.conv_state, [slot], [[0, 1]])
    after, _ = run(candidate, _siblings(0))
    if not torch.equal(after[0], below[2]):
        raise _broken_promise("here a token's bits depend on whether the tokens before it are committed")
    store.clear(slot)


def _siblings(count: int) -> Topology:
    return Topology.from_wire([-1] * count)
