"""What passes are compared with in the same run: a state snapshot for every row, and what no pass can be faster than.

Snapshots: this engine's pass with the verification kernel exchanged for one that stores a whole state for each row
(see kernels/rivals.py) and a copy of the accepted ones behind the pass. Products alone: the pass's matrix products one
after the other, ours and cuBLAS's.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from specla.benchmarks.kernels.rivals import COLUMNS, scatter_accepted, verify_snapshot
from specla.benchmarks.kernels.timing import Graph, Work
from specla.benchmarks.target_pass.cases import ACCEPTED, Bench, Case, Cycle, fill, steps_of
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import PassBatch
from specla.kernels.gpu.product import product, product_parts
from specla.verifier_service.gpu.buckets import worth_waiting
from specla.verifier_service.gpu.forward import run_rows, sample_rows
from specla.verifier_service.gpu.pass_run import PassKey, PassRun
from specla.verifier_service.gpu.weights import GpuWeights

SNAPSHOTS = f"snapshots, tiles of {COLUMNS[0]}"
OURS, CUBLAS = "products alone", "products alone, cuBLAS"


class SnapshotRun(PassRun):
    """A pass that stores every row's state; nothing is ever pending."""

    def __init__(self, bench: Bench, key: PassKey, arena: Tensor, case: Case) -> None:
        """For a case's key, with an arena of its size."""
        states = bench.store.states
        self._snapshots = torch.empty(
            states.shape[0], key.bucket.rows, *states.shape[2:], dtype=torch.float32, device=states.device
        )
        path = case.topology.path(_deepest_accepted(case))
        self._accepted = torch.tensor(
            [session * case.rows + path[-1] for session in range(case.sessions)],
            dtype=torch.int32,
            device=states.device,
        )
        self._layer = count()
        self._bench, self._case = bench, case
        super().__init__(bench.weights, bench.store, key, arena, bench.entries, bench.pool)

    def _captured(self, pool: Any) -> torch.cuda.CUDAGraph:
        """With sessions in all places: the rival's kernels know no unused ones."""
        pools, worth = self._bench.store.pools.g.shape[2], worth_waiting(serial=self.buffers.serial)
        step = steps_of(self._case.topology, pools, self._bench.weights.config.conv_size, worth)[0]
        fill(self, self._case, step._replace(pending=[], write_state=False), self._bench.weights.config.vocab_size)
        return super()._captured(pool)

    def _launch(self) -> None:
        self.buffers.upload.fetch()
        self._layer = count()
        run_rows(self._weights, self._store, self.buffers, self._verify_snapshot)
        sample_rows(self._weights, self.buffers)
        scatter_accepted(
            self._store.states, self._snapshots, self.buffers.batch.slot[: len(self._accepted)], self._accepted
        )

    def _verify_snapshot(self, rows: LayerRows, states: Tensor, pool: FactorPool, batch: PassBatch, o: Tensor) -> None:
        snapshots, is_tree = self._snapshots[next(self._layer)], self.buffers.bucket.tree_rows > 1
        verify_snapshot(rows, states, snapshots, batch, o, tree=is_tree, columns=COLUMNS[0])


def snapshots_of(bench: Bench, case: Case) -> Cycle:
    """The case with snapshots."""
    key = bench.key(case)
    return Cycle(f"{case.name}, {SNAPSHOTS}", [SnapshotRun(bench, key, bench.arena_of(key), case)])


def products_of(weights: GpuWeights, rows: int, *, ours: bool) -> Graph:
    """All products of a pass of so many rows, in a graph; inputs are what the buffers hold."""
    config, dtype, device = weights.config, weights.dtype, weights.device
    counted = torch.tensor([rows], dtype=torch.int32, device=device)

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(*shape, dtype=of, device=device)

    normed, mixed = empty(rows, config.hidden_size), empty(rows, config.value_dim)
    inputs, activated = empty(rows, weights.layers[0].inputs.shape[0]), empty(rows, config.mlp_dim)
    both, logits = empty(rows, 2 * config.mlp_dim), empty(rows, config.vocab_size, of=torch.float32)
    streams = [
        empty(product_parts(config.hidden_size, width), rows, config.hidden_size, of=torch.float32)
        for width in (config.value_dim, config.mlp_dim)
    ]
    whole, head = empty(rows, config.hidden_size), empty(rows, config.vocab_size)

    def by_ours() -> None:
        for layer in weights.layers:
            product(normed, layer.inputs, inputs, counted, overlap=True)
            product(mixed, layer.output, streams[0], counted, overlap=True)
            product(normed, layer.gate_up, activated, counted, swiglu=True, overlap=True)
            product(activated, layer.down, streams[1], counted, overlap=True)
        product(normed, weights.head, logits, counted, overlap=True)

    def by_cublas() -> None:
        for layer in weights.layers:
            torch.mm(normed, layer.inputs.T, out=inputs)
            torch.mm(mixed, layer.output.T, out=whole)
            torch.mm(normed, layer.gate_up.T, out=both)
            torch.mm(activated, layer.down.T, out=whole)
        torch.mm(normed, weights.head.T, out=head)

    name, run = (OURS, by_ours) if ours else (CUBLAS, by_cublas)
    return Graph.capture(Work(name, 1, run, run))


def bytes_once(weights: GpuWeights, case: Case) -> int:
    """Bytes that a pass must move at least: every weight but the embeddings once, and states read."""
    config = weights.config
    embeddings = 0 if weights.head is weights.embeddings else weights.embeddings.nbytes
    state = 4 * config.num_hidden_layers * config.value_heads * config.head_dim * config.head_v_dim
    return weights.nbytes - embeddings + case.sessions * state


def _deepest_accepted(case: Case) -> int:
    """The row at which an accepted path of ACCEPTED rows ends."""
    depth = min(ACCEPTED, len(case.topology.levels)) - 1
    return case.topology.levels[depth][0]
