"""Services as processes of their own, started by the command line as a user would."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue

_RUN = "from specla.client.cli.main import run; run()"


def command(*arguments: str) -> list[str]:
    """`specla ARGUMENTS`, by this interpreter."""
    return [sys.executable, "-c", _RUN, *arguments]


class Service:
    """One `specla serve ROLE`, ready; use it as a context manager.

    Attributes:
        address: host:port as bound.
        log: file of its standard error.
    """

    def __init__(
        self, role: str, *arguments: str, log: Path, ready_as: str | None = None, ready_s: float = 60.0
    ) -> None:
        self.role = ready_as or role
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command("serve", role, *arguments),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = self._wait_ready(ready_s)

    def kill(self) -> None:
        """As a crash: no chance to say goodbye."""
        self.process.kill()
        self.process.wait()

    def terminate(self, seconds: float = 20.0) -> int:
        """Ask it to stop; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.terminate()
        except subprocess.TimeoutExpired:
            self.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _wait_ready(self, seconds: float) -> str:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            line = ""
        found = re.fullmatch(rf"READY {self.role}=(\S+)\n", line)
        if found is None:
            self.kill()
            raise RuntimeError(f"{self.role} was not ready: {line!r}\n{self.log.read_text()[-4000:]}")
        return found[1]
