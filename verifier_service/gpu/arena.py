"""Device memory that passes share: each bucket lays out what lives during a pass, and passes follow each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIGNED = 256  # bytes


class Layout:
    """Tensors one behind the other, from a place of some memory on; without memory it only counts bytes.

    Attributes:
        nbytes: bytes of what was taken so far, from the memory's beginning.
    """

    def __init__(self, memory: Tensor | None, first: int = 0) -> None:
        """From byte `first` of uint8 [bytes] on; None counts only."""
        self._memory = memory
        self.nbytes = first

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The next tensor, uninitialised; on the meta device where there is no memory.

        Raises:
            ValueError: the memory ends before.
        """
        first = -(-self.nbytes // _ALIGNED) * _ALIGNED
        self.nbytes = first + math.prod(shape) * dtype.itemsize
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if self.nbytes > len(self._memory):
            raise ValueError(f"{self.nbytes} bytes do not fit {len(self._memory)} of the arena")
        return self._memory[first : self.nbytes].view(dtype).view(shape)

    def beside(self) -> Layout:
        """Another layout from here on: what is taken of it shares memory with what is taken of this one later."""
        return Layout(self._memory, self.nbytes)
