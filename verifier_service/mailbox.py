"""The one way into the scheduler's thread: work posted from any thread, done between passes."""

import threading
import time
from collections.abc import Callable

Work = Callable[[], object]


class Mailbox:
    """A list of work under a condition. `post` never blocks for longer than an append takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._has_work = threading.Condition()
        self._work: list[Work] = []

    def __len__(self) -> int:
        return len(self._work)

    def post(self, work: Work) -> None:
        """Have `work` done on the scheduler's thread, in the order of posting."""
        with self._has_work:
            self._work.append(work)
            self._has_work.notify()

    def take(self) -> list[Work]:
        """All that was posted since the last call."""
        with self._has_work:
            work, self._work = self._work, []
        return work

    def wait(self, until: float) -> None:
        """Return when there is work, or at the time `until` of the clock."""
        with self._has_work:
            while not self._work:
                left = until - self._clock()
                if left <= 0:
                    return
                self._has_work.wait(left)
