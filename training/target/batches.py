"""Which tokens a step sees: rows drawn from the domains' streams, a pure function of (seed, step)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.training.data.shards import read_shard


class Batches:
    """Rows of `length + 1` tokens in a mixed order; every stream is read to its end before any part of it comes again.

    Resuming needs nothing but the step's number: the draw of domains and the order inside each are fixed by the seed.
    """

    def __init__(
        self,
        folder: Path,
        mix: Mapping[str, float],
        *,
        batch: int,
        length: int,
        steps: int,
        seed: int,
        device: torch.device,
    ) -> None:
        """Load the training streams onto the device.

        Raises:
            FileNotFoundError: a stream that the mix asks for was not built.
            ValueError: a stream shorter than one row.
        """
        self.batch, self.length, self.seed = batch, length, seed
        domains = sorted(domain for domain, share in mix.items() if share > 0)
        streams = [read_shard(folder, domain, "train") for domain in domains]
        for domain, stream in zip(domains, streams, strict=True):
            if len(stream) <= length:
                raise ValueError(f"the stream of {domain} holds {len(stream)} tokens; a row needs {length + 1}")
        self._rows = [(len(stream) - 1) // length for stream in streams]
        self._bases = np.cumsum([0, *map(len, streams[:-1])])
        self.tokens = torch.from_numpy(np.concatenate(streams).astype(np.int32)).to(device)
        edges = np.cumsum([mix[domain] for domain in domains])
        draw = np.random.default_rng(seed).random(steps * batch) * edges[-1]
        self._domain = np.searchsorted(edges, draw, side="right").clip(max=len(domains) - 1)
        self._nth = np.empty(steps * batch, np.int64)  # how often the row's domain was drawn before it
        for i in range(len(domains)):
            chosen = self._domain == i
            self._nth[chosen] = np.arange(chosen.sum())
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}
        self.distinct = {domain: len(stream) for domain, stream in zip(domains, streams, strict=True)}

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step: two `[batch, length]` int64 tensors, the second one token later."""
        rows = range(step * self.batch, (step + 1) * self.batch)
        starts = torch.tensor([self._start(row) for row in rows], device=self.tokens.device)
        window = starts[:, None] + torch.arange(self.length + 1, device=self.tokens.device)
        ids = self.tokens[window].long()
        return ids[:, :-1], ids[:, 1:]

    def _start(self, row: int) -> int:
        domain, nth = int(self._domain[row]), int(self._nth[row])
        epoch, place = divmod(nth, self._rows[domain])
        key = (domain, epoch)
        if key not in self._orders:
            self._orders[key] = np.random.default_rng([self.seed, domain, epoch]).permutation(self._rows[domain])
        return int(self._bases[domain] + self._orders[key][place] * self.length)


def validation_rows(folder: Path, domain: str, *, length: int, rows: int, device: torch.device) -> Tensor:
    """The first rows of a domain's validation stream: `[rows, length + 1]` int64, fewer rows if it is short."""
    stream = np.asarray(read_shard(folder, domain, "validation"))
    rows = min(rows, (len(stream) - 1) // length)
    cut = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(rows)])
    return torch.from_numpy(cut.astype(np.int64)).to(device)
