"""The gated delta rule over trees, exact and factorised, against the float64 reference and against serial decoding."""

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from compiled_forms import commit_compiled, verify_compiled
from torch import Tensor
from tree_cases import Rows, chain, random_rows, random_tree, rms_ratio

from specla.kernels import reference
from specla.kernels.commit import Factors, commit_exact
from specla.kernels.factorised import verify_fast
from specla.kernels.gated_delta import verify_exact
from specla.kernels.topology import MAX_ROWS, Topology
from specla.kernels.tree import TreeBatch, pack

SHAPES = [(2, 2, 16, 16), (1, 3, 32, 16), (2, 4, 16, 48), (2, 2, 64, 64), (1, 1, 96, 192)]  # H, HV, K, V
FORMS = [verify_exact, verify_fast, verify_compiled]
ROOT = pack([Topology.root_only()])
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, TreeBatch], tuple[Tensor, Tensor]]
EXACT = [verify_exact, verify_compiled]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_near_reference(form: Verify, rows: Rows, state: Tensor, batch: TreeBatch, tolerance: float = 1e-5) -> None:
    kept = state.clone()
    o, u = form(*rows, state, batch)
    assert torch.equal(state, kept), "verification reads the stored state"
    for b, topology in enumerate(batch.topologies):
        mine = slice(batch.offsets[b], batch.offsets[b + 1])
        qk, v, g, beta = (x[mine] for x in rows)
        expected_o, expected_u = reference.verify_tree(qk[:, 0], qk[:, 1], v, g, beta, state[b], topology.parent_rows)
        assert rms_ratio(o[mine], expected_o) < tolerance
        assert rms_ratio(u[mine], expected_u) < tolerance


def serial(form: Verify, rows: Rows, state: Tensor, batch: TreeBatch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Each row as plain decoding would produce it: one-row passes and one-row commits along its path."""
    outputs: list[Tensor] = []
    factors: list[Tensor] = []
    states: list[Tensor] = []
    for row, parent in enumerate(batch.parents):
        session = int(batch.row_session[row])
        before = state[session : session + 1] if parent < 0 else states[parent]
        one = rows.take([row])
        o, u = form(*one, before, ROOT)
        after = before.clone()
        commit = commit_exact if form is verify_exact else commit_compiled
        commit(after, [0], Factors(one.qk[:, 1], u, one.g), [[0]])
        outputs.append(o)
        factors.append(u)
        states.append(after)
    return torch.cat(outputs), torch.cat(factors), states


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(form: Verify, shape: tuple[int, int, int, int]) -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    HV, K, V = shape[1:]
    for sizes in ([1], [6], [17], [1, 1, 1], [4, 1, 9], [5, 5]):
        batch = pack([random_tree(rng, n) for n in sizes])
        rows = random_rows(generator, batch.rows, *shape)
        assert_near_reference(form, rows, torch.randn(len(sizes), HV, K, V, generator=generator), batch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", [chain(MAX_ROWS), random_tree(random.Random(1), MAX_ROWS)])
def test_the_largest_trees(form: Verify, topology: Topology) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = random_rows(generator, MAX_ROWS, 1, 2, 16, 32)
    assert_near_reference(form, rows, torch.randn(1, 2, 16, 32, generator=generator), pack([topology]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", [0.0, -1e-7, -30.0, -math.inf, "mixed"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_gates(form: Verify, decay: float | str, beta: float) -> None:
    generator = torch.Generator().manual_seed(4)
    batch = pack([random_tree(random.Random(2), 33), chain(20)])
    rows = random_rows(generator, batch.rows, 2, 2, 16, 16)
    if isinstance(decay, str):
        choices = torch.tensor([0.0, -1e-3, -200.0, -math.inf])
        rows.g.copy_(choices[torch.randint(0, 4, rows.g.shape, generator=generator)])
    else:
        rows.g.fill_(decay)
    rows.beta.fill_(beta)
    assert_near_reference(form, rows, torch.randn(2, 2, 16, 16, generator=generator), batch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows_count", [16, 64, MAX_ROWS])
@pytest.mark.parametrize("correlation", [0.5, 1.0])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_correlated_and_equal_keys(form: Verify, rows_count: int, correlation: float, beta: float) -> None:
    """A run of one token gives equal keys, for which a series of powers of the system loses every digit."""
    generator = torch.Generator().manual_seed(5)
    rows = random_rows(generator, rows_count, 1, 1, 64, 32)
    common = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    mixed = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * rows.qk[:, 1]
    rows.qk[:, 1] = torch.nn.functional.normalize(mixed, dim=-1)
    rows.g.fill_(-0.01)
    rows.beta.fill_(beta)
    assert_near_reference(form, rows, torch.randn(1, 1, 64, 32, generator=generator), pack([chain(rows_count)]))


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 3, 48, 80), (8, 8, 64, 64), (2, 4, 128, 128)])
def test_exact_bits_are_those_of_plain_decoding(form: Verify, shape: tuple[int, int, int, int], threads: int) -> None:
    """Any tree, any batch, any place in it: every row is the row that one-token passes would have made."""
    rng, generator = random.Random(sum(shape)), torch.Generator().manual_seed(sum(shape))
    HV, K, V = shape[1:]
    for sizes in ([2], [5], [9], [17], [1] * 8, [1, 4, 1], [6, 6, 6, 6], [12, 1, 3, 7, 2]):
        batch = pack([random_tree(rng, n) for n in sizes])
        rows = random_rows(generator, batch.rows, *shape)
        state = torch.randn(len(sizes), HV, K, V, generator=generator)
        o, u = form(*rows, state, batch)
        serial_o, serial_u, _ = serial(form, rows, state, batch)
        assert torch.equal(o, serial_o)
        assert torch.equal(u, serial_u)


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("sessions", range(1, 9))
def test_exact_bits_do_not_depend_on_the_batch(form: Verify, sessions: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(7)
    topology = Topology.from_wire([-1, -1, 0, 2, 2])
    rows, state = random_rows(generator, 6, 8, 8, 64, 64), torch.randn(1, 8, 64, 64, generator=generator)
    alone = torch.cat(form(*rows, state, pack([topology])), 2)
    others = random_rows(generator, 6 * sessions, 8, 8, 64, 64)
    states = torch.randn(sessions, 8, 64, 64, generator=generator)
    for place in {0, sessions // 2, sessions - 1}:
        for x, mine in zip((*others, states), (*rows, state), strict=True):
            x[place * len(mine) : (place + 1) * len(mine)] = mine
        together = torch.cat(form(*others, states, pack([topology] * sessions)), 2)
        assert torch.equal(together[6 * place : 6 * place + 6], alone)


@pytest.mark.parametrize("form", EXACT)
def test_exact_bits_do_not_depend_on_row_order_or_rejected_rows(form: Verify) -> None:
    """The same path inside every tree of five rows gives the same bits."""
    generator = torch.Generator().manual_seed(8)
    rows, state = random_rows(generator, 5, 2, 2, 32, 32), torch.randn(1, 2, 32, 32, generator=generator)
    seen: dict[tuple[int, ...], Tensor] = {}
    for wire in itertools.product(*(range(-1, i) for i in range(4))):
        topology = Topology.from_wire(wire)
        result = torch.cat(form(*rows, state, pack([topology])), 2)
        for row in range(5):
            expected = seen.setdefault(tuple(topology.path(row)), result[row])
            assert torch.equal(result[row], expected)
    assert len(seen) == 16


@pytest.mark.parametrize("form", FORMS)
def test_a_session_is_not_touched_by_its_neighbours_nan(form: Verify) -> None:
    generator = torch.Generator().manual_seed(9)
    batch = pack([chain(4), random_tree(random.Random(3), 7)])
    rows = random_rows(generator, batch.rows, 2, 2, 16, 16)
    state = torch.randn(2, 2, 16, 16, generator=generator)
    clean = torch.cat(form(*rows, state, batch), 2)
    rows.v[:4] = math.nan
    state[0] = math.nan
    poisoned = torch.cat(form(*rows, state, batch), 2)
    assert torch.equal(poisoned[4:], clean[4:])
    assert bool(poisoned[:4].isnan().all())


@pytest.mark.parametrize("form", FORMS)
def test_strided_inputs(form: Verify) -> None:
    """A pass hands over slices of wider tensors."""
    generator = torch.Generator().manual_seed(10)
    batch = pack([random_tree(random.Random(4), 6)])
    rows, state = random_rows(generator, 6, 2, 2, 16, 16), torch.randn(1, 2, 16, 16, generator=generator)
    wide = torch.cat([x.flatten(1) for x in rows], 1)
    qk, v, g, beta = wide.split_with_sizes([64, 32, 2, 2], 1)
    got = form(qk.unflatten(1, (2, 2, 16)), v.unflatten(1, (2, 16)), g, beta, state, batch)
    assert torch.equal(torch.cat(got, 2), torch.cat(form(*rows, state, batch), 2))


@pytest.mark.parametrize("form", FORMS)
def test_shapes_that_do_not_fit_are_refused(form: Verify) -> None:
    generator = torch.Generator().manual_seed(11)
    rows = random_rows(generator, 3, 2, 2, 16, 16)
    state = torch.zeros(1, 2, 16, 16)
    with pytest.raises(ValueError, match="do not fit 4 rows of 1 sessions"):
        form(*rows, state, pack([chain(4)]))
    with pytest.raises(ValueError, match="do not fit"):
        form(*rows, state.expand(2, -1, -1, -1), pack([chain(3)]))
    with pytest.raises(ValueError, match="HV a multiple of H"):
        form(rows.qk.repeat(1, 1, 2, 1)[:, :, :3], *rows[1:], state, pack([chain(3)]))
