"""The convolution over ancestors in Triton: against the float64 reference, and its promises about single rows."""

import pytest
import torch

from specla.kernels import reference
from specla.kernels.gpu import convolution
from specla.kernels.gpu.convolution import ConvolutionParameters, tree_convolution
from specla.kernels.gpu.factor_pool import FactorPool
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import ZEROS, Bucket, PassBatch, SessionPass
from specla.kernels.topology import Topology

POISON = 7777.0
POOL_ROWS = 24
TOLERANCE = {torch.float32: 4e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}  # of a rounding to the dtype, and a bit


class Layer:
    """Random weights of one layer, a poisoned pool and everything a pass needs, in a given shape."""

    def __init__(self, heads, value_heads, key_width, value_width, taps, dtype, device, *, slots=4, negative=False):
        self.shape = (heads, value_heads, key_width, value_width)
        self.taps, self.dtype, self.device, self.negative = taps, dtype, device, negative
        self.channels = 2 * heads * key_width + value_heads * value_width
        self.generator = torch.Generator().manual_seed(heads * 1000 + value_width)
        self.parameters = ConvolutionParameters(
            self.random(taps, self.channels), self.random(value_heads), self.random(value_heads) * 3, negative
        )
        self.slots = slots

    def random(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def poisoned_pool(self):
        pool = FactorPool.empty(self.slots, POOL_ROWS, *self.shape, self.dtype, self.device)
        for tensor in pool:
            tensor.fill_(POISON)
        return pool

    def poisoned_rows(self, rows):
        out = LayerRows.empty(rows, *self.shape, self.dtype, self.device)
        for tensor in out:
            tensor.fill_(POISON)
        return out

    def run(self, bucket, sessions, x, a, b, pool):
        """Rows of a pass, and the pool after it."""
        batch = PassBatch(bucket, self.device)
        batch.fill(sessions)
        out = self.poisoned_rows(bucket.rows)
        tree_convolution(x, a, b, self.parameters, pool, batch, out)
        return out

    def wanted(self, x, a, b, window, parents):
        """q, k, v, g and beta of one session's rows by the reference, from its window of raw inputs."""
        heads, value_heads, key_width, value_width = self.shape
        p, n = self.parameters, len(x)
        y = reference.convolution(x.cpu(), window.cpu(), p.weight.cpu(), parents)
        q, k, v = y.split([heads * key_width, heads * key_width, value_heads * value_width], 1)
        q = reference.l2_normalise(q.view(n, heads, key_width), key_width**-0.5)
        k = reference.l2_normalise(k.view(n, heads, key_width))
        gates = reference.gates(a.cpu(), b.cpu(), p.a_log.cpu(), p.dt_bias.cpu(), self.negative)
        return LayerRows(q, k, v.view(n, value_heads, value_width), *gates)


def close(got, want, tolerance):
    got = got.double().cpu()
    torch.testing.assert_close(got, want.reshape(got.shape), rtol=tolerance, atol=max(tolerance * 1e-2, 5e-7))


def window_of(layer, pool, session):
    """float [W - 1, D], what a session's history names."""
    rows = [
        torch.zeros(layer.channels) if r == ZEROS else pool.x[session.slot, r].float().cpu()
        for r in history(session, layer)
    ]
    return torch.stack(rows) if rows else torch.zeros(0, layer.channels)


def history(session, layer):
    return session.history or [ZEROS] * (layer.taps - 1)


def check_pass(layer, bucket, sessions):
    """One pass against the reference; nothing else is touched."""
    pool = layer.poisoned_pool()
    for session in sessions:
        for row in history(session, layer):
            if row != ZEROS:
                pool.x[session.slot, row] = layer.random(layer.channels, dtype=layer.dtype)
    rows, value_heads = bucket.rows, layer.shape[1]
    used = sum(len(s.topology) for s in sessions)
    x = layer.random(rows, layer.channels, dtype=layer.dtype)
    a, b = (
        layer.random(rows, value_heads, dtype=layer.dtype) * 4,
        layer.random(rows, value_heads, dtype=layer.dtype) * 4,
    )
    x[used:], a[used:], b[used:] = float("nan"), float("nan"), float("nan")
    before = FactorPool(*(tensor.clone() for tensor in pool))
    out = layer.run(bucket, sessions, x, a, b, pool)
    at, tolerance = 0, TOLERANCE[layer.dtype]
    for session in sessions:
        n = len(session.topology)
        own = slice(at, at + n)
        want = layer.wanted(x[own], a[own], b[own], window_of(layer, before, session), session.topology.parent_rows)
        for name in ("q", "k", "v"):
            close(getattr(out, name)[own], getattr(want, name), tolerance)
        close(out.g[own], want.g, 1e-5)
        close(out.beta[own], want.beta, 1e-5)
        for tensor, rows_of in ((before.k, out.k), (before.g, out.g), (before.x, x)):
            tensor[session.slot, list(session.pool_rows)] = rows_of[own]
        at += n
    for name, got in pool._asdict().items():
        assert torch.equal(got, getattr(before, name)), f"pool.{name} differs beyond its rows, or was not filled"
    for name, got in out._asdict().items():
        assert bool((got[used:] == POISON).all()), f"padding rows of {name} were written"


def tree(generator, rows):
    """A random tree, often deep."""
    parents = [int(torch.randint(max(-1, i - 3), i, (), generator=generator)) for i in range(rows - 1)]
    return Topology.from_wire(parents)


def sessions_of(layer, sizes, zeros):
    """Sessions with random trees; the first `zeros[b]` entries of a history are the zeros before the prompt."""
    made = []
    for b, (n, empty) in enumerate(zip(sizes, zeros, strict=True)):
        order = torch.randperm(POOL_ROWS, generator=layer.generator).tolist()
        real = max(layer.taps - 1 - empty, 0)
        past = [*[ZEROS] * (layer.taps - 1 - real), *order[:real]]
        own = order[real : real + n]
        made.append(
            SessionPass(slot=layer.slots - 1 - b, topology=tree(layer.generator, n), pool_rows=own, history=past)
        )
    return made


@pytest.mark.parametrize(
    ("shape", "taps", "dtype", "negative"),
    [
        ((2, 4, 16, 32), 4, torch.float32, False),
        ((1, 1, 48, 16), 2, torch.float16, True),
        ((3, 6, 16, 48), 4, torch.float16, False),
        ((1, 2, 16, 16), 1, torch.float32, True),
        ((2, 2, 16, 16), 7, torch.float32, False),
    ],
)
def test_rows_gates_and_pool_against_the_reference(shape, taps, dtype, negative, device):
    layer = Layer(*shape, taps, dtype, device, negative=negative)
    bucket = Bucket(sessions=4, rows=14, tree_rows=8, taps=taps)
    check_pass(layer, bucket, sessions_of(layer, [6, 1, 5], [0, taps, 1]))


def test_taps_at_every_depth_take_the_ancestors_not_the_rows_before(device):
    layer = Layer(1, 1, 16, 16, 4, torch.float32, device)
    fork = Topology.from_wire([-1, -1, 0, 1, 2, 3, -1])  # two branches of depth 3, interleaved, and a late leaf
    for empty in range(4):
        past = [ZEROS] * empty + list(range(3 - empty))
        session = SessionPass(slot=2, topology=fork, pool_rows=range(8, 16), history=past)
        check_pass(layer, Bucket(sessions=1, rows=9, tree_rows=8), [session])


def test_a_row_alone_has_the_bits_it_has_in_a_batch(device):
    layer = Layer(2, 4, 32, 16, 4, torch.float32, device)
    pool = layer.poisoned_pool()
    pool.x.copy_(layer.random(*pool.x.shape))
    x, a, b = layer.random(12, layer.channels), layer.random(12, 4), layer.random(12, 4)
    chain = Topology.from_wire([-1, 0, 1, 2])
    fork = Topology.from_wire([-1, -1, 0, 1, 0])
    first = SessionPass(slot=0, topology=fork, pool_rows=range(10, 16), history=[3, 4, 5])
    second = SessionPass(slot=3, topology=chain, pool_rows=range(11, 16), history=[ZEROS, 8, 2])
    together = layer.run(Bucket(sessions=2, rows=12, tree_rows=6), [first, second], x, a, b, pool)
    # The second session alone, and its path cut after the third row: other places, other bucket, same bits.
    cut = SessionPass(slot=3, topology=Topology.from_wire([-1, 0]), pool_rows=range(11, 14), history=[ZEROS, 8, 2])
    alone = layer.run(Bucket(sessions=1, rows=3, tree_rows=3), [cut], x[6:9], a[6:9], b[6:9], pool)
    for name, got in alone._asdict().items():
        assert torch.equal(got, getattr(together, name)[6:9]), name


def check_bits_with_fewer_rows_a_program(layer, bucket, sessions, monkeypatch):
    """The same outputs and pools whether a program takes one row or two, whose number may be odd."""
    x, a, b = (
        layer.random(bucket.rows, n, dtype=layer.dtype) for n in (layer.channels, layer.shape[1], layer.shape[1])
    )
    past, found = layer.random(layer.slots, POOL_ROWS, layer.channels, dtype=layer.dtype), []
    for many in (1, bucket.rows + 1):
        monkeypatch.setattr(convolution, "_MANY", many)
        pool = layer.poisoned_pool()
        pool.x.copy_(past)
        found.append((*layer.run(bucket, sessions, x, a, b, pool), *pool))
    for two, one in zip(*found, strict=True):
        assert torch.equal(two, one)


def test_rows_that_share_a_program_have_the_bits_of_rows_alone(device, monkeypatch):
    layer = Layer(1, 2, 16, 16, 4, torch.float32, device)
    check_bits_with_fewer_rows_a_program(
        layer, Bucket(sessions=3, rows=11, tree_rows=5), sessions_of(layer, (5, 4), (1, 3)), monkeypatch
    )


def test_an_empty_pass_touches_nothing(device):
    layer = Layer(1, 2, 16, 16, 4, torch.float32, device)
    check_pass(layer, Bucket(sessions=2, rows=4, tree_rows=4), [])


def test_gates_at_their_ends(device):
    layer = Layer(1, 4, 16, 16, 4, torch.float32, device)
    parameters = layer.parameters._replace(a_log=torch.zeros(4, device=device), dt_bias=torch.zeros(4, device=device))
    a = torch.tensor([[-80.0, -20.0, 0.0, 90.0]], device=device)
    b = torch.tensor([[-100.0, 100.0, 0.0, -20.0]], device=device)
    batch = PassBatch(Bucket(sessions=1, rows=1, tree_rows=1), device)
    batch.fill([SessionPass(slot=0, topology=Topology.root_only(), pool_rows=[0])])
    out = layer.poisoned_rows(1)
    tree_convolution(layer.random(1, layer.channels), a, b, parameters, layer.poisoned_pool(), batch, out)
    g, beta = reference.gates(a.cpu(), b.cpu(), parameters.a_log.cpu(), parameters.dt_bias.cpu())
    close(out.g, g, 2e-6)
    torch.testing.assert_close(out.beta.double().cpu(), beta, rtol=2e-6, atol=1e-30)


def test_rows_of_a_merged_projection_may_stand_apart(device):
    layer = Layer(1, 2, 16, 16, 4, torch.bfloat16, device)
    bucket = Bucket(sessions=2, rows=9, tree_rows=5)
    sessions = sessions_of(layer, (5, 3), (0, 2))
    merged = layer.random(9, layer.channels + 8 + 16, dtype=torch.bfloat16)
    x, a, b = merged[:, : layer.channels], merged[:, layer.channels :][:, :2], merged[:, layer.channels :][:, 2:4]
    pools = [layer.poisoned_pool() for _ in range(2)]
    apart = layer.run(bucket, sessions, x, a, b, pools[0])
    together = layer.run(bucket, sessions, x.contiguous(), a.contiguous(), b.contiguous(), pools[1])
    for found, wanted in zip((*apart, *pools[0]), (*together, *pools[1]), strict=True):
        assert torch.equal(found, wanted)


def test_what_does_not_fit_is_refused(device):
    layer = Layer(1, 1, 16, 16, 4, torch.float32, device)
    batch = PassBatch(Bucket(sessions=1, rows=2, tree_rows=2), device)
    pool, out = layer.poisoned_pool(), layer.poisoned_rows(2)
    x, ab = layer.random(2, 48), layer.random(2, 1)

    def call(x=x, a=ab, parameters=layer.parameters, out=out):
        tree_convolution(x, a, ab, parameters, pool, batch, out)

    call()
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 40\]: give torch.bfloat16 or .* \[2, 48\]"):
        call(x=x[:, :40])
    with pytest.raises(ValueError, match="contiguous"):
        call(x=layer.random(2, 96)[:, ::2])
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        call(x=layer.random(97)[1:].view(2, 48))
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        call(x=layer.random(2, 49)[:, :48])
    with pytest.raises(ValueError, match="rows of a and b stand 3 and 1 apart"):
        call(a=layer.random(2, 3)[:, :1])
    with pytest.raises(ValueError, match=r"a is torch.float64 .* give torch.float32"):
        call(a=ab.double())
    with pytest.raises(ValueError, match=r"weight is .* give torch.float32 \[4, 48\]"):
        call(parameters=layer.parameters._replace(weight=layer.parameters.weight[1:]))
    with pytest.raises(ValueError, match="multiples of 16"):
        call(out=LayerRows.empty(2, 1, 1, 24, 16, torch.float32, device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize(
    "shape",
    [(8, 8, 256, 256), (16, 48, 128, 128), (16, 32, 128, 128), (4, 8, 64, 64), (3, 6, 96, 192), (2, 2, 256, 512)],
)
def test_all_shapes_on_the_device(shape, taps, dtype, device):
    layer = Layer(*shape, taps, dtype, device, slots=9, negative=taps == 2)
    bucket = Bucket(sessions=6, rows=64, tree_rows=20, taps=taps)
    check_pass(layer, bucket, sessions_of(layer, [16, 1, 9, 20, 2], [0, taps, 1, 2, 0]))
    check_pass(layer, Bucket(sessions=1, rows=1, tree_rows=1, taps=taps), sessions_of(layer, [1], [0]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 8, 256, 256), (16, 48, 128, 128), (4, 8, 64, 64), (3, 6, 96, 192)])
def test_rows_that_share_a_program_have_the_same_bits_on_the_device(shape, device, monkeypatch):
    layer = Layer(*shape, 4, torch.bfloat16, device, slots=9)
    bucket = Bucket(sessions=6, rows=49, tree_rows=20)
    check_bits_with_fewer_rows_a_program(layer, bucket, sessions_of(layer, [16, 1, 9, 20], [0, 4, 1, 2]), monkeypatch)
