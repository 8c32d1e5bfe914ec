"""Root-to-leaf replay: every path of the tree is run as a sequence of its own, by flash-linear-attention's kernels.

What is kind to this rival: its inputs lie ready, gathered path by path, and all layers share them as they share ours;
its outputs are left where they fall; the
state after the accepted path, which ends inside the tree, comes from one launch of the recurrent kernel for all layers
and is taken as the kernel returns it, with no copy to a slot. Keeping the final state of every replayed path instead
would write a state for each of them, for the case that a whole path is accepted. What its interface asks for is
counted: a batched launch needs a copy of the session's state for every path. With "states ready" the accepted state is
taken to be there already, at no cost: a bound for every way of coming by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.topologies import leaf_paths
from specla.kernels.gpu.layer_rows import LayerRows

Operation = Callable[..., tuple[Tensor, Tensor | None]]
"""(q, k, v, g, beta, scale=, initial_state=, output_final_state=, cu_seqlens=) -> (o, final state), all [B, T, ...]."""

Kind = Literal["recurrent", "chunked"]

_TOLERANCE = {"recurrent": 1e-2, "chunked": 2e-2}  # outputs in bfloat16; the chunked kernel keeps more in it


class MissingLibraryError(RuntimeError):
    """flash-linear-attention cannot be imported here."""


def operation(kind: Kind) -> Operation:
    """The library's kernel. Importing it takes some ten seconds.

    Raises:
        MissingLibraryError: it is not installed, or does not import with this PyTorch.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except Exception as error:  # whatever an optional package's import may raise
        raise MissingLibraryError(f"flash-linear-attention is not usable: {type(error).__name__}: {error}") from error
    found: Operation = fused_recurrent_gated_delta_rule if kind == "recurrent" else chunk_gated_delta_rule
    return found


class Replay:
    """Replays every path of every session.

    All sessions must have one topology: a single launch then runs one path of all sessions.
    """

    passes, deferred = 1, False

    def __init__(
        self,
        problem: Problem,
        kind: Kind,
        *,
        batched: bool,
        recurrent: Operation,
        replayed: Operation,
        ready: bool = False,
    ):
        """`replayed` runs the paths, in one launch if `batched`; `recurrent` restores the accepted state.

        With `ready`, nothing restores it, and `states` cannot be asked for.

        Raises:
            ValueError: the sessions' topologies differ.
        """
        if len(set(problem.topologies)) > 1:
            raise ValueError("give all sessions one topology: a launch runs the same path of all of them")
        self.name = self.name_of(kind, batched=batched, ready=ready)
        self.tolerance = _TOLERANCE[kind]
        self._problem, self._batched, self._ready = problem, batched, ready
        self._operation, self._recurrent = replayed, recurrent
        self._state, device = problem.state.clone(), problem.state.device
        self._paths = leaf_paths(problem.topologies[0])
        firsts = problem.first_rows
        if batched:
            runs = [[first + row for row in path] for first in firsts for path in self._paths]
            ends = torch.tensor([len(run) for run in runs]).cumsum(0)
            self._ends = torch.nn.functional.pad(ends, (1, 0)).to(device)  # int64
            places = [torch.tensor([[row for run in runs for row in run]], device=device)]  # [1, T]
        else:
            places = [torch.tensor([[f + row for row in path] for f in firsts], device=device) for path in self._paths]
        self._places = places
        self._inputs = [
            LayerRows(*(x[at].contiguous() for x in problem.rows)) for at in places
        ]  # [B or 1, T, ...], of every layer alike
        self._accepted = LayerRows(*(x.flatten(0, 1) for x in problem.accepted_inputs()))  # [L B, a, ...]
        self._o: list[Tensor] = []
        self._final: Tensor | None = None

    @staticmethod
    def name_of(kind: Kind, *, batched: bool, ready: bool = False) -> str:
        """As in the tables."""
        return f"replay, {kind}, {'one launch' if batched else 'a launch a path'}{', states ready' if ready else ''}"

    @staticmethod
    def bytes(problem: Problem) -> int:
        """Memory of the copies of the state that one batched launch takes."""
        return len(leaf_paths(problem.topologies[0])) * problem.sessions * problem.shape.state_bytes

    @staticmethod
    def input_bytes(problem: Problem) -> int:
        """Memory of the gathered inputs."""
        per_row = sum(x[0].numel() * x.element_size() for x in problem.rows)
        return problem.sessions * sum(map(len, leaf_paths(problem.topologies[0]))) * per_row

    def verify(self, layer: int, step: int) -> None:
        """A launch a path, or an expansion of the state and one launch."""
        state = self._state[layer]
        if self._batched:
            state = state[:, None].expand(-1, len(self._paths), -1, -1, -1).flatten(0, 1)  # [B P, HV, K, V], copies
        self._o = []  # freed first: the next layer's outputs take the same memory
        for q, k, v, g, beta in self._inputs:
            ends = {"cu_seqlens": self._ends} if self._batched else {}
            o, _ = self._operation(
                q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=False, **ends
            )
            self._o.append(o)

    def commit(self, step: int) -> None:
        """The recurrent kernel over the accepted paths of all layers, in one launch; nothing if states are ready."""
        if self._ready:
            return
        q, k, v, g, beta = self._accepted
        _, self._final = self._recurrent(
            q, k, v, g=g, beta=beta, scale=1.0, initial_state=self._state.flatten(0, 1), output_final_state=True
        )

    def outputs(self, layer: int) -> Tensor:
        """[R, HV, V], every row from one of its paths."""
        rows = torch.full_like(self._problem.rows.v, float("nan"))
        for at, o in zip(self._places, self._o, strict=True):
            rows[at.flatten()] = o.flatten(0, 1)
        return rows

    def states(self, layer: int) -> Tensor:
        """As the kernel returned them."""
        if self._final is None:
            raise RuntimeError("commit first")
        return self._final.view(self._problem.layers, -1, *self._final.shape[1:])[layer]
