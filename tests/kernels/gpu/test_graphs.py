"""One captured CUDA graph serves every pass that fits its bucket: the same bits as direct launches."""

import random
from collections.abc import Sequence

import pytest
import torch
from gpu_decoder import Inputs, LaunchBuffers
from gpu_layers import POISON, Dims, log_decays
from torch.nn.functional import normalize
from tree_cases import chain, random_tree

from specla.kernels.gpu.pass_batch import ZEROS, Bucket, SessionPass
from specla.kernels.topology import Topology

BIG = Bucket(sessions=6, rows=420, tree_rows=129, pending=20, groups=4)
POOL_ROWS = BIG.tree_rows + BIG.pending + BIG.taps - 1
SLOTS = BIG.sessions + 2


def sessions_of(seed: int, sizes: Sequence[int]) -> list[SessionPass]:
    """Random trees, slots, pending factors and histories."""
    rng = random.Random(seed)
    made = []
    for slot, size in zip(rng.sample(range(SLOTS), len(sizes)), sizes, strict=True):
        pending = rng.choice([0, 1, 5, 16, 20])
        order = rng.sample(range(POOL_ROWS), POOL_ROWS)
        history = [*[ZEROS] * 3, *order[size : size + pending]][-3:] if rng.random() < 0.7 else []
        made.append(
            SessionPass(
                slot=slot,
                topology=chain(size) if rng.random() < 0.2 else random_tree(rng, size),
                pool_rows=order[:size],
                pending=order[size : size + pending],
                history=history,
                write_state=rng.random() < 0.7,
            )
        )
    return made


def load(buffers: LaunchBuffers, sessions: Sequence[SessionPass], seed: int) -> None:
    """The same contents for a seed, in place; what kernels write into the pass's tensors is poisoned."""
    generator, device = torch.Generator().manual_seed(seed), buffers.state.device
    for whole, part in zip(buffers.inputs, Inputs.random(buffers.dims, BIG.rows, generator, device), strict=True):
        whole.copy_(part)
    pool = buffers.pool
    pool.k.copy_(normalize(torch.randn(pool.k.shape, generator=generator), dim=-1))
    pool.u.copy_(torch.randn(pool.u.shape, generator=generator))
    pool.g.copy_(log_decays("mixed", generator, *pool.g.shape))
    pool.x.copy_(torch.randn(pool.x.shape, generator=generator))
    buffers.state.copy_(torch.randn(buffers.state.shape, generator=generator))
    for tensor in (*buffers.rows, buffers.o):
        tensor.fill_(POISON)
    buffers.batch.fill(sessions)


def check_untouched(buffers: LaunchBuffers, sessions: Sequence[SessionPass], before: Sequence[torch.Tensor]) -> None:
    used = sum(len(s.topology) for s in sessions)
    for tensor in (*buffers.rows, buffers.o):
        assert bool((tensor[used:] == torch.tensor(POISON, dtype=tensor.dtype)).all())
    slots = {s.slot: s for s in sessions}
    for slot in range(SLOTS):
        session = slots.get(slot)
        if session is None or not (session.write_state and session.pending):
            assert torch.equal(buffers.state[slot], before[0][slot])
        kept = sorted(set(range(POOL_ROWS)) - set(session.pool_rows if session else []))
        for now, was in zip(buffers.pool, before[1:], strict=True):
            assert torch.equal(now[slot, kept], was[slot, kept])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["serial", "factorised"])
@pytest.mark.parametrize(
    "dims", [Dims(2, 4, 128, 128, torch.bfloat16), Dims(2, 2, 256, 256, torch.bfloat16)], ids=lambda d: str(d.key_width)
)
def test_a_graph_serves_any_pass_of_its_bucket(device: torch.device, dims: Dims, kernel: str) -> None:
    captured, direct = (LaunchBuffers(dims, BIG, SLOTS, POOL_ROWS, device) for _ in range(2))
    load(captured, sessions_of(0, [5, 1]), 0)
    captured.launch(kernel)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.launch(kernel)
    fillings = [[129, 17, 64, 1, 100, 109], [3, 2], [], [1], [40, 128, 65], [1] * 6, [], [129, 17, 64, 1, 100, 109]]
    for seed, sizes in enumerate(fillings, start=1):
        sessions = sessions_of(seed, sizes)
        load(captured, sessions, seed)
        load(direct, sessions, seed)
        before = [x.clone() for x in (direct.state, *direct.pool)]
        graph.replay()
        direct.launch(kernel)
        for replayed, launched in zip(
            (captured.state, *captured.written()), (direct.state, *direct.written()), strict=True
        ):
            assert torch.equal(replayed, launched), sizes
        check_untouched(direct, sessions, before)
        if sizes:
            assert not torch.equal(captured.pool.u, before[2])
        else:
            assert all(torch.equal(now, was) for now, was in zip((captured.state, *captured.pool), before, strict=True))


def test_the_contents_of_a_pass_are_repeatable() -> None:
    """What the graph test compares is the same for a seed and other for another."""
    first, again, other = sessions_of(3, [4, 9]), sessions_of(3, [4, 9]), sessions_of(4, [4, 9])
    assert first == again != other
    assert all(isinstance(s.topology, Topology) for s in first)
