"""Restoring an accepted state of 8 tokens in all 24 layers of the 1.47B model: from factors, or by running them again.

- factors: `flush`, one launch for all layers;
- recurrence alone: the library's recurrent kernel over the 8 tokens, whose inputs were kept in each layer and are as
  cold as the factors, a launch a layer, as a model runs it, and all layers in one launch;
- the model: a lower bound that is kind to it: the matrix products of 24 layers at 8 rows with random weights, and the
  recurrent kernel of each layer on inputs that all layers share, hot as if just made. Norms, convolutions, gates,
  residuals, embedding and head are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specla.benchmarks.kernels.problem import Problem
from specla.benchmarks.kernels.replay import Kind, Operation
from specla.benchmarks.kernels.shapes import PAPER
from specla.benchmarks.kernels.timing import Graph, Work, in_turns, layers_needed
from specla.benchmarks.kernels.topologies import chain
from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows

TOKENS = 8
LAYERS = 24
PRODUCTS = ((8224, 2048), (2048, 2048), (11264, 2048), (2048, 5632))
"""Outputs x inputs of a layer's products: the mixer's in and out, the MLP's gate-up and down."""

ROUNDS = 25
CASE = f"restoring {TOKENS} tokens, {LAYERS} layers, 1 session"
FACTORS, ALONE, ALONE_AT_ONCE, MODEL = (
    "factors",
    "recurrence alone, a launch a layer",
    "recurrence alone, one launch",
    "tokens through the model (lower bound)",
)


def measure_restore(
    operations: Mapping[Kind, Operation], *, l2: int, device: str = "cuda", rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Microseconds of restoring all layers, by name; without the library, that of the factors alone."""
    sets = layers_needed(LAYERS * PAPER.state_bytes, l2)  # sets of 24 layers, so that each is cold
    made = Problem.make(PAPER, [chain(TOKENS)], accepted=TOKENS, layers=sets * LAYERS, device=device)
    works = [_factors(made, sets)]
    if "recurrent" in operations:
        works += [
            _alone(made, sets, operations["recurrent"], at_once=False),
            _alone(made, sets, operations["recurrent"], at_once=True),
            _model(made, operations["recurrent"]),
        ]
    return in_turns([Graph.capture(work) for work in works], rounds)


def _factors(made: Problem, sets: int) -> Work:
    state = made.state.clone().unflatten(0, (sets, LAYERS))
    pool = FactorPool(*(x.unflatten(0, (sets, LAYERS)) for x in made.pool))
    batch = made.batch(groups=1, pending=TOKENS, write_state=True)

    def run(count: int = sets) -> None:
        for i in range(count):
            flush(state[i], FactorPool(*(x[i] for x in pool)), batch.slot, batch.pending, batch.pending_len)

    return Work(FACTORS, sets, lambda: run(1), run)


def _alone(made: Problem, sets: int, operation: Operation, *, at_once: bool) -> Work:
    state, kept = made.state.clone(), made.accepted_inputs()  # [L, 1, 8, ...]

    def run(count: int = sets) -> None:
        step = LAYERS if at_once else 1
        for first in range(0, count * LAYERS, step):
            inputs = LayerRows(*(x[first : first + step, 0] for x in kept))
            _recur(inputs, state[first : first + step], operation)

    return Work(ALONE_AT_ONCE if at_once else ALONE, sets, lambda: run(1), run)


def _recur(inputs: LayerRows, state: Tensor, operation: Operation) -> None:
    """The recurrent kernel over some layers' tokens [layers, 8, ...], each layer a sequence of the batch."""
    q, k, v, g, beta = inputs
    operation(q, k, v, g=g, beta=beta, scale=1.0, initial_state=state.flatten(0, 1), output_final_state=True)


def _model(made: Problem, operation: Operation) -> Work:
    """One set: its weights alone are many times the L2."""
    device = made.state.device
    draw = torch.Generator(device=device).manual_seed(1)
    weights = [
        [torch.randn(o, i, generator=draw, device=device, dtype=torch.bfloat16) * i**-0.5 for o, i in PRODUCTS]
        for _ in range(LAYERS)
    ]
    inputs = [torch.randn(TOKENS, i, generator=draw, device=device, dtype=torch.bfloat16) for _, i in PRODUCTS]
    state, rows = made.state.clone(), LayerRows(*(x[None] for x in made.rows))  # [1, 8, ...]

    def run() -> None:
        for layer in range(LAYERS):
            torch.nn.functional.linear(inputs[0], weights[layer][0])
            _recur(rows, state[layer : layer + 1], operation)
            for x, w in zip(inputs[1:], weights[layer][1:], strict=True):
                torch.nn.functional.linear(x, w)

    return Work(MODEL, 1, run, run)
