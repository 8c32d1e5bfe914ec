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

_BORDER = 1e-5
"""A token may differ from the CPU's where its share of all weights is so near to top-p: a sum's last bit decides."""


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
    first = logits[0].cpu()  # what warming up samples
    wanted = sample_on_cpu(first, drawn).tokens
    graphs = []
    for name in names:
        work, tokens = _work(name, logits, drawn)
        work.warm()
        wrong = [
            row
            for row, (token, right) in enumerate(zip(tokens.tolist(), wanted.tolist(), strict=True))
            if token != right and not _at_the_border(first[row], token, right)
        ]
        if wrong:
            raise WrongTokensError(f"{name}: rows {wrong} of {ROWS} draw other tokens than the CPU")
        graphs.append(Graph.capture(work))
    return in_turns(graphs, ROUNDS)


def _at_the_border(row: Tensor, token: int, right: int) -> bool:
    """Whether one of two tokens is kept by top-p or not as its sum is rounded."""
    if not 0 <= token < len(row):
        return False
    weights = torch.softmax(row.double(), 0)  # at temperature 1
    shares = [float(weights[row > row[i]].sum()) for i in (token, right)]
    return min(abs(share - TOP_P) for share in shares) < _BORDER


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
