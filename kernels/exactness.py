"""Whether the PyTorch build at hand keeps the promise of exact mode: a row's bits do not depend on its pass.

Which instructions run for which element, and in which order a matrix product adds up, is up to the build, the
processor and the number of threads. The forms used were chosen to be safe; this check, run once at start-up with the
model's own shapes, turns a build on which they are not into an error instead of a text that depends on its drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specla.kernels.commit import Factors, commit_exact
from specla.kernels.convolution import advance_window, tree_convolution
from specla.kernels.gated_delta import verify_exact
from specla.kernels.rowwise import GateParameters, gate_parameters, gates, l2_normalise, rms_norm, silu
from specla.kernels.topology import MAX_ROWS, Topology
from specla.kernels.tree import pack

_PARENTS = (-1, -1, 0, 0, 0, 2, 2, 5, 1, 8, 9, 10)  # siblings, a fork below a fork, a long chain
_WIDTHS = (1, 2, 3, 5, 9, 22, 64)


class InexactBuildError(RuntimeError):
    """On this build, device and number of threads some rows' bits depend on the pass they are in."""


def check_exactness(*, heads: int, value_heads: int, key_width: int, value_width: int, taps: int, hidden: int) -> None:
    """Runs the exact forms on random rows, together and one by one, and compares the bits.

    Args:
        heads, value_heads, key_width, value_width: H, HV, K and V of the model.
        taps: W of its convolution.
        hidden: the width of its residual stream.

    Raises:
        InexactBuildError: a row's result differs; names the operations, the thread count and what to do.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.inference_mode():
        channels = 2 * heads * key_width + value_heads * value_width
        parameters = gate_parameters(normal(value_heads), normal(value_heads))
        qk, weight = normal(MAX_ROWS, 2 * heads * key_width), normal(hidden)
        rowwise: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
            "silu": (silu, normal(MAX_ROWS, channels)),
            "rms_norm": (lambda x: rms_norm(x, weight, 1e-6), normal(MAX_ROWS, hidden)),
            "l2_normalise": (lambda x: l2_normalise(x.view(-1, 2, heads, key_width)), qk),
            "gates": (lambda x: _all_gates(x, parameters), normal(MAX_ROWS, 2 * value_heads)),
        }
        faults = [name for name, (function, x) in rowwise.items() if not _independent(function, x)]
        rows = len(_PARENTS) + 1
        x, window, filter_ = normal(rows, channels), normal(1, taps - 1, channels), normal(taps, channels)
        if not _same_convolution(x, window, filter_):
            faults.append("tree_convolution")
        qk = l2_normalise(normal(rows, 2, heads, key_width))
        g, beta = gates(normal(rows, 2 * value_heads), parameters)
        state = normal(1, value_heads, key_width, value_width)
        if not _same_recurrence(qk, normal(rows, value_heads, value_width), g, beta, state):
            faults.append("verify_exact")
    if faults:
        instructions = torch.backends.cpu.get_cpu_capability()
        raise InexactBuildError(
            f"{', '.join(faults)}: a row's bits depend on the other rows of its pass, with PyTorch "
            f"{torch.__version__}, {torch.get_num_threads()} threads and {instructions} instructions. Exact mode would "
            "not be lossless here: use fast mode, another number of threads, or another build of PyTorch"
        )


def _all_gates(ab: Tensor, parameters: GateParameters) -> Tensor:
    return torch.cat(gates(ab, parameters), 1)


def _independent(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether rows of f(x) are the same alone and among others, at any place."""
    together = function(x)
    starts = [(start, width) for width in _WIDTHS for start in {0, (MAX_ROWS - width) // 2, MAX_ROWS - width}]
    return all(torch.equal(function(x[s : s + w]), together[s : s + w]) for s, w in starts)


def _same_convolution(x: Tensor, window: Tensor, weight: Tensor) -> bool:
    """Whether a tree pass and one-row passes give the same bits."""
    topology, root = Topology.from_wire(_PARENTS), pack([Topology.root_only()])
    y = tree_convolution(x, window, weight, pack([topology])).y
    windows: list[Tensor] = []
    for row, parent in enumerate(topology.parent_rows):
        before = window if parent < 0 else windows[parent]
        alone = tree_convolution(x[row : row + 1], before, weight, root)
        after = before.clone()
        advance_window(after, [0], alone.inputs, root, [0])
        windows.append(after)
        if not torch.equal(alone.y[0], y[row]):
            return False
    return True


def _same_recurrence(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> bool:
    """Whether a tree pass, a batch of two and one-row passes give the same bits."""
    topology, root = Topology.from_wire(_PARENTS), pack([Topology.root_only()])
    together = torch.cat(verify_exact(qk, v, g, beta, state, pack([topology])), 2)
    qk2, v2, g2, beta2, state2 = (torch.cat((x, x)) for x in (qk, v, g, beta, state))
    batched = torch.cat(verify_exact(qk2, v2, g2, beta2, state2, pack([topology, topology])), 2)
    same = torch.equal(batched, torch.cat((together, together)))
    states: list[Tensor] = []
    for row, parent in enumerate(topology.parent_rows):
        before = state if parent < 0 else states[parent]
        one_qk, one_v, one_g, one_beta = (x[row : row + 1] for x in (qk, v, g, beta))
        o, u = verify_exact(one_qk, one_v, one_g, one_beta, before, root)
        after = before.clone()
        commit_exact(after, [0], Factors(one_qk[:, 1], u, one_g), [[0]])
        states.append(after)
        same = same and torch.equal(torch.cat((o, u), 2)[0], together[row])
    return same
