"""Exact mode's promise, proved at start-up on the build, device and weights at hand."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specla.kernels.dense import DenseError, verify_row_independence
from specla.kernels.exactness import InexactBuildError, check_exactness
from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.rpc.errors import InternalError
from specla.verifier_service.backend import Backend, PassRows
from specla.verifier_service.cpu_backend import CpuBackend
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.gated_deltanet import TargetWeights

CHECKED_ROWS = (2, 3, 5, 8, 13, 17, 32)
TEXT = 8  # tokens before the rows that are compared


def prove_exact(weights: TargetWeights, store: StateStore, max_rows: int) -> None:
    """On a CPU: check every operation at the model's shapes, then whole passes of this model.

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
    prove_passes(CpuBackend(weights, store), config.vocab_size, max_rows)


def _broken_promise(what: str) -> InternalError:
    return InternalError(
        what,
        hint="Exact mode cannot be kept here: choose numerics 'fast', or another build, device or thread count",
        metadata={"torch": torch.__version__, "threads": str(torch.get_num_threads())},
    )


@torch.inference_mode()
def prove_passes(backend: Backend, vocab_size: int, max_rows: int) -> None:
    """Run a root and a candidate through passes of several shapes, behind one text: their logits must be equal
    everywhere, whatever lies beside them, and whether or not the tokens before them are committed.

    Uses one free slot, and a second one if there is one; without, no session ever lies beside another.

    Raises:
        InternalError: some row's bits depended on the rows beside it.
    """
    slot, random = backend.acquire(), torch.Generator().manual_seed(0)
    *text, root, candidate = torch.randint(vocab_size, (TEXT + 2,), generator=random).tolist()

    def logits(candidates: Topology, tokens: list[int]) -> NDArray[np.float32]:
        out = _run(backend, vocab_size, [slot], [candidates], tokens)
        return np.stack([out.logits(row) for row in range(len(tokens))])

    text = text[:max_rows]
    _run(backend, vocab_size, [slot], [_chain(len(text))], text).take(0, range(len(text)))
    expected = logits(_siblings(0), [root])
    if max_rows > 1:
        expected = np.concatenate((expected, logits(_siblings(1), [root, candidate])[1:]))
    for rows in dict.fromkeys((*(n for n in CHECKED_ROWS if n < max_rows), max_rows)):
        found = logits(_siblings(rows - 1), [root, *[candidate] * (rows - 1)])
        if not (_same_bits(found[0], expected[0]) and all(_same_bits(row, expected[1]) for row in found[1:])):
            raise _broken_promise(f"here a token's bits depend on the {rows} rows of its pass")
    if backend.free_slots:
        _compare_beside(backend, vocab_size, slot, [root, candidate][:max_rows], expected)
    tokens = [root, candidate, candidate][:max_rows]
    out = _run(backend, vocab_size, [slot], [_chain(len(tokens))], tokens)
    below = out.logits(len(tokens) - 1).copy()
    if len(tokens) > 1:
        out.take(0, range(len(tokens) - 1))
        if not _same_bits(logits(_siblings(0), tokens[-1:])[0], below):
            raise _broken_promise("here a token's bits depend on whether the tokens before it are committed")
    backend.clear(slot)
    backend.release(slot)


def _compare_beside(
    backend: Backend, vocab_size: int, slot: int, tokens: list[int], expected: NDArray[np.float32]
) -> None:
    """The same rows behind another session's."""
    other, tree = backend.acquire(), _siblings(len(tokens) - 1)
    out = _run(backend, vocab_size, [other, slot], [tree, tree], [*reversed(tokens), *tokens])
    found = [out.logits(len(tokens) + row) for row in range(len(tokens))]
    backend.clear(other)
    backend.release(other)
    if not all(map(_same_bits, found, expected)):
        raise _broken_promise("here a token's bits depend on the sessions in its pass")


def _run(
    backend: Backend, vocab_size: int, slots: Sequence[int], trees: Sequence[Topology], tokens: Sequence[int]
) -> PassRows:
    """One pass whose rows all sample."""
    states = [SessionSampling(SamplingParams(temperature=0.0), vocab_size) for _ in slots]
    return backend.run(Lineup(slots, pack(trees), states), tokens, [0] * len(slots))


def _same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def _siblings(count: int) -> Topology:
    return Topology.from_wire([-1] * count)


def _chain(rows: int) -> Topology:
    return Topology.from_wire(range(-1, rows - 2))
