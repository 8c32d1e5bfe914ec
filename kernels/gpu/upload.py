"""Small arrays that change with every pass: written on the host, copied to a fixed address on the device.

Within a captured graph the device fetches the words itself: behind a copy the first kernel begins 6 to 14 us late.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

_ALIGNED = 4  # words: parts begin at multiples of 16 bytes
_BLOCK = 1024  # words of a program that fetches


@triton.jit(do_not_specialize=["WORDS"])
def _fetch(p_host, p_device, WORDS, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (blocks of words,)."""
    if OVERLAP:
        gdc_launch_dependents()
    o_first = tl.program_id(0) * BLOCK + 4 * tl.arange(0, BLOCK // 4)[:, None]
    o_word = o_first + tl.arange(0, 4)[None, :]  # 16 bytes a thread
    words = tl.load(p_host + o_word, mask=o_first < WORDS)
    tl.store(p_device + o_word, words, mask=o_first < WORDS)


class Upload:
    """int32 words on the host and their copy on the device.

    Attributes:
        buffer: int32 [words] on the device; its address never changes, so that a captured graph may read it.
    """

    def __init__(
        self, words: int, device: torch.device | str, *, within: Upload | None = None, into: Tensor | None = None
    ) -> None:
        """All zeros, here and there.

        Args:
            words: how many.
            device: where they go.
            within: another one, whose next free words these are. It sends all its parts at once: `send` of a part does
                nothing.
            into: int32 [words] on the device, where another one's words go as well: the host then writes one while
                the other is still being copied.

        Raises:
            ValueError: the other one has no room for so many.
        """
        self._whole = within
        self._used = 0
        self._host: Tensor
        self.buffer: Tensor
        if within is not None:
            first = within._take(words)
            self._host, self.buffer = within._host[first : first + words], within.buffer[first : first + words]
            self._words: NDArray[np.int32] = self._host.numpy()
            return
        on_gpu = torch.device(device).type == "cuda"
        room = self.room(words)  # `fetch` takes whole pieces of 16 bytes
        self._host = torch.zeros(room, dtype=torch.int32, pin_memory=on_gpu)[:words]
        self._words = self._host.numpy()
        self._own_event = torch.cuda.Event() if on_gpu else None
        self._sent: Callable[[], object] | None = None
        self.buffer = torch.zeros(room, dtype=torch.int32, device=device)[:words] if into is None else into

    @staticmethod
    def room(*parts: int) -> int:
        """Words that hold parts of so many words each."""
        return sum(-(-words // _ALIGNED) * _ALIGNED for words in parts)

    def words(self) -> NDArray[np.int32]:
        """The host's side, to be written: waits until a former copy no longer reads it."""
        (self._whole or self)._wait()
        return self._words

    def send(self, words: int | None = None) -> None:
        """Starts the copy of the first `words` (all, if unset): one transfer, in the order of the current stream.

        Within the capture of a graph the copy becomes part of it, and a replay is what `words` must wait for: `sent`
        says how that is done.
        """
        if self._whole is not None:
            return
        self.buffer[:words].copy_(self._host[:words], non_blocking=True)
        self._note()

    def fetch(self) -> None:
        """`send` of all words as a kernel that reads them where they are, for the first launch of a captured graph.

        The next launch, if it overlaps, may begin at once: it must wait before it reads any, and let others begin only
        then.
        """
        if self.buffer.device.type != "cuda" or self._whole is not None:
            self.send()
            return
        words = len(self.buffer)
        _fetch[(triton.cdiv(words, _BLOCK),)](self._host, self.buffer, words, BLOCK=_BLOCK, OVERLAP=True, num_warps=4)
        self._note()

    def sent(self, wait: Callable[[], object]) -> None:
        """Notes that a copy is queued; `wait` returns once it, or something behind it, is over."""
        self._sent = wait

    def arrived(self) -> None:
        """Notes that the last copy is over, for whoever has waited for something behind it."""
        self._sent = None

    def _note(self) -> None:
        if self._own_event is not None and not torch.cuda.is_current_stream_capturing():
            self._own_event.record(torch.cuda.current_stream(self.buffer.device))
            self.sent(self._own_event.synchronize)

    def _wait(self) -> None:
        if self._sent is not None:
            self._sent()
            self._sent = None

    def _take(self, words: int) -> int:
        first, self._used = self._used, self._used + self.room(words)
        if first + words > len(self._host):
            raise ValueError(f"{words} words do not fit behind {first} of {len(self._host)}")
        return first
