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
        self.tokens = torch.from_numpy(np.concatenate(streams).astype(np.int32)).to(device)
        edges = np.cumsum([mix[domain] for domain in domains])
        draw = np.random.default_rng(seed).random(steps * batch) * edges[-1]
        domain_of = np.searchsorted(edges, draw, side="right").clip(max=len(domains) - 1)
        starts = np.empty(steps * batch, np.int64)
        base = 0
        for i, stream in enumerate(streams):
            chosen = domain_of == i
            starts[chosen] = base + self._places(len(stream), int(chosen.sum()), i)
            base += len(stream)
        self.starts = torch.from_numpy(starts).to(device)  # on the device, so that no step waits for a copy
        self.distinct = {domain: len(stream) for domain, stream in zip(domains, streams, strict=True)}

    def _places(self, tokens: int, count: int, stream: int) -> NDArray[np.int64]:
        """The first `count` row starts of a stream: all its rows in a shuffled order, then again in another."""
        rows = (tokens - 1) // self.length
        epochs = range(-(-count // rows))
        orders = [np.random.default_rng([self.seed, stream, epoch]).permutation(rows) for epoch in epochs]
        return np.concatenate(orders or [np.empty(0, np.int64)])[:count] * self.length

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step: two `[batch, length]` int64 tensors, the second one token later."""
        starts = self.starts[step * self.batch : (step + 1) * self.batch]
        window = starts[:, None] + torch.arange(self.length + 1, device=self.tokens.device)
        ids = self.tokens[window].long()
        return ids[:, :-1], ids[:, 1:]


def validation_rows(folder: Path, domain: str, *, length: int, rows: int, device: torch.device) -> Tensor:
    """The first rows of a domain's validation stream: `[rows, length + 1]` int64, repeated if it is short."""
    stream = np.asarray(read_shard(folder, domain, "validation"))
    held = (len(stream) - 1) // length
    if held < 1:
        raise ValueError(f"the validation stream of {domain} holds {len(stream)} tokens; a row needs {length + 1}")
    cut = np.stack([stream[i % held * length : (i % held + 1) * length + 1] for i in range(rows)])
    return torch.from_numpy(cut.astype(np.int64)).to(device)
