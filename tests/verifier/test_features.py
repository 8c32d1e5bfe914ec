"""The ring of hidden states against a plain list."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specla.verifier_service.features import FeatureRing, FeatureWindow


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 120),
    st.integers(0, 120),
)
def test_ring_keeps_the_last_positions(window: int, counts: list[tuple[int, bool]], start: int, stop: int) -> None:
    """Of those behind the last ones that were passed over."""
    ring = FeatureRing(FeatureWindow((0, 1), window), hidden_size=3)
    recorded: list[torch.Tensor] = []
    begin = 0
    for count, skipped in counts:
        base = len(recorded)
        states = torch.arange(base, base + count).float()[:, None, None] + torch.tensor([0.0, 0.5])[None, :, None]
        states = states.expand(count, 2, 3)
        if skipped:
            ring.skip(count)
            begin = base + count
        else:
            ring.record([states[:, 0], states[:, 1]])
        recorded += states.unbind(0)
    assert ring.end == len(recorded)
    found = ring.read(start, stop)
    first = max(start, len(recorded) - window, begin)
    wanted = recorded[first : min(stop, len(recorded))]
    assert found.from_position == first
    assert found.values.shape == (len(wanted), 2, 3)
    if wanted:
        assert torch.equal(found.values, torch.stack(wanted))


def test_a_wide_window_takes_memory_only_as_positions_come() -> None:
    ring = FeatureRing(FeatureWindow((0,), 1_000_000_000), hidden_size=8)
    assert ring.nbytes == 0
    for _ in range(100):
        ring.record([torch.ones(1, 8)])
    assert 100 * 32 <= ring.nbytes <= 200 * 32
    assert ring.read(0, 200).values.shape == (100, 1, 8)


def test_a_full_ring_grows_no_more() -> None:
    ring = FeatureRing(FeatureWindow((0,), 5), hidden_size=8)
    for count in (3, 1, 4, 20):
        ring.record([torch.ones(count, 8)])
    assert ring.nbytes == 5 * 32


def test_a_read_is_a_copy() -> None:
    ring = FeatureRing(FeatureWindow((0,), 2), hidden_size=1)
    ring.record([torch.tensor([[1.0], [2.0]])])
    before = ring.read(0, 2).values
    ring.record([torch.tensor([[3.0]])])
    assert before.flatten().tolist() == [1.0, 2.0]
    assert ring.read(0, 3).values.flatten().tolist() == [2.0, 3.0]
