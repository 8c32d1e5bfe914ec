"""Small arrays that change with every pass: written on the host, copied to a fixed address on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class Upload:
    """int32 words on the host and their copy on the device.

    Attributes:
        buffer: int32 [words] on the device; its address never changes, so that a captured graph may read it.
    """

    def __init__(self, words: int, device: torch.device | str) -> None:
        """All zeros, here and there."""
        on_gpu = torch.device(device).type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None
        self.buffer = torch.zeros(words, dtype=torch.int32, device=device)

    def words(self) -> NDArray[np.int32]:
        """The host's side, to be written: waits until a former copy no longer reads it."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._host.numpy()

    def send(self, words: int | None = None) -> None:
        """Starts the copy of the first `words` (all, if unset): one transfer, in the order of the current stream."""
        self.buffer[:words].copy_(self._host[:words], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.buffer.device))
