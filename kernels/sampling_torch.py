"""The sampler of `sampling.py` as plain tensor operations over all rows at once, for logits on an accelerator.

Same rule, same order, same noise; `sampling.py` stays in charge on a CPU. Bits of a truncation border or of a
division may differ between devices, which is why a promise of equal text names one device class.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specla.kernels.philox import MASK_32, MULTIPLIER_0, MULTIPLIER_1, SMALLEST_NOISE, round_keys
from specla.kernels.sampling import FAILED_TOKEN, RowLogprobs, RowSampling, Sampled, row_logprobs
from specla.kernels.sampling_params import SamplingParams


def gumbel_noise_tensor(
    seeds: list[int], positions: list[int], vocab_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """`philox.gumbel_noise` of several (seed, position): float32 [R, vocab_size].

    Words are held in int64: a product of two 32-bit words wraps to a negative number, and its high word is what an
    arithmetic shift leaves, masked.
    """
    keys = torch.tensor([round_keys(seed) for seed in seeds], dtype=torch.int64, device=device)  # [R, rounds, 2]
    position = torch.tensor(positions, dtype=torch.int64, device=device)[:, None]
    quads = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=device)
    c0 = quads.expand(len(seeds), -1)  # [R, vocab_size / 4]
    c1 = position.expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    for key in keys.unbind(dim=1):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = (p1 >> 32 & MASK_32) ^ c1 ^ key[:, :1]
        c2 = (p0 >> 32 & MASK_32) ^ c3 ^ key[:, 1:]
        c1, c3 = p1 & MASK_32, p0 & MASK_32
    words = torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)[:, :vocab_size]
    exponential = -torch.log1p((words.double() + 0.5) * -(2.0**-32))
    return (-torch.log(exponential)).float().clamp_min(float(SMALLEST_NOISE))


class _Edits(NamedTuple):
    """Changes of single logits, gathered over the rows: which (row, id), and by what."""

    rows: list[int]
    ids: list[NDArray[Any]]
    values: list[NDArray[Any]]

    def add(self, row: int, ids: NDArray[Any], values: NDArray[Any]) -> None:
        self.rows.append(row)
        self.ids.append(ids)
        self.values.append(values)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = np.repeat(self.rows, [len(ids) for ids in self.ids])
        return (
            torch.from_numpy(rows).to(device),
            torch.from_numpy(np.concatenate(self.ids)).to(device),
            torch.from_numpy(np.concatenate(self.values).astype(np.float32)).to(device),
        )


def adjusted_tensor(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """`sampling.adjusted_logits` of every row: float32 [R, vocab_size]."""
    biases, repetitions, penalties, bans = (_Edits([], [], []) for _ in range(4))
    for i, index in enumerate(rows.row_session):
        session = rows.sessions[index]
        params = session.params
        path = rows.path(i) if params.penalizes else []
        if params.logit_bias:
            biases.add(i, session.bias_ids, session.bias)
        if params.repetition_penalty != 1:
            ids = session.seen_ids(path)
            repetitions.add(i, ids, np.full(len(ids), params.repetition_penalty))
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            penalties.add(i, *session.output_penalties(path))
        if params.banned_ids:
            bans.add(i, session.banned_ids, np.full(len(session.banned_ids), -np.inf))
    logits = logits.clone()
    if biases.rows:
        row, token, value = biases.tensors(logits.device)
        logits[row, token] += value
    if repetitions.rows:
        row, token, value = repetitions.tensors(logits.device)
        old = logits[row, token]
        logits[row, token] = torch.where(old > 0, old / value, old * value)
    if penalties.rows:
        row, token, value = penalties.tensors(logits.device)
        logits[row, token] -= value
    if bans.rows:
        row, token, value = bans.tensors(logits.device)
        logits[row, token] = value
    temperatures = [_params(rows, i).temperature or 1.0 for i in range(len(rows.row_session))]
    if any(t != 1 for t in temperatures):
        logits = logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    return logits


def truncated_tensor(processed: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Top-k, top-p and min-p: float32 [R, vocab_size] with -inf where they cut; greedy rows keep everything."""
    R, size = processed.shape
    params = [_params(rows, i) for i in range(R)]
    if not any(p.truncates and not p.is_greedy for p in params):
        return processed
    device = processed.device
    top_k = torch.tensor([min(p.top_k or size, size) for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)[:, None]
    ordered = processed.sort(dim=-1, descending=True).values  # [R, size]
    largest = ordered[:, :1]
    threshold = ordered.gather(1, top_k - 1)  # [R, 1]
    kept = torch.where(ordered >= threshold, ordered, -torch.inf)
    reached = torch.cumsum(torch.exp(kept - largest).double(), dim=-1)
    last = (reached < top_p * reached[:, -1:]).sum(dim=-1, keepdim=True).clamp_max(size - 1)
    threshold = torch.where(top_p < 1, torch.maximum(threshold, ordered.gather(1, last)), threshold)
    threshold = torch.maximum(threshold, largest + torch.log(min_p).float())
    greedy = torch.tensor([p.is_greedy for p in params], device=device)[:, None]
    return torch.where(greedy | (processed >= threshold), processed, -torch.inf)


def sample_tensor(logits: torch.Tensor, rows: RowSampling) -> Sampled:
    """`sampling.sample` for float32 [R, vocab_size] logits on any device; the result is brought to the host.

    Raises:
        ValueError: the logits are not float32.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}: give float32")
    processed = adjusted_tensor(logits, rows)
    scores = truncated_tensor(processed, rows)
    noisy = [i for i in range(len(logits)) if not _params(rows, i).is_greedy]
    if noisy:
        seeds = [_params(rows, i).seed for i in noisy]
        positions = [int(rows.positions[i]) for i in noisy]
        scores = scores.clone()
        scores[noisy] += gumbel_noise_tensor(seeds, positions, logits.shape[1], logits.device)
    best = scores.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(scores == best, ids, logits.shape[1]).amin(dim=-1)  # argmax promises no order among equals
    failed = ~(torch.isfinite(best[:, 0]) & torch.isfinite(logits.amax(dim=-1)))
    drawn: NDArray[np.int64] = torch.where(failed, FAILED_TOKEN, tokens).cpu().numpy()
    errors = {int(i): _fault(logits[i]) for i in failed.nonzero()[:, 0].tolist()}
    return Sampled(drawn, errors, _logprobs(logits, rows, drawn, errors))


def _params(rows: RowSampling, row: int) -> SamplingParams:
    return rows.sessions[rows.row_session[row]].params


def _fault(row: torch.Tensor) -> str:
    nans = int(torch.isnan(row).sum())
    if nans:
        return f"{nans} of {len(row)} logits are NaN"
    return "a logit is infinite" if bool((row == torch.inf).any()) else "every token has been ruled out"


def _logprobs(
    logits: torch.Tensor, rows: RowSampling, tokens: NDArray[Any], errors: dict[int, str]
) -> dict[int, RowLogprobs]:
    counts = {i: _params(rows, i).top_logprobs for i in range(len(tokens)) if i not in errors}
    asked = {i: count for i, count in counts.items() if count is not None}
    if not asked:
        return {}
    host = logits[list(asked)].cpu().numpy()
    return {i: row_logprobs(row, int(tokens[i]), asked[i]) for i, row in zip(asked, host, strict=True)}
