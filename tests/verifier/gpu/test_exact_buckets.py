"""Exact mode on a GPU: a text's logits have the same bits in every bucket, alone and beside others, drafted or not."""

import random
from collections.abc import Sequence

import pytest
import torch
from tree_cases import random_tree

from specla.benchmarks.target_pass.model import RandomTensors
from specla.kernels.gpu.selector import Selector
from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.backend import Chunk
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.targets.config import GatedDeltaNetConfig

pytestmark = pytest.mark.gpu

CONFIG = GatedDeltaNetConfig(
    vocab_size=640, hidden_size=256, num_hidden_layers=2, num_heads=2, head_dim=128, expand_v=1.0, intermediate_size=512
)
SLOTS, MOST_ROWS = 20, 65
TEXT = [(37 * i + 11) % CONFIG.vocab_size for i in range(70)]
GREEDY = SessionSampling(SamplingParams(temperature=0.0), CONFIG.vocab_size)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def weights(request: pytest.FixtureRequest) -> GpuWeights:
    return GpuWeights.load(CONFIG, RandomTensors(CONFIG, "cuda"), request.param, "cuda")


def run_text(
    weights: GpuWeights, sizes: Sequence[int], company: int, seed: int, *, own_bucket: bool = True
) -> torch.Tensor:
    """Logits of TEXT in passes of these sizes, each size a path in a random tree, beside random trees of others; each
    pass in its own bucket, or in what was made for others where that will do."""
    selector = Selector.for_device("NVIDIA H200")
    backend = GpuBackend(weights, "exact", selector, slots=SLOTS, max_rows=MOST_ROWS, max_batch_rows=512)
    rng, found, at = random.Random(seed), [], 0
    own, others = backend.acquire(), [backend.acquire() for _ in range(company)]
    for size in sizes:
        tree, path, tokens = with_path(rng, TEXT[at : at + size])
        trees = [random_tree(rng, rng.randint(1, 20)) for _ in others]
        place = rng.randint(0, company)
        batch = pack([*trees[:place], tree, *trees[place:]])
        slots = [*others[:place], own, *others[place:]]
        row_tokens = [rng.randrange(CONFIG.vocab_size) for _ in range(batch.rows)]
        first = batch.offsets[place]
        row_tokens[first : first + len(tree)] = tokens
        if own_bucket:
            backend.pass_of(batch.topologies)
        out = backend.run(Lineup(slots, batch, [GREEDY] * len(slots)), row_tokens, [0] * len(slots))
        found += [torch.from_numpy(out.logits(first + row)) for row in path]
        for index in range(batch.sessions):
            out.take(index, path if index == place else [0])
        at += size
    return torch.stack(found)


def with_path(rng: random.Random, text: Sequence[int]) -> tuple[Topology, list[int], list[int]]:
    """A tree in which a path holds `text`, among other branches: the tree, the path's rows, all rows' tokens."""
    room = min(MOST_ROWS - len(text), rng.choice([0, 0, 3, 12]))
    parents, path, tokens = [-1], [0], [text[0]]
    pending = list(text[1:])
    while pending or room:
        if pending and (not room or rng.random() < 0.6):
            parents.append(path[-1])
            path.append(len(parents) - 1)
            tokens.append(pending.pop(0))
        else:
            parents.append(rng.randrange(len(parents)))
            tokens.append(rng.randrange(CONFIG.vocab_size))
            room -= 1
    return Topology.from_wire([p - 1 for p in parents[1:]]), path, tokens


@torch.inference_mode()
def test_one_text_in_all_buckets(weights: GpuWeights) -> None:
    alone = run_text(weights, [1] * len(TEXT), 0, 0)
    assert torch.isfinite(alone).all()
    ways = [([16, 16, 16, 16, 6], 0), ([33, 37], 0), ([65, 5], 0), ([1, 2, 3, 5, 8, 13, 21, 17], 3), ([7] * 10, 16)]
    for seed, (sizes, company) in enumerate(ways, 1):
        assert sum(sizes) == len(TEXT)
        assert torch.equal(run_text(weights, sizes, company, seed), alone), (sizes, company)
        elsewhere = run_text(weights, sizes, company, seed, own_bucket=False)
        assert torch.equal(elsewhere, alone), (sizes, company, "in other buckets")


@torch.inference_mode()
def test_chunks_do_not_depend_on_what_runs_between_or_beside(weights: GpuWeights) -> None:
    """A prompt's chunks, alone, with passes and chunks of others between them, and with chunks of others in the same
    launches where that is allowed; streams kept or not."""
    found = []
    for company, layers in ((False, ()), (True, ()), (False, (-1, 0)), (True, (0,))):
        backend = GpuBackend(
            weights, "exact", Selector.for_device("NVIDIA H200"), slots=4, max_rows=16, prefill_chunk=512
        )
        if company:
            for tokens in backend.usual_chunks():
                backend.prepare_chunk(tokens)
        own, other, third, fourth = (backend.acquire() for _ in range(4))
        one = pack([Topology.root_only()])
        streams = []
        for i, tokens in enumerate((512, 91, 292, 17)):
            parts = [Chunk(own, [(j * j + i) % 640 for j in range(tokens)], layers)]
            if company:
                out = backend.run(Lineup([other], one, [GREEDY]), [5], [0])
                out.take(0, [0])
                parts.append(Chunk(third, [(3 * j) % 640 for j in range(17 + 79 * i)], ()))
                parts.insert(0, Chunk(fourth, [3] * (5 + i), (-1,)))
            together = backend.goes_together([len(part.tokens) for part in parts])
            found_here = [backend.run_chunks(group).wait() for group in ([parts] if together else [[x] for x in parts])]
            streams += [x for group in found_here for x in group][int(company)]
        out = backend.run(Lineup([own], one, [GREEDY]), [5], [0])
        state, kept = backend.store.states[:, own].clone(), streams[len(layers) - 1 :: len(layers)] if layers else []
        found.append((torch.from_numpy(out.logits(0)), state, *kept))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=False))
    assert len(found[2]) == len(found[3]) == 6
    assert all(torch.equal(a, b) for a, b in zip(found[2], found[3], strict=True))
