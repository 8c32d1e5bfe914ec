"""Passes on the GPU's kernels against the same passes as PyTorch operations: logits, factors, committed states."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from tree_cases import chain, random_tree

from specla.benchmarks.target_pass.model import RandomTensors
from specla.kernels.gpu.adjusting import LogitEntries
from specla.kernels.gpu.between_mixers import DenseRow, DenseWeights, MeetingPlace
from specla.kernels.gpu.factorised import factorised_tile
from specla.kernels.gpu.pass_batch import Bucket, SessionPass
from specla.kernels.gpu.selector import Choice, Mode, Selector
from specla.kernels.sampling import RowSampling, SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.gpu import forward
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.buffers import PassBuffers
from specla.verifier_service.gpu.forward import run_rows, sample_rows, verify_of
from specla.verifier_service.gpu.store import GpuStore
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.state import StateStore
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.gated_deltanet import prepare
from specla.verifier_service.targets.torch_pass import torch_tree_pass
from specla.verifier_service.targets.weights import load_checkpoint

SLOTS, MOST_PENDING = 3, 16
pytestmark = pytest.mark.any_device

WIDE = GatedDeltaNetConfig(
    vocab_size=640,
    hidden_size=512,
    num_hidden_layers=4,
    num_heads=4,
    head_dim=128,
    expand_v=1.0,
    intermediate_size=1024,
)
NARROW_HEADS = replace(WIDE, num_heads=8, head_dim=64)
EXACT, FAST = Choice("serial", 2), Choice("factorised", tile=factorised_tile(16))


class Pair:
    """The same sessions on both sides."""

    def __init__(self, folder: Path, choice: Choice, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        config = GatedDeltaNetConfig.from_folder(folder)
        tensors = load_checkpoint(folder, config).tensors
        self.config, self.choice = config, choice
        self.reference = prepare(config, {k: v.to(dtype).float() for k, v in tensors.items()}, "fast", "torch")
        self.states = StateStore(config, SLOTS)
        self.weights = GpuWeights.load(config, tensors, dtype, device)
        self.store = GpuStore(config, SLOTS, 16, MOST_PENDING, dtype, device)
        bucket = Bucket(
            sessions=SLOTS, rows=20, tree_rows=9, pending=MOST_PENDING, taps=config.conv_size, groups=choice.groups
        )
        layers = range(config.num_hidden_layers)
        nbytes = PassBuffers.nbytes(config, dtype, bucket, layers=len(layers))
        arena = torch.full((nbytes,), 0x7F, dtype=torch.uint8, device=device)
        entries = LogitEntries(64, config.vocab_size, 64, device)
        self.buffers = PassBuffers(config, dtype, bucket, arena, entries, layers=layers)
        self.verify = verify_of(choice, self.buffers)

    def run(self, slots: Sequence[int], trees: Sequence[Topology], tokens: list[int], *, write: bool = True):
        """One pass: what the reference gives, what the kernels give, and the pool rows of every session."""
        batch = pack(trees)
        wanted = torch_tree_pass(
            self.reference,
            torch.tensor(tokens),
            batch,
            self.states.recurrent_state,
            self.states.conv_state,
            list(slots),
        )
        pool_rows, sessions = [], []
        for slot, tree in zip(slots, trees, strict=True):
            rows = self.store.rows[slot]
            pool_rows.append(rows.take(len(tree)))
            sessions.append(
                SessionPass(
                    slot=slot,
                    topology=tree,
                    pool_rows=pool_rows[-1],
                    pending=rows.pending,
                    history=rows.history,
                    write_state=write,
                )
            )
        buffers, vocab = self.buffers, self.config.vocab_size
        buffers.batch.fill(sessions)
        buffers.put_tokens(tokens)
        sampling = RowSampling(
            sessions=[SessionSampling(SamplingParams(temperature=0.0), vocab) for _ in slots],
            row_session=[i for i, tree in enumerate(trees) for _ in range(len(tree))],
            positions=[7 + depth for depth in batch.depths],
            parent_row=batch.parents,
            row_tokens=tokens,
        )
        buffers.entries.put(buffers.put_sampling(sampling))
        buffers.upload.send()
        run_rows(self.weights, self.store, buffers, self.verify)
        sample_rows(self.weights, buffers)
        return wanted, pool_rows

    def accept(self, slots, wanted, trees, paths, pool_rows, *, write: bool = True) -> None:
        """These rows of each session's tree, root first, become text."""
        offsets = pack(trees).offsets
        rows = [[offset + row for row in path] for offset, path in zip(offsets, paths, strict=False)]
        wanted.factors.apply(self.states.recurrent_state, self.states.conv_state, list(slots), rows)
        for slot, path, pool in zip(slots, paths, pool_rows, strict=True):
            self.store.rows[slot].accept([pool[row] for row in path], state_written=write)


def rel(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().float() - wanted).abs().max() / wanted.abs().max())


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(pair: Pair, tolerance: float) -> None:
    """Three passes of two or three sessions, drafts accepted in part, states written in the first and last."""
    rng = random.Random(0)
    plan = [((2, 0), True), ((0, 1, 2), False), ((2, 0), True)]
    for slots, write in plan:
        trees = [random_tree(rng, rng.randint(2, 7)) for _ in slots]
        trees[0] = chain(4)
        tokens = [rng.randrange(pair.config.vocab_size) for tree in trees for _ in range(len(tree))]
        wanted, pool_rows = pair.run(slots, trees, tokens, write=write)
        assert wanted.logits is not None
        count, buffers, x = len(tokens), pair.buffers, pair.buffers.activations
        assert rel(x.logits[:count], wanted.logits) < tolerance
        assert rel(x.final[:count], wanted.hidden[-1]) < tolerance
        for layer, hidden in enumerate(wanted.hidden[:-1]):
            assert rel(x.hidden[layer, :count], hidden) < tolerance
        assert torch.equal(buffers.sampled[:count].cpu().long(), x.logits[:count].argmax(1).cpu())
        assert not buffers.errors[:count].any()
        paths = [[0, *([1] if len(tree) > 1 and tree.parent_rows[1] == 0 else [])] for tree in trees]
        pair.accept(slots, wanted, trees, paths, pool_rows, write=write)
    pair.store.write_states([0, 1, 2])
    for slot in range(SLOTS):
        assert not pair.store.rows[slot].pending
        assert rel(pair.store.states[:, slot], pair.states.recurrent_state[slot]) < tolerance


@pytest.mark.parametrize("choice", [EXACT, FAST], ids=["exact", "fast"])
def test_passes_give_what_pytorch_gives(tiny_target: Path, device: torch.device, choice: Choice) -> None:
    check(Pair(tiny_target, choice, device), 2e-4)


def test_grouped_values_and_an_own_head(tiny_target_of: Callable[..., Path], device: torch.device) -> None:
    check(Pair(tiny_target_of(v_heads=4, tied=False, gate=False, neg_eigval=True), EXACT, device), 2e-4)


def test_slots_are_taken_in_order_and_cleared(tiny_target: Path, device: torch.device) -> None:
    store = Pair(tiny_target, EXACT, device).store
    assert [store.acquire(), store.acquire()] == [0, 1]
    store.states[:, 0] = 1.0
    store.release(0)
    assert store.free_slots == SLOTS - 1
    assert store.acquire() == 0
    assert not store.states[:, 0].any()
    store.acquire()
    with pytest.raises(Exception, match="all slots are taken"):
        store.acquire()


@pytest.mark.gpu
@torch.inference_mode()
def test_kernels_that_begin_early_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast passes of 16 rows, in which all products of a layer let the next kernel in at once, and the same without."""
    weights = GpuWeights.load(WIDE, RandomTensors(WIDE, "cuda"), torch.bfloat16, "cuda")
    early = texts_logits(weights, [16, 9, 13, 16, 12, 16])
    waiting = forward._ProductAdmits("waited", "waited", "waited", "waited")
    monkeypatch.setattr(forward._ProductAdmits, "of", lambda buffers: waiting)
    late = texts_logits(weights, [16, 9, 13, 16, 12, 16])
    assert torch.isfinite(late).all()
    assert torch.equal(early, late)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_one_launch_between_mixers_changes_no_bits(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """Plain decoding, with all layers' streams kept, and the same in separate launches."""
    weights = GpuWeights.load(NARROW_HEADS, RandomTensors(NARROW_HEADS, "cuda"), torch.bfloat16, "cuda")
    used: list[MeetingPlace] = []
    real = forward.between_mixers

    def counted(row: DenseRow, dense: DenseWeights, eps: float, rows: Tensor, place: MeetingPlace, **how: bool) -> None:
        used.append(place)
        real(row, dense, eps, rows, place, **how)

    monkeypatch.setattr(forward, "between_mixers", counted)
    together = decoded(weights, mode)
    assert used
    used.clear()
    monkeypatch.setattr(forward, "_meeting", lambda *_: None)
    apart = decoded(weights, mode)
    assert not used
    assert all(torch.isfinite(x).all() for x in apart)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def decoded(weights: GpuWeights, mode: Mode) -> list[torch.Tensor]:
    """Logits and streams of every token, the states in the end."""
    backend = GpuBackend(weights, mode, Selector.for_device("NVIDIA H200"), slots=2, max_rows=4)
    greedy = SessionSampling(SamplingParams(temperature=0.0), weights.config.vocab_size)
    slot, token, found, layers = backend.acquire(), 7, [], tuple(range(weights.config.num_hidden_layers))
    lineup = Lineup([slot], pack([Topology.root_only()]), [greedy], layers)
    for position in range(20):
        out = backend.run(lineup, [token], [position])
        found += [torch.from_numpy(out.logits(0).copy())]
        found += [out.hidden(layer, [0]) for layer in layers]
        out.take(0, [0])
        token = int(found[-1 - len(layers)].argmax())
    backend.store.write_states([slot])
    return [*found, backend.store.states[:, slot].cpu()]


def texts_logits(weights: GpuWeights, sizes: Sequence[int]) -> torch.Tensor:
    """Of random trees, one after the other, from each of which a path is accepted."""
    rng, found, vocab = random.Random(1), [], weights.config.vocab_size
    backend = GpuBackend(weights, "fast", Selector.for_device("NVIDIA H200"), slots=1, max_rows=16)
    slot, greedy = backend.acquire(), SessionSampling(SamplingParams(temperature=0.0), vocab)
    for size in sizes:
        batch = pack([random_tree(rng, size)])
        tokens = [rng.randrange(vocab) for _ in range(size)]
        out = backend.run(Lineup([slot], batch, [greedy]), tokens, [0])
        found += [torch.from_numpy(out.logits(row).copy()) for row in range(size)]
        out.take(0, [0, 1])  # the first row's first child
    return torch.stack(found)
