"""From logits to tokens, on a CPU: a pure function of (logits, seed, position) that every part shares.

The token is argmax(processed / T + noise), or argmax(processed) at T = 0, ties to the lowest id; the noise is
`philox.gumbel_noise`. Hence any draft, tree or batch gives the same text for a seed, and a draft is accepted where it
equals the token drawn here. Rows are handled one by one, so a row's result cannot depend on its neighbours, and in
NumPy, whose calls cost a tenth of torch's. `sampling_torch.py` is the same function for logits on another device.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specla.kernels.philox import noise_of_words, noise_words
from specla.kernels.sampling_params import SamplingError, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["RowLogprobs", "RowSampling", "Sampled", "SamplingError", "SamplingParams", "SessionSampling", "sample"]

FAILED_TOKEN = -1
LOG_2_POW_32 = 32 * float(np.log(2))
NUCLEUS_GUESS = 256  # top-p first sorts so many of the largest logits; most nuclei are smaller

Row = NDArray[np.float32]
Ids = NDArray[np.int64]


class SessionSampling:
    """One session's parameters and the counts its penalties need, kept up to date by `extend`.

    Counts cover every *committed* token: prompt, output and the last one, which is the root of the next pass.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Iterable[int] = (), output_ids: Iterable[int] = ()
    ):
        """Validates the parameters and counts the tokens so far.

        Args:
            params: what the request asked for.
            vocab_size: how many logits a row has.
            prompt_ids: ids of the prompt, which only the repetition penalty looks at.
            output_ids: tokens committed already, when a session resumes.

        Raises:
            SamplingError: from `SamplingParams.validate`.
        """
        params.validate(vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self.adjusts = params.adjusts
        self.is_plain_greedy = params.is_greedy and not params.adjusts and params.top_logprobs is None
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.banned_ids = np.array(sorted(params.banned_ids), dtype=np.int64)
        self._penalizes = params.penalizes
        size = vocab_size if params.penalizes else 0
        self._seen = np.zeros(size, dtype=np.bool_)
        self._counts = np.zeros(size, dtype=np.int32)
        if params.penalizes:
            self._seen[list(prompt_ids)] = True
        self.extend(output_ids)

    def extend(self, tokens: Iterable[int]) -> None:
        """Counts tokens that have been committed to the output, the bonus token included."""
        if not self._penalizes:
            return
        for token in tokens:
            self._seen[token] = True
            self._counts[token] += 1
        self.__dict__.pop("_seen_ids", None)
        self.__dict__.pop("_output_ids", None)

    @cached_property
    def _seen_ids(self) -> Ids:
        return np.flatnonzero(self._seen)

    @cached_property
    def _output_ids(self) -> Ids:
        return np.flatnonzero(self._counts)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """bool [vocab_size], whether an id stands in prompt or output; empty where nothing penalizes."""
        return self._seen

    @property
    def counts(self) -> NDArray[np.int32]:
        """int32 [vocab_size], how often an id stands in the output; empty where nothing penalizes."""
        return self._counts

    def seen_ids(self, path: Sequence[int]) -> Ids:
        """Ids of prompt, output and path, each once, for the repetition penalty: int64 [n]."""
        fresh = [token for token in dict.fromkeys(path) if not self._seen[token]]
        return np.concatenate([self._seen_ids, np.array(fresh, dtype=np.int64)]) if fresh else self._seen_ids

    def output_penalties(self, path: Sequence[int]) -> tuple[Ids, Row]:
        """Ids of output and path, each once, and what presence and frequency take off their logits.

        A count is turned into a penalty by one formula wherever the token stands, so that a candidate that becomes
        committed changes no bit.
        """
        counts: Ids = self._counts[self._output_ids].astype(np.int64)
        ids = self._output_ids
        if path:
            extra = np.unique(np.array(path, dtype=np.int64), return_counts=True)
            ids = np.union1d(ids, extra[0])
            counts = self._counts[ids].astype(np.int64)
            counts[np.searchsorted(ids, extra[0])] += extra[1]
        penalties = np.float32(self.params.frequency_penalty) * counts.astype(np.float32)
        return ids, penalties + np.float32(self.params.presence_penalty)


class RowSampling(NamedTuple):
    """Which token each row of a pass samples: its session, its position, and the candidates before it.

    Attributes:
        sessions: the sessions of the pass.
        row_session: [R] index into `sessions`.
        positions: [R] position of the token being sampled: committed_len + depth, the root's depth being 0.
        parent_row: [R] row of the parent, -1 for a session's root; empty when every row is a root.
        row_tokens: [R] token of the row; the roots' are not looked at, they are committed and counted.
    """

    sessions: Sequence[SessionSampling]
    row_session: Sequence[int]
    positions: Sequence[int] | Ids
    parent_row: Sequence[int] = ()
    row_tokens: Sequence[int] = ()

    def path(self, row: int) -> list[int]:
        """The candidates from the root, exclusive, to the row, inclusive."""
        path: list[int] = []
        while self.parent_row and self.parent_row[row] >= 0:
            path.append(int(self.row_tokens[row]))
            row = self.parent_row[row]
        return path[::-1]


class RowLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities: before penalties, temperature and truncation."""

    chosen: float
    top: list[tuple[int, float]]  # (id, log-probability), best first, equal ones by id


class Sampled(NamedTuple):
    """What the rows sampled.

    Attributes:
        tokens: int64 [R]; -1 for a row that failed.
        errors: row to what was wrong with its logits; its session fails, the others do not.
        logprobs: row to its log-probabilities, for sessions that asked for them.
    """

    tokens: Ids
    errors: dict[int, str]
    logprobs: dict[int, RowLogprobs]


def sample(logits: "torch.Tensor | Row", rows: RowSampling) -> Sampled:
    """Draws the next token of every row.

    Args:
        logits: float32 [R, vocab_size], a tensor on any device or an array; not written.
        rows: what each row belongs to.

    Raises:
        ValueError: logits and rows disagree in number, or the logits are not float32.
    """
    if len(rows.row_session) != logits.shape[0] or len(rows.positions) != logits.shape[0]:
        raise ValueError(
            f"{logits.shape[0]} rows of logits, {len(rows.row_session)} sessions and {len(rows.positions)} positions: "
            "give one of each a row"
        )
    if not isinstance(logits, np.ndarray):
        if logits.device.type != "cpu":
            from specla.kernels.sampling_torch import sample_tensor  # torch is imported by those who have tensors only

            return sample_tensor(logits, rows)
        logits = logits.detach().numpy()
    if logits.dtype != np.float32:
        raise ValueError(f"logits are {logits.dtype}: give float32")
    if all(rows.sessions[i].is_plain_greedy for i in rows.row_session):
        return _sample_plain_greedy(logits)
    tokens = np.full(logits.shape[0], FAILED_TOKEN, dtype=np.int64)
    errors: dict[int, str] = {}
    logprobs: dict[int, RowLogprobs] = {}
    for i, row in enumerate(logits):
        session = rows.sessions[rows.row_session[i]]
        error = check_row(row)
        if error is None:
            processed = adjusted_logits(row, session, rows.path(i) if session.params.penalizes else ())
            error = check_row(processed)
        if error is not None:
            errors[i] = error
            continue
        tokens[i] = draw(processed, session.params, int(rows.positions[i]))
        if session.params.top_logprobs is not None:
            logprobs[i] = row_logprobs(row, int(tokens[i]), session.params.top_logprobs)
    return Sampled(tokens, errors, logprobs)


def _sample_plain_greedy(logits: NDArray[np.float32]) -> Sampled:
    tokens = logits.argmax(axis=1)  # the first of equals; the first NaN, if there is one
    best = logits[np.arange(len(tokens)), tokens]
    errors: dict[int, str] = {}
    if not np.isfinite(best).all():
        errors = {int(i): str(check_row(logits[i])) for i in np.flatnonzero(~np.isfinite(best))}
        tokens[list(errors)] = FAILED_TOKEN
    return Sampled(tokens, errors, {})


def check_row(row: Row) -> str | None:
    """What is wrong with a row of logits, or None: NaN or +inf anywhere, or -inf everywhere."""
    largest = row.max()
    if np.isfinite(largest):
        return None
    if np.isnan(largest):
        return f"{int(np.isnan(row).sum())} of {len(row)} logits are NaN"
    return "a logit is infinite" if largest > 0 else "every token has been ruled out"


def adjusted_logits(row: Row, session: SessionSampling, path: Sequence[int]) -> Row:
    """Bias, penalties, bans and division by the temperature: float32 [vocab_size], a copy if anything changed."""
    params = session.params
    if params.adjusts:
        row = row.copy()
        if len(session.bias_ids):
            row[session.bias_ids] += session.bias
        if params.repetition_penalty != 1:
            ids, penalty = session.seen_ids(path), np.float32(params.repetition_penalty)
            values = row[ids]
            row[ids] = np.where(values > 0, values / penalty, values * penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            ids, penalties = session.output_penalties(path)
            row[ids] -= penalties
        row[session.banned_ids] = -np.inf
    if params.temperature not in (0, 1):
        row = row / np.float32(params.temperature)
    return row


def draw(processed: Row, params: SamplingParams, position: int) -> int:
    """The token: argmax of processed logits plus noise over what truncation keeps, ties to the lowest id."""
    if params.is_greedy:
        return int(processed.argmax())
    words = noise_words(params.seed, position, len(processed))
    if params.truncates:
        kept = np.flatnonzero(processed >= truncation_threshold(processed, params))
    else:
        kept = _possible_winners(processed, words)
    return int(kept[(processed[kept] + noise_of_words(words[kept])).argmax()])


def _possible_winners(processed: Row, words: NDArray[np.uint32]) -> Ids:
    """The ids that may have the highest score, so that two logarithms are taken of these few only: int64 [n].

    The most likely token's score b is beaten by token i only if noise_i >= b - l_i. With -log1p(-u) >= u, noise is at
    most -log(u), so u_i <= exp(l_i - b) must hold. The slack covers float32 rounding here and in the scores.
    """
    lead = int(processed.argmax())
    score = float(processed[lead]) + float(noise_of_words(words[lead : lead + 1])[0])
    slack = 0.01 + 1e-6 * abs(score) + 1e-6 * abs(float(processed[lead]))
    with np.errstate(over="ignore"):  # infinity: it may win
        limit = np.exp(processed - np.float32(score - slack - LOG_2_POW_32))
    return np.flatnonzero(words.astype(np.float32) <= limit)


def truncation_threshold(processed: Row, params: SamplingParams) -> np.float32:
    """The smallest logit that top-k, then top-p, then min-p keep. Equal logits are kept together, whatever their id."""
    size = len(processed)
    threshold = np.float32(-np.inf)
    if 0 < params.top_k < size:
        threshold = np.partition(processed, size - params.top_k)[size - params.top_k]
    largest = processed.max()
    if params.top_p < 1:
        kept = processed[processed >= threshold] if params.top_k > 0 else processed
        threshold = max(threshold, _nucleus_threshold(kept, largest, params.top_p))
    if params.min_p > 0:
        threshold = max(threshold, largest + np.float32(np.log(params.min_p)))
    return threshold


def _nucleus_threshold(kept: Row, largest: np.float32, top_p: float) -> np.float32:
    """The logit at which the summed probability of the larger ones and itself first reaches top_p."""
    wanted = top_p * np.exp(kept - largest).sum()
    count = min(NUCLEUS_GUESS, len(kept))
    while True:
        head = np.partition(kept, len(kept) - count)[len(kept) - count :] if count < len(kept) else kept
        head = np.sort(head)[::-1]
        reached = np.cumsum(np.exp(head - largest), dtype=np.float64)
        if reached[-1] >= wanted or count == len(kept):
            return np.float32(head[min(int(np.searchsorted(reached, wanted)), count - 1)])
        count = len(kept)


def row_logprobs(row: Row, token: int, count: int) -> RowLogprobs:
    """Log-softmax of a row of raw logits at the chosen token and at the `count` best."""
    wide = row.astype(np.float64)
    largest = wide.max()
    normalizer = largest + np.log(np.exp(wide - largest).sum())
    count = min(count, len(row))
    top: list[tuple[int, float]] = []
    if count:
        border = np.partition(row, len(row) - count)[len(row) - count]
        ids = np.flatnonzero(row >= border)
        best = ids[np.lexsort((ids, -row[ids]))][:count]
        top = [(int(i), float(wide[i] - normalizer)) for i in best]
    return RowLogprobs(float(wide[token] - normalizer), top)
