"""What the rows of a pass sample with, as device arrays of fixed addresses, and the scratch of the sampling kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.gpu.upload import Upload
from specla.kernels.sampling import RowSampling, SessionSampling

_MASK_32 = 0xFFFFFFFF
MOST_SCORED = 256
"""Rows whose scores are kept at a time: more of them sample in several launches."""

_LARGEST_VOCABULARY = (1 << 21) - 1  # what the kernel's packed counts hold

_FIELDS: WeakKeyDictionary[SessionSampling, NDArray[np.int32]] = WeakKeyDictionary()
"""Of every session that has sampled here."""


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How a row is dealt out.

    `chunk` and `splits` change times only, `sweep` and `warps` the order of top-p's sums too: pin these.

    Attributes:
        chunk: logits that a program scores at a time, a power of two from 16 on.
        sweep: logits that truncation looks at at a time, likewise.
        warps: warps a program.
        splits: programs a row; 0 for as many as fill the device.
    """

    chunk: int = 4096
    sweep: int = 8192
    warps: int = 32
    splits: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no program can have."""
        if any(size < 16 or size & (size - 1) for size in (self.chunk, self.sweep)) or self.splits < 0:
            raise ValueError(f"{self}: want chunk and sweep to be powers of two from 16 on, and splits >= 0")
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"{self}: want 1, 2, 4, 8, 16 or 32 warps")


class SamplerRows:
    """Sampling parameters of R row places; `fill` replaces the contents with one copy.

    Attributes:
        used: int32 [R], 0 for a row place whose token and error are left alone.
        top_k: int32 [R], 0 is off.
        seed: int32 [R, 2], the low and the high word's bits.
        position: int32 [R], the bits of the position.
        temperature: float32 [R], 0 is greedy.
        top_p: float32 [R], 1 is off.
        log_min_p: float32 [R], -inf is off.
        scores: float32 [S, vocab_size], scratch; S rows sample at a time, MOST_SCORED unless a scratch is given.
        arrived: int32 [R], programs of a row that are done; 0 between calls.
        part_best, part_largest: float32 [R, splits], scratch.
        part_id: int32 [R, splits], scratch.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device | str,
        config: SamplerConfig | None = None,
        *,
        scores: Tensor | None = None,
        within: Upload | None = None,
    ) -> None:
        """All rows unused.

        Args:
            rows: R.
            vocab_size: ids of a row.
            device: where.
            config: how a row is dealt out.
            scores: the scratch of that name, if it lies in memory that others use between calls, too.
            within: what sends the parameters, as part of its own.

        Raises:
            ValueError: the vocabulary is larger than `sweep` allows (counts of one lane have ten bits).
        """
        device = torch.device(device)
        self.config = config or SamplerConfig()
        if vocab_size > min(_LARGEST_VOCABULARY, self.config.sweep * 1023):
            raise ValueError(f"{vocab_size} ids are too many for a sweep of {self.config.sweep}: give a larger sweep")
        self.vocab_size = vocab_size
        self.splits = self.config.splits or _splits(rows, vocab_size, self.config.chunk, device)
        self._last: tuple[Sequence[SessionSampling], Sequence[int]] = ((), ())
        self._upload = Upload(self.words(rows), device, within=within)
        self._ints = self._upload.words().reshape(8, rows)
        self._positions = self._ints[4].view(np.uint32)
        self.buffer = self._upload.buffer.view(8, rows)
        self.used, self.top_k = self.buffer[0], self.buffer[1]
        self.seed, self.position = self.buffer[2:4].view(-1).view(rows, 2), self.buffer[4]
        self.temperature, self.top_p, self.log_min_p = self.buffer[5:].view(torch.float32)
        self.scores = torch.empty(min(rows, MOST_SCORED), vocab_size, device=device) if scores is None else scores
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self.part_best = torch.empty(rows, self.splits, device=device)
        self.part_largest = torch.empty(rows, self.splits, device=device)
        self.part_id = torch.empty(rows, self.splits, dtype=torch.int32, device=device)

    @staticmethod
    def words(rows: int) -> int:
        """int32 words of the parameters of R row places."""
        return 8 * rows

    def fill(self, rows: RowSampling) -> None:
        """Puts these rows' parameters into the first places and leaves the others unused.

        Raises:
            ValueError: more rows than places, or a session of another vocabulary.
        """
        count, (_, places) = len(rows.row_session), self._ints.shape
        if count > places or len(rows.positions) != count:
            raise ValueError(f"{count} rows with {len(rows.positions)} positions: give one each, at most {places}")
        self._upload.words()  # waits
        self._positions[:count] = rows.positions
        if not self._filled_with(rows):
            self._fill_fields(rows)
        self._upload.send()

    def _filled_with(self, rows: RowSampling) -> bool:
        """Whether the places hold these sessions' rows already, but for positions."""
        sessions, indices = self._last
        if rows.sessions is sessions and rows.row_session is indices:
            return True  # they are not changed in place
        return tuple(rows.row_session) == tuple(indices) and tuple(rows.sessions) == tuple(sessions)

    def _fill_fields(self, rows: RowSampling) -> None:
        """All but the positions."""
        for session in rows.sessions:
            if session.vocab_size != self.vocab_size:
                raise ValueError(f"a session samples of {session.vocab_size} ids: give sessions of {self.vocab_size}")
        count, ints = len(rows.row_session), self._ints
        used, seeds = ints[0], ints[2:4].reshape(-1, 2)
        used[:count], used[count:] = 1, 0
        if len(rows.sessions) == 1:
            fields = self._fields_of(rows.sessions[0])
        else:
            fields = np.array([self._fields_of(session) for session in rows.sessions])[np.asarray(rows.row_session)].T
        ints[1, :count] = fields[0]
        seeds[:count] = fields[1:3].T
        ints[5:, :count] = fields[3:, None] if fields.ndim == 1 else fields[3:]
        self._last = (rows.sessions, rows.row_session)

    def _fields_of(self, session: SessionSampling) -> NDArray[np.int32]:
        """What does not change while a session runs: int32 [6], floats as their bits."""
        found = _FIELDS.get(session)
        if found is None:
            params = session.params
            found = np.zeros(6, np.int32)
            found[0] = params.top_k if params.top_k < self.vocab_size else 0
            found[1:3] = _bits(params.seed), _bits(params.seed >> 32)
            log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
            found[3:].view(np.float32)[:] = params.temperature, params.top_p, log_min_p
            _FIELDS[session] = found
        return found

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.buffer.device

    def tensors(self, rows: slice) -> tuple[Tensor, ...]:
        """What the kernel is given for some rows, no more than have scores, in the order of its arguments."""
        parameters = self.used, self.temperature, self.top_k, self.top_p, self.log_min_p, self.seed, self.position
        parts = self.arrived, self.part_best, self.part_largest, self.part_id
        return *(x[rows] for x in parameters), self.scores, *(x[rows] for x in parts)


def _bits(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    low = value & _MASK_32
    return low - (1 << 32) if low >> 31 else low


def _splits(rows: int, vocab_size: int, chunk: int, device: torch.device) -> int:
    """Programs a row: one a multiprocessor over all rows (its registers are full), at least a chunk each."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(-(-vocab_size // chunk), processors // rows))
