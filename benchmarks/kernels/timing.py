"""How everything is timed: CUDA graphs, cold caches, rivals in turns.

One graph runs a piece of work once for each of so many layers that at least three times the L2 cache's size lies
between two visits of the same bytes; a layer's time is the graph's over its layers, launches included, since kernels
follow each other in a graph as they do in a model. A round replays every rival's graph between two events, in rotating
order, so that what drifts (clocks, temperature) drifts for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from specla.benchmarks.kernels.contenders import Contender

L2_TIMES = 3
"""At least so many L2 sizes of other bytes between two visits of the same."""

_LEAST_MS = 2.0  # of one sample: the gap before a graph's first kernel must not count
_MOST_REPLAYS = 8
HEAD_START = 3_000_000
"""Cycles that the device idles before a sample: by then the host has queued a large graph."""


class Work(NamedTuple):
    """Something to time: `units` of it (layers x passes, say) are one `run`; `warm` compiles all that `run` needs."""

    name: str
    units: int
    warm: Callable[[], None]
    run: Callable[[], None]

    @classmethod
    def of(cls, contender: Contender, layers: int) -> Work:
        """A cycle of a contender's passes: all layers verified, then committed, pass after pass."""

        def run() -> None:
            for step in range(contender.passes):
                for layer in range(layers):
                    contender.verify(layer, step)
                contender.commit(step)

        def warm() -> None:
            for step in range(contender.passes):
                contender.verify(0, step)
                contender.commit(step)

        return cls(contender.name, layers * contender.passes, warm, run)


class Graph(NamedTuple):
    """Captured work and how often one sample replays it."""

    name: str
    work: Work
    """Kept: a graph holds addresses, not the tensors that lie there."""
    graph: torch.cuda.CUDAGraph
    replays: int

    @classmethod
    def capture(cls, work: Work) -> Graph:
        """Warms up and captures. Whatever fails in either is raised."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(2):
                work.warm()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            work.run()
        once = cls(work.name, work, graph, 1)
        once.sample()
        milliseconds = once.sample() * work.units / 1e3
        replays = min(_MOST_REPLAYS, max(1, math.ceil(_LEAST_MS / max(milliseconds, 1e-3))))
        return once._replace(replays=replays)

    def sample(self) -> float:
        """Microseconds of one unit."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START)
        begin.record()
        for _ in range(self.replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / (self.work.units * self.replays)


def layers_needed(bytes_of_a_layer: int, l2_bytes: int) -> int:
    """Layers of one graph, two at least."""
    return max(2, math.ceil(L2_TIMES * l2_bytes / bytes_of_a_layer))


class Timed(Protocol):
    """What takes turns: a name, and microseconds of one unit."""

    @property
    def name(self) -> str:
        """As in the tables."""

    def sample(self) -> float:
        """Microseconds of one unit."""


def in_turns(graphs: Sequence[Timed], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each graph's unit, a sample a round; sample r of all comes from the same round."""
    samples: dict[str, list[float]] = {graph.name: [] for graph in graphs}
    if len(samples) != len(graphs):
        raise ValueError(f"names repeat: {[graph.name for graph in graphs]}")
    for turn in range(rounds):
        shift = turn % len(graphs)
        for graph in [*graphs[shift:], *graphs[:shift]]:
            samples[graph.name].append(graph.sample())
    return samples
