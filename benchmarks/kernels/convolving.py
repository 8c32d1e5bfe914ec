"""Times the convolution over ancestors: one layer from its projections to the rows of the recurrence, and the factors.

As everywhere, what belongs to a layer (weights, pool) is cold and what the kernel before has just written (x, a, b) is
shared by all layers. Nothing is timed before a pass has the values of the float64 reference.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specla.benchmarks.kernels.inputs import Inputs
from specla.benchmarks.kernels.shapes import FACTOR_BYTES, MODEL_BYTES, PAPER, Shape
from specla.benchmarks.kernels.timing import Graph, Work, in_turns, layers_needed
from specla.benchmarks.kernels.topologies import eagle_like
from specla.benchmarks.report import Row
from specla.kernels import reference
from specla.kernels.gpu.convolution import ConvolutionParameters, tree_convolution
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass

CASE = "convolution over ancestors"
ROWS, SESSIONS = (16, 32, 64), (1, 16)
TAPS = 4
ROUNDS = 15
_TOLERANCE = 2.0**-7  # of a bfloat16, relative to the largest value of its kind


class WrongRowsError(RuntimeError):
    """The kernel's rows are not those of the reference."""


class Convolving:
    """The same pass for several layers: sessions x EAGLE-like trees of so many rows."""

    def __init__(self, shape: Shape, sessions: int, rows: int, *, layers: int, device: str):
        """Random inputs; the last taps - 1 tokens of every session lie in the pool."""
        self._shape, self._tree, self._sessions = shape, eagle_like(rows), sessions
        self._channels = 2 * shape.heads * shape.key_width + shape.value_heads * shape.value_width
        draw = Inputs(shape, dtype=torch.bfloat16, device=device, seed=3)
        total, history = sessions * rows, TAPS - 1
        self._x = draw.normal(total, self._channels).bfloat16()
        self._a, self._b = (draw.normal(total, shape.value_heads).bfloat16() for _ in range(2))
        self._parameters = [
            ConvolutionParameters(
                draw.normal(TAPS, self._channels), draw.normal(shape.value_heads), draw.normal(shape.value_heads)
            )
            for _ in range(layers)
        ]
        sizes = (shape.heads, shape.value_heads, shape.key_width, shape.value_width)
        flat = FactorPool.empty(layers * sessions, history + rows, *sizes, torch.bfloat16, device)
        self._pool = FactorPool(*(x.view(layers, sessions, *x.shape[1:]) for x in flat))
        self._pool.x[:, :, :history] = draw.normal(layers, sessions, history, self._channels).bfloat16()
        self._batch = PassBatch(Bucket(sessions=sessions, rows=total, tree_rows=rows, taps=TAPS), device)
        self._batch.fill(
            [
                SessionPass(
                    slot=slot,
                    topology=self._tree,
                    pool_rows=range(history, history + rows),
                    history=range(history),
                )
                for slot in range(sessions)
            ]
        )
        self._out = LayerRows.empty(total, *sizes, torch.bfloat16, device)

    def work(self, name: str) -> Work:
        """All layers, one launch each."""
        layers = len(self._parameters)
        return Work(name, layers, partial(self.run, 1), partial(self.run, layers))

    def run(self, layers: int) -> None:
        """The first so many layers."""
        for layer, parameters in enumerate(self._parameters[:layers]):
            pool = FactorPool(*(x[layer] for x in self._pool))
            tree_convolution(self._x, self._a, self._b, parameters, pool, self._batch, self._out)

    def check(self) -> None:
        """Raises WrongRowsError unless the last session's rows of the first layer are those of the reference."""
        for x in self._out:
            x.fill_(float("nan"))
        self.run(1)
        n, last, parameters = len(self._tree), slice(-len(self._tree), None), self._parameters[0]
        shape, window = self._shape, self._pool.x[0, -1, : TAPS - 1]
        y = reference.convolution(self._x[last].cpu(), window.cpu(), parameters.weight.cpu(), self._tree.parent_rows)
        keys = shape.heads * shape.key_width
        q, k, v = y.split([keys, keys, self._channels - 2 * keys], 1)
        q = reference.l2_normalise(q.view(n, -1, shape.key_width), shape.key_width**-0.5)
        k = reference.l2_normalise(k.view(n, -1, shape.key_width))
        gates = reference.gates(
            self._a[last].cpu(), self._b[last].cpu(), parameters.a_log.cpu(), parameters.dt_bias.cpu(), False
        )
        want = (q, k, v.view(n, -1, shape.value_width), *gates)
        for name, got, right in zip(LayerRows._fields, self._out, want, strict=True):
            _compare(name, got[last].cpu(), right)

    def bytes_apart(self) -> int:
        """Bytes that no two layers share: weights, histories and what goes to the pool."""
        shape, rows, channels = self._shape, self._sessions * len(self._tree), self._channels
        weights = (TAPS * channels + 2 * shape.value_heads) * FACTOR_BYTES
        history = self._sessions * (TAPS - 1) * channels * MODEL_BYTES
        factor = (channels + shape.heads * shape.key_width) * MODEL_BYTES + shape.value_heads * FACTOR_BYTES
        return weights + history + rows * factor

    def bytes_once(self) -> int:
        """The least bytes of one layer: its own, the rows' inputs read once and the rows written once."""
        inputs = (self._channels + 2 * self._shape.value_heads) * MODEL_BYTES
        outputs = self._channels * MODEL_BYTES + 2 * self._shape.value_heads * FACTOR_BYTES
        return self.bytes_apart() + self._sessions * len(self._tree) * (inputs + outputs)


def measure_convolution(*, l2: int, bandwidth: float, device: str = "cuda") -> list[Row]:
    """Microseconds of a layer by sessions and rows, and over the time to move the bytes once.

    Args:
        l2: bytes of the L2 cache.
        bandwidth: bytes a second of a plain copy.
        device: where to run.

    Raises:
        WrongRowsError: a case does not give what the reference gives.
    """
    shape, floors = PAPER, {}
    graphs = []
    for sessions in SESSIONS:
        for rows in ROWS:
            name = f"{shape.name}, {sessions} session{'s' if sessions > 1 else ''} x {rows} rows"
            alone = Convolving(shape, sessions, rows, layers=1, device=device)
            alone.check()
            layers = layers_needed(alone.bytes_apart(), l2)
            floors[name] = alone.bytes_once() / bandwidth * 1e6
            made = Convolving(shape, sessions, rows, layers=layers, device=device)
            graphs.append(Graph.capture(made.work(name)))
    found = []
    for name, samples in in_turns(graphs, ROUNDS).items():
        found.append(Row.of(CASE, name, samples, "us"))
        ratios = [us / floors[name] for us in samples]
        found.append(Row.of(CASE, f"{name}, over the time to move the bytes once", ratios, "x"))
    return found


def warm(device: str = "cuda") -> None:
    """Compiles, and checks one case."""
    Convolving(PAPER, 1, ROWS[0], layers=1, device=device).check()


def _compare(name: str, got: Tensor, want: Tensor) -> None:
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    if not error <= _TOLERANCE:
        raise WrongRowsError(f"{name} of the convolution is off by {error:.1e} of its largest value")
