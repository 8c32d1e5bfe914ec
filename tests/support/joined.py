"""What an end-to-end test gets, whichever way the parts are joined."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from specla.client.blocking import BlockingGenerator
from specla.v1 import verifier_pb2


@dataclass(frozen=True)
class Joined:
    """A way to generate, and a look at the verifier behind it."""

    client: BlockingGenerator
    sessions: Callable[[], list[verifier_pb2.SessionInfo]]

    def wait_until_empty(self, seconds: float = 5.0) -> None:
        """Until no session lives on the verifier."""
        until = time.monotonic() + seconds
        while self.sessions():
            assert time.monotonic() < until, "a session outlived its caller"
            time.sleep(0.01)
