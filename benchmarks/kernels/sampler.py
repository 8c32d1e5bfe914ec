"""Times the sampler's Triton form: 64 rows of 32,000 logits with top-p, every row at its own position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.benchmarks.kernels.timing import Graph, Work, in_turns, layers_needed
from specla.kernels.gpu.sampler_rows import SamplerConfig, SamplerRows
from specla.kernels.gpu.sampling import sample
from specla.kernels.sampling import RowSampling, SessionSampling
from specla.kernels.sampling import sample as sample_on_cpu
from specla.kernels.sampling_params import SamplingParams

ROWS, VOCABULARY, TOP_P = 64, 32_000, 0.9
ROUNDS = 25
DEFAULT = "default"
CONFIGS = {
    DEFAULT: SamplerConfig(),
    "one program a row, 32 warps": SamplerConfig(chunk=8192, warps=32, splits=1),
    "two programs a row, 32 warps": SamplerConfig(chunk=8192, warps=32, splits=2),
    "four programs a row": SamplerConfig(chunk=4096, warps=16, splits=4),
    "eight programs a row": SamplerConfig(chunk=2048, warps=8, splits=8),
}
"""How rows are dealt out; the goal is held by the default, which users get."""

_BORDERS = 1
"""Rows of 64 whose token may differ from the CPU's: a sum's last bit can move the border of top-p by one id."""


class WrongTokensError(RuntimeError):
    """The Triton form draws other tokens than the sampler on the CPU."""


def measure_sampler(names: Sequence[str], *, l2: int, device: str = "cuda") -> dict[str, list[float]]:
    """Microseconds of one launch over cold logits, by configuration, once the tokens are those of the CPU.

    Args:
        names: of CONFIGS.
        l2: bytes of the L2 cache.
        device: where to run.

    Raises:
        WrongTokensError: a configuration draws other tokens.
    """
    copies = layers_needed(ROWS * VOCABULARY * 4, l2)
    logits, drawn = _inputs(copies, device)
    wanted = torch.from_numpy(sample_on_cpu(logits[0].cpu(), drawn).tokens)
    graphs = []
    for name in names:
        work, tokens = _work(name, logits, drawn)
        work.warm()
        differ = int((tokens.cpu() != wanted).sum())
        if differ > _BORDERS:
            raise WrongTokensError(f"{name}: {differ} of {ROWS} rows draw other tokens than the CPU")
        graphs.append(Graph.capture(work))
    return in_turns(graphs, ROUNDS)


def warm(name: str, device: str = "cuda") -> None:
    """Compiles one configuration."""
    logits, drawn = _inputs(1, device)
    work, tokens = _work(name, logits, drawn)
    work.warm()
    tokens.cpu()


def _inputs(copies: int, device: str) -> tuple[Tensor, RowSampling]:
    """Logits [copies, R, vocabulary], and how they are sampled."""
    draw = torch.Generator(device=device).manual_seed(5)
    logits = 3 * torch.randn(copies, ROWS, VOCABULARY, generator=draw, device=device)  # as uneven as a model's
    session = SessionSampling(SamplingParams(temperature=1.0, top_p=TOP_P, seed=7), VOCABULARY)
    return logits, RowSampling([session], [0] * ROWS, list(range(ROWS)))


def _work(name: str, logits: Tensor, drawn: RowSampling) -> tuple[Work, Tensor]:
    """Sampling every copy of the logits, and where the tokens of the last one go: int64 [R], poisoned."""
    rows = SamplerRows(ROWS, VOCABULARY, logits.device, CONFIGS[name])
    rows.fill(drawn)
    tokens = torch.full((ROWS,), -2, dtype=torch.int64, device=logits.device)
    errors = torch.full((ROWS,), -2, dtype=torch.int32, device=logits.device)

    def run(count: int = logits.shape[0]) -> None:
        for i in range(count):
            sample(logits[i], rows, tokens, errors)

    return Work(name, logits.shape[0], lambda: run(1), run), tokens
