"""One pass's inputs for several layers: rows, states, pending factors and accepted paths, seeded.

Layers are copies of the same pass over other states and factors. A timed run goes through all of them, so that none of
a layer's states and factors is in the L2 cache any more when the run comes back to it. The rows' q, k, v, g and beta
are one set that all layers share, and so are the outputs of every contender: in a model, all layers' activations pass
through the same buffers, and the kernel just before has written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.benchmarks.kernels.inputs import Inputs
from specla.benchmarks.kernels.shapes import Shape
from specla.benchmarks.kernels.topologies import deepest_path
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.topology import MAX_ROWS, Topology

RING = 16
"""The most factors of a session that wait, and the pool rows that they lie in: 0 to 15."""

POOL_ROWS = RING + MAX_ROWS


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A pass of B sessions and R rows over L layers.

    Attributes:
        shape: of every layer.
        topologies: B trees.
        accepted: B lists of the rows that the pass turns out to accept, root first, all of one length.
        pending: P, factors of each session that the stored state lacks, in pool rows 0 to P - 1.
        rows: inputs [R, ...] of every layer alike. Rows past the sessions' last belong to nobody.
        state: float32 [L, B, HV, K, V] before the pending factors. Nobody writes to it: contenders clone it.
        pool: [L, B, POOL_ROWS, ...]; RING rows of factors, then the rows' own k and g. Contenders clone it, too.
        tree_rows: N of the bucket.
    """

    shape: Shape
    topologies: tuple[Topology, ...]
    accepted: tuple[tuple[int, ...], ...]
    pending: int
    rows: LayerRows
    state: Tensor
    pool: FactorPool
    tree_rows: int

    @classmethod
    def make(
        cls,
        shape: Shape,
        topologies: Sequence[Topology],
        *,
        accepted: int,
        layers: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        tree_rows: int | None = None,
        spare_rows: int = 0,
        seed: int = 0,
    ) -> Problem:
        """A pass of random inputs (see inputs.py).

        Args:
            shape: of the layers.
            topologies: one a session.
            accepted: rows on the deepest path that are accepted, cut to the path's length in the shallowest tree; as
                many factors are pending.
            layers: L.
            device: where everything lies.
            dtype: the model's.
            tree_rows: N of the bucket; the largest tree if unset.
            spare_rows: row places that no session uses.
            seed: of the inputs.
        """
        draw = Inputs(shape, dtype=dtype, device=device, seed=seed)
        B, used = len(topologies), sum(len(t) for t in topologies)
        tree_rows = tree_rows or max(len(t) for t in topologies)
        paths = [deepest_path(t) for t in topologies]
        length = min(accepted, *(len(path) for path in paths))
        rows = draw.rows(max(used, tree_rows) + spare_rows)
        sizes = (shape.heads, shape.value_heads, shape.key_width, shape.value_width)
        flat = FactorPool.empty(layers * B, POOL_ROWS, *sizes, dtype, device)
        pool = FactorPool(*(x.view(layers, B, *x.shape[1:]) for x in flat))
        pool.k[:, :, :RING] = draw.keys(layers, B, RING)
        pool.u[:, :, :RING] = draw.normal(layers, B, RING, shape.value_heads, shape.value_width)
        pool.u[:, :, RING:] = float("nan")  # a pass writes these before anybody reads them
        pool.g[:, :, :RING] = draw.decays(layers, B, RING)
        first = 0
        for b, topology in enumerate(topologies):
            n = len(topology)
            pool.k[:, b, RING : RING + n] = rows.k[first : first + n]
            pool.g[:, b, RING : RING + n] = rows.g[first : first + n]
            first += n
        return cls(
            shape=shape,
            topologies=tuple(topologies),
            accepted=tuple(tuple(path[:length]) for path in paths),
            pending=length,
            rows=rows,
            state=draw.states(layers, B),
            pool=pool,
            tree_rows=tree_rows,
        )

    @property
    def layers(self) -> int:
        """L."""
        return self.state.shape[0]

    @property
    def sessions(self) -> int:
        """B."""
        return len(self.topologies)

    @property
    def used_rows(self) -> int:
        """Rows that belong to sessions; they come first."""
        return sum(len(t) for t in self.topologies)

    @property
    def first_rows(self) -> list[int]:
        """The root's place among all rows, for each session."""
        first, found = 0, []
        for topology in self.topologies:
            found.append(first)
            first += len(topology)
        return found

    def batch(self, *, groups: int, pending: int, write_state: bool) -> PassBatch:
        """The pass as our kernels see it, with `pending` factors of each session in pool rows 0 and on."""
        bucket = Bucket(
            sessions=self.sessions,
            rows=self.rows.k.shape[0],
            tree_rows=self.tree_rows,
            pending=RING,
            groups=groups,
        )
        batch = PassBatch(bucket, self.state.device)
        batch.fill(
            [
                SessionPass(
                    slot=b,
                    topology=topology,
                    pool_rows=range(RING, RING + len(topology)),
                    pending=range(pending),
                    write_state=write_state,
                )
                for b, topology in enumerate(self.topologies)
            ]
        )
        return batch

    def accepted_inputs(self) -> LayerRows:
        """q, k, v, g, beta of the accepted rows as they would be kept, a copy a layer: [L, B, a, ...]."""
        places = [[first + row for row in path] for first, path in zip(self.first_rows, self.accepted, strict=True)]
        at = torch.tensor(places, device=self.state.device)
        return LayerRows(*(x[at].expand(self.layers, *at.shape, *x.shape[1:]).contiguous() for x in self.rows))
