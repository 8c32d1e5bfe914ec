"""The three kinds of service as processes of their own, for benchmarks that compare joins."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from specla.client.sdk import Client
from specla.rpc.errors import ServiceUnavailableError

_SPECLA = (sys.executable, "-c", "from specla.client.cli.main import run; run()")
STOP_S = 20.0


@contextmanager
def services(
    target: Path,
    drafters: Sequence[str],
    *,
    verifier_options: Sequence[str] = (),
    drafter_options: Sequence[str] = (),
) -> Iterator[Client]:
    """A verifier, one drafter service a name and a coordinator, on free ports of the loopback; yields a client.

    Args:
        target: the checkpoint.
        drafters: names; "none" needs no service.
        verifier_options: further flags of `specla serve verifier`.
        drafter_options: further flags of each `specla serve drafter`.

    Raises:
        ServiceUnavailableError: a service ended before it was ready.
    """
    with ExitStack() as stack:
        verifier = stack.enter_context(_serve("verifier", ["--target", str(target), *verifier_options]))
        addresses = [
            stack.enter_context(_serve("drafter", ["--name", name, "--allow-verifiers", verifier, *drafter_options]))
            for name in drafters
            if name != "none"
        ]
        coordinator = stack.enter_context(
            _serve(
                "coordinator",
                ["--verifiers", verifier, "--tokenizer", str(target), *(f"--drafters={a}" for a in addresses)],
            )
        )
        yield stack.enter_context(Client(coordinator))


@contextmanager
def _serve(role: str, options: Sequence[str]) -> Iterator[str]:
    """One service; yields the address it bound."""
    command = [*_SPECLA, "serve", role, "--port", "0", "--log-level", "warning", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if not words or words[0] != "READY":
            raise ServiceUnavailableError(f"the {role} service ended before it was ready", hint="Its messages say why")
        yield words[1].split("=", 1)[1]
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
