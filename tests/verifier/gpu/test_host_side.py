"""The host's side of passes: refilled inputs are those that are laid out anew, walks are taken as pools take paths."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tree_cases import chain, random_tree

from specla.kernels.gpu.adjusting import NO_CHANGES, Changes
from specla.kernels.gpu.factor_pool import _accept_taken
from specla.kernels.gpu.selector import Selector
from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.tree import pack
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.buckets import MOST_PENDING, PENDING
from specla.verifier_service.gpu.host_side import HostSide, _refill, _take_walks
from specla.verifier_service.gpu.pass_run import PassRun
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup
from specla.verifier_service.targets.config import GatedDeltaNetConfig
from specla.verifier_service.targets.weights import load_checkpoint

pytestmark = pytest.mark.any_device

VOCAB = 320


def backend_of(folder: Path) -> GpuBackend:
    config = GatedDeltaNetConfig.from_folder(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = GpuWeights.load(config, load_checkpoint(folder, config).tensors, torch.float32, device)
    return GpuBackend(weights, "exact", Selector.for_device("NVIDIA H200"), slots=4, max_rows=16)


STATES = [SessionSampling(SamplingParams(temperature=0.5 * i, seed=i), VOCAB) for i in range(3)]


@torch.inference_mode()
def test_what_is_refilled_is_what_is_laid_out(tiny_target_of: Callable[..., Path]) -> None:
    backend, rng = backend_of(tiny_target_of(layers=1, hidden=32, heads=1)), random.Random(3)
    pools = backend.store.in_use
    for count in (1, 2, 3):
        trees = [random_tree(rng, rng.randint(2, 12)) for _ in range(count)]
        batch, slots, run = pack(trees), rng.sample(range(4), count), backend.pass_of(trees)
        words, sampled, kept = (
            run.buffers.upload.words(),
            run.buffers.sampled.numpy(),
            Lineup(slots, batch, STATES[:count]),
        )
        for step in range(12):
            tokens, lengths = [rng.randrange(VOCAB) for _ in range(batch.rows)], [40 + step + i for i in range(count)]
            lineup = kept if step % 3 else Lineup(slots, batch, STATES[:count])
            before = pools.words.copy()
            assert run.host.put(lineup, tokens, lengths) is NO_CHANGES
            found, taken = words.copy(), pools.words.copy()
            pools.words[:] = before
            assert HostSide(run.buffers, pools).put(lineup, tokens, lengths) is NO_CHANGES
            np.testing.assert_array_equal(words, found)
            np.testing.assert_array_equal(pools.words, taken)
            run.buffers.batch.stored(pools)

            sampled[: batch.rows] = [rng.choice(tokens) for _ in range(batch.rows)]
            walks = run.host.walks(batch)
            paths = [walks.rows[first:last] for first, last in pairwise(walks.firsts)]
            cut = {index: rng.randint(0, len(path)) for index, path in enumerate(paths) if rng.random() < 0.3}
            before = pools.words.copy()
            run.host.take_walks(cut)
            found = pools.words.copy()
            pools.words[:] = before
            pools.accept(run.host.slots, [path[: cut.get(index, len(path))] for index, path in enumerate(paths)])
            np.testing.assert_array_equal(pools.words, found)


@torch.inference_mode()
def test_only_the_same_sessions_with_the_same_trees_are_refilled(
    tiny_target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, laid_out = backend_of(tiny_target_of(layers=1, hidden=32, heads=1)), list[Lineup]()
    lay_out = HostSide._lay_out

    def counted(host: HostSide, lineup: Lineup, *more: Sequence[int]) -> Changes | None:
        laid_out.append(lineup)
        return lay_out(host, lineup, *more)

    monkeypatch.setattr(HostSide, "_lay_out", counted)
    two, other = pack([chain(2), chain(5)]), pack([chain(5), chain(2)])
    run = backend.pass_of(two.topologies)
    assert backend.pass_of(other.topologies) is run
    lineups = [
        Lineup([0, 1], two, STATES[:2]),
        Lineup([1, 0], two, STATES[:2]),
        Lineup([1, 0], other, STATES[:2]),
        Lineup([1, 0], other, STATES[1:]),
        Lineup([0, 1], two, STATES[:2]),
    ]
    seen = []
    for lineup in lineups:
        for again in (lineup, Lineup(list(lineup.slots), lineup.batch, STATES[STATES.index(lineup.states[0]) :][:2])):
            assert run.host.put(again, range(7), [9, 9]) is NO_CHANGES
            seen.append(run.buffers.upload.words().copy())
    assert laid_out == lineups
    for first, second in pairwise(seen[::2]):
        assert (first != second).any()
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(seen[0], seen[-1])


@torch.inference_mode()
def test_too_much_pending_is_said_before_anything_is_done(tiny_target_of: Callable[..., Path]) -> None:
    """More than there are places for; or so much that the pool has too few rows for a pass as large as there may be."""
    backend = backend_of(tiny_target_of(layers=1, hidden=32, heads=1))
    pools = backend.store.in_use
    for pending, rows, fits in (
        (MOST_PENDING, 16, True),
        (MOST_PENDING + 1, 16, False),
        (MOST_PENDING + 1, 12, True),
        (PENDING, 8, True),
        (PENDING, 9, False),
        (PENDING + 1, 2, False),
    ):
        tree = chain(rows)
        lineup, host = Lineup([0], pack([tree]), STATES[:1]), backend.pass_of([tree]).host
        pools.slots[0].clear()
        assert host.put(lineup, range(rows), [5]) is NO_CHANGES
        pools.slots[0].accept(range(pending), state_written=False)
        in_use = 1 + pools.rows + pools.kept  # words of each pool: what is pending, and the history
        before = pools.words.copy()
        for _ in range(2):
            assert (host.put(lineup, range(rows), [5]) is NO_CHANGES) == fits
            np.testing.assert_array_equal(pools.words[:, :in_use], before[:, :in_use])


@torch.inference_mode()
def test_changes_of_a_launch_that_failed_do_not_stand(
    tiny_target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's bans were put, then its pass did not begin: the next one's logits are its own."""
    backend, root = backend_of(tiny_target_of(layers=1, hidden=32, heads=1)), pack([chain(1)])
    slot = backend.acquire()

    def token(**how: object) -> int:
        states = SessionSampling(SamplingParams(temperature=0.0, **how), VOCAB)  # type: ignore[arg-type]
        return int(backend.run(Lineup([slot], root, [states]), [7], [1]).tokens[0])

    def fail(run: PassRun) -> None:
        raise RuntimeError("out of memory")

    wanted = token()
    assert token(banned_ids=frozenset([wanted])) != wanted
    assert token() == wanted
    with monkeypatch.context() as broken:
        broken.setattr(PassRun, "replay", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            token(banned_ids=frozenset([wanted]))
    assert token() == wanted


def test_compiled_parts_are_compiled_before_a_pass(tiny_target_of: Callable[..., Path]) -> None:
    backend = backend_of(tiny_target_of(layers=1, hidden=32, heads=1))
    assert len(_accept_taken.signatures) == 1
    backend.pass_of([chain(1)])
    assert [len(f.signatures) for f in (_refill, _take_walks)] == [1, 1]
