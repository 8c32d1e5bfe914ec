"""Many passes one after the other: commits, histories and rejected drafts leave exactly the accepted tokens behind."""

import random

import pytest
import torch
from gpu_decoder import Decoded, Decoder, Inputs, Plan, every_pass, random_plans, when_full
from gpu_layers import Dims
from torch import Tensor
from tree_cases import rms_ratio

from specla.benchmarks.kernels.reference64 import step64
from specla.kernels import reference
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.topology import Topology


class Case:
    """Texts of several sessions with the plans that cover them."""

    def __init__(self, dims: Dims, bucket: Bucket, sessions: int, passes: int, accepted: int, device: torch.device):
        rng, generator = random.Random(2 * dims.key_width), torch.Generator().manual_seed(3)
        self.dims, self.bucket, self.accepted = dims, bucket, accepted
        most_rows = min(bucket.tree_rows, bucket.rows // sessions)
        # Sessions end after different numbers of passes.
        self.plans = [random_plans(rng, passes - b, most_rows, accepted) for b in range(sessions)]
        if bucket.tree_rows > 2:  # somewhere an accepted row follows a rejected one
            assert any(plan.path[-1] >= len(plan.path) > 1 for plans in self.plans for plan in plans)
        lengths = [sum(len(plan.path) for plan in plans) for plans in self.plans]
        self.texts = [Inputs.random(dims, length, generator, device) for length in lengths]
        self.pool_rows = bucket.tree_rows + bucket.pending + bucket.taps - 1

    def speculate(self, kernel: str, ring: bool) -> tuple[list[Decoded], Tensor]:
        decoder = Decoder(self.dims, self.bucket, self.pool_rows, self.texts, kernel)
        writes = when_full(self.bucket.pending, self.accepted) if ring else every_pass
        for i in range(max(map(len, self.plans))):
            decoder.step([plans[i] if i < len(plans) else None for plans in self.plans], writes)
        return self.finished(decoder)

    def one_by_one(self) -> tuple[list[Decoded], Tensor]:
        """Plain decoding: a root alone in every pass."""
        sessions = len(self.texts)
        bucket = Bucket(sessions=sessions, rows=sessions, tree_rows=1, pending=1, taps=self.bucket.taps)
        decoder = Decoder(self.dims, bucket, self.pool_rows, self.texts, "serial")
        plan = Plan(Topology.root_only(), [0])
        for i in range(max(len(text.x) for text in self.texts)):
            decoder.step([plan if i < len(text.x) else None for text in self.texts], every_pass)
        return self.finished(decoder)

    def finished(self, decoder: Decoder) -> tuple[list[Decoded], Tensor]:
        states = decoder.flush()
        assert decoder.lengths == [len(text.x) for text in self.texts]
        return decoder.decoded(), states


def expected(case: Case, plain: list[Decoded], initial: Tensor) -> tuple[list[Tensor], Tensor]:
    """float64 outputs and states, from the rows that plain decoding fed the recurrence."""
    states, outputs = initial.double(), []
    group = case.dims.value_heads // case.dims.heads
    for b, decoded in enumerate(plain):
        state, made = states[1 + b][None], []
        q, k = (x.double().repeat_interleave(group, 1) for x in (decoded.rows.q, decoded.rows.k))
        v, g, beta = (x.double() for x in (decoded.rows.v, decoded.rows.g, decoded.rows.beta))
        for t in range(len(v)):
            now = slice(t, t + 1)
            state, _ = step64(state, k[now], v[now], g[now], beta[now])
            made.append(torch.einsum("rhkv,rhk->rhv", state, q[now]))
        states[1 + b] = state[0]
        outputs.append(torch.cat(made))
    return outputs, states


def check(case: Case, kernels: list[str]) -> None:
    initial = Decoder(case.dims, case.bucket, case.pool_rows, case.texts, "serial").buffers.state
    plain, plain_states = case.one_by_one()
    outputs, states = expected(case, plain, initial)
    for b, decoded in enumerate(plain):
        assert rms_ratio(decoded.o, outputs[b]) < 1e-5
    assert rms_ratio(plain_states, states) < 1e-5
    for kernel in kernels:
        for ring in (False, True):
            made, made_states = case.speculate(kernel, ring)
            for b, decoded in enumerate(made):
                # The convolution saw the accepted tokens before each row, whatever was rejected beside them.
                for name, got in decoded.rows._asdict().items():
                    assert torch.equal(got, getattr(plain[b].rows, name)), f"{name} of session {b}, {kernel}, {ring=}"
                if kernel == "serial":
                    assert torch.equal(decoded.o, plain[b].o), f"outputs of session {b}, {ring=}"
                assert rms_ratio(decoded.o, outputs[b]) < (1e-5 if kernel == "serial" else 1e-3)
            if kernel == "serial":
                assert torch.equal(made_states, plain_states), f"{ring=}"
            assert rms_ratio(made_states, states) < (1e-5 if kernel == "serial" else 1e-3)
            assert torch.equal(made_states[0], initial[0]), "a slot without a session was written"
            assert torch.equal(made_states[-1], initial[-1]), "a slot without a session was written"


def test_a_few_passes(device: torch.device) -> None:
    bucket = Bucket(sessions=3, rows=12, tree_rows=6, pending=4, groups=2)
    check(Case(Dims(1, 1, 16, 16), bucket, 2, 4, 3, device), ["serial", "factorised"])


def test_rows_of_plain_decoding_are_those_of_the_reference(device: torch.device) -> None:
    """The window through many passes, from the zeros before the prompt on."""
    dims = Dims(1, 1, 16, 16)
    case = Case(dims, Bucket(sessions=1, rows=1, tree_rows=1, pending=1), 1, 7, 1, device)
    (plain,), _ = case.one_by_one()
    (text,) = case.texts
    buffers = Decoder(dims, case.bucket, case.pool_rows, case.texts, "serial").buffers
    weight = buffers.parameters.weight.cpu()
    y = reference.convolution(text.x.cpu(), torch.zeros(3, 48), weight, range(-1, len(text.x) - 1))
    assert rms_ratio(plain.rows.q.cpu()[:, 0], reference.l2_normalise(y[:, :16], 0.25)) < 1e-6
    assert rms_ratio(plain.rows.k.cpu()[:, 0], reference.l2_normalise(y[:, 16:32])) < 1e-6
    assert rms_ratio(plain.rows.v.cpu()[:, 0], y[:, 32:]) < 1e-6


BIG = Bucket(sessions=6, rows=420, tree_rows=129, pending=20, groups=4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims",
    [
        Dims(2, 4, 128, 128, torch.bfloat16),
        Dims(2, 2, 256, 256, torch.bfloat16),
        Dims(1, 2, 96, 192, torch.bfloat16),
        Dims(1, 1, 128, 128, torch.float32),
    ],
    ids=lambda d: f"{d.key_width}x{d.value_width}-{str(d.dtype)[6:]}",
)
def test_thirty_passes_on_a_gpu(device: torch.device, dims: Dims) -> None:
    check(Case(dims, BIG, 4, 30, 16, device), ["serial", "factorised"])
