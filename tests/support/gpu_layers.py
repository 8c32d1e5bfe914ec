"""One layer of several sessions, as the GPU kernels see it, with everything that must not be touched poisoned."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specla.benchmarks.kernels.reference64 import commit64, verify64
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.topology import Topology

POISON = 1e30


@dataclass(frozen=True)
class Dims:
    """Sizes of a layer, and the dtype of q, k and v."""

    heads: int
    value_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype = torch.float32


@dataclass
class Layer:
    """Inputs of one pass on a device; `expected` computes in float64 what it must do."""

    dims: Dims
    sessions: list[SessionPass]
    batch: PassBatch
    rows: LayerRows
    state: Tensor
    pool: FactorPool
    o: Tensor
    unused: list[int] = field(default_factory=list)

    def clone(self) -> "Layer":
        """The same inputs in memory of their own."""
        pool = FactorPool(*(x.clone() for x in self.pool))
        return replace(self, state=self.state.clone(), pool=pool, o=self.o.clone())

    def first_row(self, b: int) -> int:
        return sum(len(s.topology) for s in self.sessions[:b])


def make_layer(
    dims: Dims,
    topologies: Sequence[Topology],
    device: torch.device,
    *,
    pending: Sequence[int] | int = 0,
    bucket: Bucket | None = None,
    spare_sessions: int = 1,
    spare_rows: int = 3,
    groups: int = 1,
    write_state: Sequence[bool] | bool = True,
    seed: int = 0,
    gates: str = "mixed",
    betas: str = "any",
    equal_keys: bool = False,
    out_dtype: torch.dtype = torch.float32,
) -> Layer:
    """Random sessions in random slots, `pending` factors each, with unused places behind them.

    Without a `bucket`, one that just holds them and the spare places. `betas` are "any" from 0 to 2, or its "ends".
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [pending] * len(topologies) if isinstance(pending, int) else list(pending)
    writes = [write_state] * len(topologies) if isinstance(write_state, bool) else list(write_state)
    if bucket is None:
        places = len(topologies) + spare_sessions
        bucket = Bucket(
            sessions=places,
            rows=max(sum(map(len, topologies)) + spare_rows, places),
            tree_rows=max(map(len, topologies)),
            pending=max([*lengths, 1]),
            groups=groups,
        )
    slots, R = bucket.sessions + 1, bucket.rows
    F = bucket.tree_rows + bucket.pending + bucket.taps - 1
    H, HV, K, V = dims.heads, dims.value_heads, dims.key_width, dims.value_width
    sessions = []
    for slot, topology, length, writes_state in zip(
        rng.sample(range(slots), len(topologies)), topologies, lengths, writes, strict=True
    ):
        pool_rows = rng.sample(range(F), len(topology) + length)
        sessions.append(
            SessionPass(
                slot=slot,
                topology=topology,
                pool_rows=pool_rows[length:],
                pending=pool_rows[:length],
                write_state=writes_state,
            )
        )
    batch = PassBatch(bucket, device)
    batch.fill(sessions)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = torch.nn.functional.normalize(normal(R, H, K), dim=-1) * K**-0.5
    k = torch.nn.functional.normalize(normal(R, H, K), dim=-1)
    if equal_keys:
        k = k[:1].repeat(R, 1, 1)
    g, beta = log_decays(gates, generator, R, HV), 2 * torch.rand(R, HV, generator=generator)
    if betas == "ends":
        beta = 2 * beta.round().clamp(max=1)
    pool = FactorPool(
        torch.nn.functional.normalize(normal(slots, F, H, K), dim=-1).to(dims.dtype),
        torch.full((slots, F, HV, V), POISON),
        log_decays(gates, generator, slots, F, HV),
        torch.full((slots, F, 2 * H * K + HV * V), 7.0, dtype=dims.dtype),
    )
    for session in sessions:
        for row in session.pending:
            pool.u[session.slot, row] = normal(HV, V)
    rows = LayerRows(q.to(dims.dtype), k.to(dims.dtype), normal(R, HV, V).to(dims.dtype), g, beta)
    used = sum(map(len, topologies))
    for x in rows:
        x[used:] = float("nan")
    for session, first in zip(sessions, _starts(topologies), strict=True):
        for i, row in enumerate(session.pool_rows):
            pool.k[session.slot, row] = rows.k[first + i]
            pool.g[session.slot, row] = rows.g[first + i]
    return Layer(
        dims,
        sessions,
        batch,
        LayerRows(*(x.to(device).contiguous() for x in rows)),
        normal(slots, HV, K, V).to(device),
        FactorPool(*(x.to(device) for x in pool)),
        torch.full((R, HV, V), min(POISON, torch.finfo(out_dtype).max), dtype=out_dtype, device=device),
        sorted(set(range(slots)) - {s.slot for s in sessions}),
    )


def log_decays(kind: str, generator: torch.Generator, *shape: int) -> Tensor:
    """float32 log decays: "mild", mild to strong ("mixed"), 0, tiny, strong or -inf ("extreme"), 0 or -inf ("ends")."""
    if kind in ("extreme", "ends"):
        choices = torch.tensor([0.0, float("-inf")] + ([-1e-7, -30.0, -200.0] if kind == "extreme" else []))
        return choices[torch.randint(0, len(choices), shape, generator=generator)]
    if kind == "mild":
        return -0.1 * torch.rand(shape, generator=generator)
    return -torch.exp(4 * torch.randn(shape, generator=generator) - 2)


def expected(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """o and u of the used rows [rows, HV, V] and all states after the pass, in float64 on the layer's device."""
    state, pool, slots = layer.state.double(), layer.pool, [s.slot for s in layer.sessions]
    before = state[slots].clone()
    for b, session in enumerate(layer.sessions):
        path = list(session.pending)
        factors = (x[session.slot, path][None] for x in (pool.k, pool.u, pool.g))
        before[b] = commit64(before[b][None], *factors)[0]
        if session.write_state and path:
            state[session.slot] = before[b]
    o, u = verify64(layer.rows, before, [s.topology for s in layer.sessions])
    return o, u, state


def written_factors(layer: Layer) -> Tensor:
    """u of the used rows [rows, HV, V], read from the pool."""
    used = [layer.pool.u[s.slot, list(s.pool_rows)] for s in layer.sessions]
    return torch.cat(used) if used else layer.pool.u.new_empty(0, *layer.pool.u.shape[2:])


def assert_nothing_else_touched(before: Layer, after: Layer) -> None:
    """Other slots, other pool rows, unused rows, and the pool's k, g and x are as they were, bit for bit."""
    used = sum(len(s.topology) for s in before.sessions)
    assert torch.equal(after.o[used:], before.o[used:])
    assert torch.equal(after.state[before.unused], before.state[before.unused])
    kept = before.pool.u.clone()
    for session in before.sessions:
        kept[session.slot, list(session.pool_rows)] = after.pool.u[session.slot, list(session.pool_rows)]
    assert torch.equal(after.pool.u, kept)
    for name in ("k", "g", "x"):
        assert torch.equal(getattr(after.pool, name), getattr(before.pool, name))


def _starts(topologies: Sequence[Topology]) -> list[int]:
    starts, at = [], 0
    for topology in topologies:
        starts.append(at)
        at += len(topology)
    return starts
