"""Which rows of a chunk of prompts belong to whose text: data on the device, so that a captured graph serves any.

Rows come in blocks. A text, one session's next tokens, begins with a block and takes as many as it needs; the rows of
its last block that lie behind it are nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specla.kernels.gpu.upload import Upload

CHUNK = 64
"""Rows of a block, which those that the recurrence takes at once divide whatever the dtype."""

_SIDES = 2  # of the host: one is written while a copy still reads the other


class ChunkText(NamedTuple):
    """One session's part of a chunk; `streams` are the addresses that some streams of its rows go to, by number."""

    slot: int
    tokens: Sequence[int]
    history: Sequence[int]
    """Pool rows of the W - 1 tokens before, oldest first; -1 for the zeros before a text."""
    kept: Sequence[int]
    """Pool rows that the last min(W - 1, T) tokens' raw inputs are written to; none of `history`."""
    streams: Mapping[int, int]


class ChunkBatch(NamedTuple):
    """int32 on the device, for up to R rows and S texts."""

    tokens: Tensor
    """[R]."""
    rows: Tensor
    """[1], rows up to the last text's end."""
    owner: Tensor
    """[R / CHUNK], the text that a block belongs to; -1 is none."""
    texts: Tensor
    """[S, 3]: first row, tokens (0: there is no such text), slot."""
    history: Tensor
    """[S, W - 1], see `ChunkText`."""
    places: Tensor
    """[S, W - 1]: see `ChunkText.kept`, -1 behind them."""

    def first(self, rows: int, texts: int) -> ChunkBatch:
        """The same for fewer rows, a multiple of CHUNK, and texts."""
        return ChunkBatch(
            self.tokens[:rows],
            self.rows,
            self.owner[: rows // CHUNK],
            self.texts[:texts],
            self.history[:texts],
            self.places[:texts],
        )

    def check(self, rows: int, device: torch.device, taps: int | None = None) -> None:
        """Raises ValueError unless it is for so many rows on a device, and so many taps of the convolution."""
        if rows % CHUNK or not rows:
            raise ValueError(f"{rows} rows: give a multiple of {CHUNK}")
        texts, before = self.history.shape[0], self.history.shape[1] if taps is None else taps - 1
        wanted = (rows,), (1,), (rows // CHUNK,), (texts, 3), (texts, before), (texts, before)
        for (name, tensor), shape in zip(self._asdict().items(), wanted, strict=True):
            lies = tensor.is_contiguous() and tensor.device == device
            if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or not lies:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: give int32 {list(shape)}, "
                    f"contiguous, on {device}"
                )


class ChunkInputs:
    """The host's side of a `ChunkBatch`.

    Attributes:
        batch: the device's side; its addresses never change.
        streams: int64 [streams, S], where each stream of each text goes (see `keep_rows`); 0 is nowhere.
    """

    def __init__(self, rows: int, texts: int, taps: int, streams: int, device: torch.device | str) -> None:
        """For up to `rows` rows, a multiple of CHUNK, and `texts` texts, of whose streams `streams` may be wanted."""
        shapes = (streams, texts, 2), (1,), (rows // CHUNK,), (texts, 3), (texts, taps - 1), (texts, taps - 1), (rows,)
        sizes = [int(np.prod(shape)) for shape in shapes]
        whole = Upload(Upload.room(*sizes), device)
        self._sides = [whole, *(Upload(Upload.room(*sizes), device, into=whole.buffer) for _ in range(_SIDES - 1))]
        parts = [[Upload(size, device, within=side) for size in sizes] for side in self._sides]
        self._words = [
            [part.words().reshape(shape) for part, shape in zip(of_side, shapes, strict=True)] for of_side in parts
        ]
        kept, counted, owner, of_texts, history, places, tokens = (
            part.buffer.view(shape) for part, shape in zip(parts[0], shapes, strict=True)
        )
        self.batch = ChunkBatch(tokens, counted, owner, of_texts, history, places)
        self.streams = kept.view(torch.int64).squeeze(2)
        self._before_tokens = Upload.room(*sizes[:-1])
        self._turn = 0

    def put(self, texts: Sequence[ChunkText], rows: int) -> None:
        """Starts the copy of these texts, one behind the other, for launches over `rows` rows."""
        self._turn = (self._turn + 1) % _SIDES
        side = self._sides[self._turn]
        side.words()  # waits until a former copy no longer reads it
        kept, counted, owner, of_texts, history, places, tokens = self._words[self._turn]
        kept[:], owner[:], of_texts[:], first, end = 0, -1, 0, 0, 0
        for index, text in enumerate(texts):
            count = len(text.tokens)
            end, blocks = first + count, -(-count // CHUNK)
            owner[first // CHUNK : first // CHUNK + blocks] = index
            of_texts[index] = first, count, text.slot
            history[index] = text.history
            places[index] = -1
            places[index, : len(text.kept)] = text.kept
            for stream, address in text.streams.items():
                kept.view(np.int64)[stream, index] = address
            tokens[first:end] = text.tokens
            first += blocks * CHUNK
            tokens[end:first] = 0
        assert first <= rows, "more rows than were asked for"
        counted[0] = end
        side.send(self._before_tokens + rows)
