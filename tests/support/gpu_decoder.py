"""One layer decoding texts on the GPU kernels, pass after pass: convolution, verification, acceptance, commit.

A text is given by its tokens' raw inputs. Each pass verifies a tree in which one path holds the text's next tokens and
all other rows random ones, accepts that path, and goes on from there. What comes out must not depend on the trees.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from gpu_layers import POISON, Dims
from torch import Tensor
from tree_cases import random_tree

from specla.kernels.gpu.commit import flush
from specla.kernels.gpu.convolution import ConvolutionParameters, tree_convolution
from specla.kernels.gpu.factor_pool import FactorPool, PoolRows
from specla.kernels.gpu.factorised import verify_factorised
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch, SessionPass
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.topology import Topology


class Inputs(NamedTuple):
    """A layer's projections of some tokens: x [T, D] in the model's dtype, a and b [T, HV] in float32."""

    x: Tensor
    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, dims: Dims, count: int, generator: torch.Generator, device: torch.device) -> "Inputs":
        """Of `count` tokens, with decays from mild to strong."""
        channels = 2 * dims.heads * dims.key_width + dims.value_heads * dims.value_width
        x = torch.randn(count, channels, generator=generator)
        a, b = torch.randn(2, count, dims.value_heads, generator=generator).unbind()
        return cls(x.to(device, dims.dtype), (3 * a - 2).to(device), (2 * b).to(device))


class Plan(NamedTuple):
    """One session's draft in one pass: its tree and the rows, root first, that hold the text's next tokens."""

    topology: Topology
    path: list[int]


class Decoded(NamedTuple):
    """What a decoder made of one text's T tokens."""

    o: Tensor
    """float32 [T, HV, V]."""
    rows: LayerRows
    """Of the T tokens."""


class LaunchBuffers:
    """A layer's tensors of fixed addresses for one bucket, everything that a kernel writes poisoned."""

    def __init__(self, dims: Dims, bucket: Bucket, slots: int, pool_rows: int, device: torch.device) -> None:
        self.dims, self.bucket = dims, bucket
        shape = (dims.heads, dims.value_heads, dims.key_width, dims.value_width)
        self.inputs = Inputs.random(dims, bucket.rows, torch.Generator().manual_seed(5), device)
        generator = torch.Generator().manual_seed(7)  # weights and states are the same for every bucket
        channels = self.inputs.x.shape[1]
        self.parameters = ConvolutionParameters(
            torch.randn(bucket.taps, channels, generator=generator).to(device),
            torch.randn(dims.value_heads, generator=generator).to(device),
            torch.randn(dims.value_heads, generator=generator).to(device),
            True,
        )
        self.state = torch.randn(slots, *shape[1:], generator=generator).to(device)
        self.pool = FactorPool.empty(slots, pool_rows, *shape, dims.dtype, device)
        self.rows = LayerRows.empty(bucket.rows, *shape, dims.dtype, device)
        self.o = torch.empty(bucket.rows, dims.value_heads, dims.value_width, device=device)
        self.batch = PassBatch(bucket, device)
        self.workspace = SerialWorkspace.empty(bucket, *shape[1:], device)
        for tensor in self.written():
            tensor.fill_(POISON if tensor.dtype == torch.float32 else 100.0)

    def written(self) -> list[Tensor]:
        """All that kernels write, but the state."""
        return [*self.pool, *self.rows, self.o]

    def launch(self, kernel: str) -> None:
        """Convolution and verification of what the batch and the inputs hold."""
        tree_convolution(*self.inputs, self.parameters, self.pool, self.batch, self.rows)
        if kernel == "serial":
            verify_serial(self.rows, self.state, self.pool, self.batch, self.o, self.workspace)
        else:
            verify_factorised(self.rows, self.state, self.pool, self.batch, self.o)


class Decoder:
    """Decodes texts side by side, session b in slot 1 + b."""

    def __init__(self, dims: Dims, bucket: Bucket, pool_rows: int, texts: Sequence[Inputs], kernel: str) -> None:
        self.texts, self.kernel = texts, kernel
        self.buffers = LaunchBuffers(dims, bucket, len(texts) + 2, pool_rows, texts[0].x.device)
        self.pools = [PoolRows(pool_rows, bucket.taps) for _ in texts]
        self.lengths = [0] * len(texts)
        self._noise = random.Random(11)
        self._parts: list[list[tuple[Tensor, LayerRows]]] = [[] for _ in texts]

    def step(self, plans: Sequence[Plan | None], writes: Callable[[int, Topology], bool]) -> None:
        """One pass over the sessions that have a plan; `writes(pending, tree)` says whether it stores the state."""
        at, device = 0, self.buffers.state.device
        sessions, placed = [], []
        generator = torch.Generator().manual_seed(self._noise.getrandbits(32))
        for whole, noise in zip(
            self.buffers.inputs,
            Inputs.random(self.buffers.dims, self.buffers.bucket.rows, generator, device),
            strict=True,
        ):
            whole.copy_(noise)
        for b, plan in enumerate(plans):
            if plan is None:
                continue
            pool, n = self.pools[b], len(plan.topology)
            session = SessionPass(
                slot=1 + b,
                topology=plan.topology,
                pool_rows=pool.take(n),
                pending=list(pool.pending),
                history=list(pool.history),
                write_state=writes(len(pool.pending), plan.topology),
            )
            index = torch.tensor(plan.path, device=device) + at
            now = slice(self.lengths[b], self.lengths[b] + len(plan.path))
            for whole, text in zip(self.buffers.inputs, self.texts[b], strict=True):
                whole[index] = text[now]
            sessions.append(session)
            placed.append((b, plan, session, index))
            at += n
        self.buffers.batch.fill(sessions)
        self.buffers.launch(self.kernel)
        for b, plan, session, index in placed:
            self._parts[b].append((self.buffers.o[index], LayerRows(*(x[index] for x in self.buffers.rows))))
            accepted = [session.pool_rows[row] for row in plan.path]
            self.pools[b].accept(accepted, state_written=session.write_state)
            self.lengths[b] += len(plan.path)

    def flush(self) -> Tensor:
        """Applies what is pending and returns all states, [slots, HV, K, V]."""
        device, most = self.buffers.state.device, max([len(p.pending) for p in self.pools] + [1])
        padded = [[*pool.pending, *[0] * (most - len(pool.pending))] for pool in self.pools]
        flush(
            self.buffers.state,
            self.buffers.pool,
            torch.arange(1, len(self.pools) + 1, dtype=torch.int32, device=device),
            torch.tensor(padded, dtype=torch.int32, device=device),
            torch.tensor([len(pool.pending) for pool in self.pools], dtype=torch.int32, device=device),
        )
        for pool in self.pools:
            pool.flushed()
        return self.buffers.state

    def decoded(self) -> list[Decoded]:
        """The outputs and rows of all tokens so far, a text each."""
        made = []
        for parts in self._parts:
            outputs, rows = zip(*parts, strict=True)
            made.append(Decoded(torch.cat(outputs), LayerRows(*(torch.cat(x) for x in zip(*rows, strict=True)))))
        return made


def random_plans(rng: random.Random, passes: int, most_rows: int, most_accepted: int) -> list[Plan]:
    """Random trees of up to `most_rows` rows, each with a path of 1 to `most_accepted` rows."""
    plans = []
    for _ in range(passes):
        topology = random_tree(rng, rng.randint(1, most_rows))
        ends = [row for row in range(len(topology)) if topology.depth[row] < most_accepted]
        # Of two ends the deeper one that has rejected rows before it: theirs are the wrong taps and states.
        end = max(rng.choice(ends), rng.choice(ends), key=lambda row: (row > topology.depth[row], topology.depth[row]))
        plans.append(Plan(topology, topology.path(end)))
    return plans


def every_pass(pending: int, topology: Topology) -> bool:
    """Stores the state in every pass."""
    return True


def when_full(places: int, most_accepted: int) -> Callable[[int, Topology], bool]:
    """Stores the state only when the factors accepted next might not fit `places` pending ones."""

    def writes(pending: int, topology: Topology) -> bool:
        return pending + min(int(topology.depth.max()) + 1, most_accepted) > places

    return writes
