"""The one way into the scheduler's thread: work posted from any thread, done between passes, or while one runs."""

import threading
import time
from collections.abc import Callable

Work = Callable[[], object]


class Mailbox:
    """A list of work under a condition. `post` never blocks for longer than an append takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._has_work = threading.Condition()
        self._work: list[tuple[Work, bool]] = []

    def __len__(self) -> int:
        return len(self._work)

    def post(self, work: Work, *, early: bool = False) -> None:
        """Have `work` done on the scheduler's thread, in the order of posting; `early` if a pass may be running."""
        with self._has_work:
            self._work.append((work, early))
            self._has_work.notify()

    def take(self) -> list[Work]:
        """All that was posted since the last call."""
        if not self._work:
            return []
        with self._has_work:
            work, self._work = self._work, []
        return [each for each, _ in work]

    def take_early(self) -> list[Work]:
        """What may be done while a pass runs, as far as nothing else was posted before it."""
        with self._has_work:
            count = next((i for i, (_, early) in enumerate(self._work) if not early), len(self._work))
            work, self._work = self._work[:count], self._work[count:]
        return [each for each, _ in work]

    def wait(self, until: float) -> None:
        """Return when there is work, or at the time `until` of the clock."""
        with self._has_work:
            while not self._work:
                left = until - self._clock()
                if left <= 0:
                    return
                self._has_work.wait(left)
