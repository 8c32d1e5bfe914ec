"""Times the sampler's Triton form: 64 rows of 32,000 logits with top-p, every row at its own position."""

from __future__ import annotations

import torch

from specla.benchmarks.kernels.timing import Graph, Work, in_turns, layers_needed
from specla.kernels.sampling import RowSampling, SessionSampling
from specla.kernels.sampling_params import SamplingParams

ROWS, VOCABULARY, TOP_P = 64, 32_000, 0.9
ROUNDS = 25


def measure_sampler(*, l2: int) -> list[float]:
    """Microseconds of one launch over cold logits.

    Raises:
        ImportError: there is no Triton form.
        RuntimeError: a row's token was refused.
    """
    from specla.kernels.gpu.sampling import SamplerRows, sample

    copies = layers_needed(ROWS * VOCABULARY * 4, l2)
    draw = torch.Generator(device="cuda").manual_seed(5)
    logits = 3 * torch.randn(copies, ROWS, VOCABULARY, generator=draw, device="cuda")  # as uneven as a model's
    session = SessionSampling(SamplingParams(temperature=1.0, top_p=TOP_P, seed=7), VOCABULARY)
    rows = SamplerRows(ROWS, "cuda")
    rows.fill(RowSampling([session], [0] * ROWS, list(range(ROWS))))
    tokens, errors = (torch.full((ROWS,), -2, dtype=torch.int32, device="cuda") for _ in range(2))

    def run(count: int = copies) -> None:
        for i in range(count):
            sample(logits[i], rows, tokens, errors)

    graph = Graph.capture(Work("sampler", copies, lambda: run(1), run))
    if bool((errors != 0).any()) or bool((tokens < 0).any()):
        raise RuntimeError(f"the sampler refused rows: errors {errors.tolist()}, tokens {tokens.tolist()}")
    return in_turns([graph], ROUNDS)[graph.name]
