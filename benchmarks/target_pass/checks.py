"""What must be right before anything is timed: at the full shape, on this device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specla.benchmarks.target_pass.model import RandomTensors
from specla.kernels.gpu.selector import Mode, Selector
from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.kernels.topology import Topology
from specla.kernels.tree import pack
from specla.verifier_service.gpu.backend import GpuBackend
from specla.verifier_service.gpu.weights import GpuWeights
from specla.verifier_service.lineup import Lineup

TOKENS = 24
_TOLERANCE = 0.1  # of the logits' size: activations in bfloat16 through 24 layers of random weights
_FAST_OVER_EXACT = 1.5  # fast passes round at other places, not more coarsely


class WrongPassError(RuntimeError):
    """A pass gave what it must not."""


@torch.inference_mode()
def check(weights: GpuWeights, selector: Selector) -> dict[Mode, float]:
    """Decodes a text row by row, and again as chains and trees of one pass, alone and beside others.

    Returns:
        How far the logits of each mode are from those of the same weights with float32 activations and products: the
        root mean square of the difference over that of the logits.

    Raises:
        WrongPassError: exact logits differ in a bit, or either mode's are off by more than rounding explains.
    """
    plain = _logits(weights, GpuBackend(weights, "exact", selector, slots=4, max_rows=65), [1] * TOKENS)
    for sizes in ([TOKENS], [1, 15, 8], [5, 5, 5, 5, 4]):
        again = _logits(weights, GpuBackend(weights, "exact", selector, slots=4, max_rows=65), sizes)
        if not torch.equal(again, plain):
            raise WrongPassError(f"exact: logits of passes of {sizes} rows are not those of single rows")
    fast = _logits(weights, GpuBackend(weights, "fast", selector, slots=4, max_rows=65), [8, 16])
    truth = _truth(weights, selector)
    found: dict[Mode, torch.Tensor] = {"exact": plain, "fast": fast}
    errors = {
        mode: float((logits - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())
        for mode, logits in found.items()
    }
    if not (errors["exact"] < _TOLERANCE and errors["fast"] < _FAST_OVER_EXACT * errors["exact"]):
        raise WrongPassError(f"logits are off by {errors} of their size")
    return errors


def _truth(weights: GpuWeights, selector: Selector) -> torch.Tensor:
    """The same logits, everything in float32."""
    rounded = RandomTensors(weights.config, weights.device, weights.dtype)
    single = GpuWeights.load(weights.config, rounded, torch.float32, weights.device)
    return _logits(single, GpuBackend(single, "exact", selector, slots=4, max_rows=65), [TOKENS])


def _logits(weights: GpuWeights, backend: GpuBackend, sizes: Sequence[int]) -> torch.Tensor:
    """Of TOKENS known tokens in passes of these sizes, some beside a second session's tree: float32 [TOKENS, vocab]."""
    vocab = weights.config.vocab_size
    text = [(37 * i + 11) % vocab for i in range(TOKENS)]
    first, second = backend.acquire(), backend.acquire()
    found, at = [], 0
    other = Topology.from_wire([-1, -1, 0, 0, 2])
    for i, size in enumerate(sizes):
        chain = Topology.from_wire(range(-1, size - 2))
        beside = i % 2 == 1
        batch = pack([other, chain] if beside else [chain])
        tokens = ([1] * len(other) if beside else []) + text[at : at + size]
        greedy = SessionSampling(SamplingParams(temperature=0.0), vocab)
        slots = [second, first] if beside else [first]
        out = backend.run(Lineup(slots, batch, [greedy] * len(slots)), tokens, [0] * len(slots))
        offset = batch.offsets[-2]
        found.append(torch.stack([torch.from_numpy(out.logits(offset + row)) for row in range(size)]))
        out.take(batch.sessions - 1, range(size))
        if beside:
            out.take(0, [0, 1])
        at += size
    return torch.cat(found)
