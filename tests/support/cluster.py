"""A verifier, drafters and a coordinator, a process each."""

import contextlib
import time
from pathlib import Path
from typing import Final

import grpc
from processes import Service

from specla.v1 import verifier_pb2, verifier_pb2_grpc

DRAFTERS = ("suffix", "lookup", "random")
MAX_PROMPT = 4096
DRAFTING: Final = "unconditional"  # so small a target gains nothing by drafts: measured, few would be verified
READY_S = {"cpu": 60.0, "cuda": 240.0}  # a GPU's kernels are compiled first
DRAFT_WAIT_S = 2.0  # a draft comes sooner on any machine


class Cluster:
    """A verifier, drafters and a coordinator, a process each."""

    def __init__(self, target: Path, logs: Path, stack: contextlib.ExitStack, device: str = "cpu") -> None:
        self.target = target
        self.device = device
        self.logs = logs
        self._stack = stack
        self.verifier = self.start_verifier()
        self.drafters = {name: self.start_drafter(name) for name in DRAFTERS}
        self.coordinator = self.start_coordinator([self.verifier], list(self.drafters.values()))

    def start_verifier(self) -> Service:
        settings = (
            "--drafting",
            DRAFTING,
            "--max-draft-wait-s",
            str(DRAFT_WAIT_S),
            "--max-prompt-tokens",
            str(MAX_PROMPT),
            "--threads",
            "1",
            "--max-sessions",
            "8",
        )
        if self.device == "cuda":  # which other verifiers have a part of, too
            settings += ("--device", "cuda", "--memory-mib", "4096")
        return self._start("verifier", "--target", str(self.target), *settings, ready_s=READY_S[self.device])

    def start_drafter(self, name: str) -> Service:
        return self._start("drafter", "--name", name)

    def start_coordinator(self, verifiers: list[Service], drafters: list[Service]) -> Service:
        flags = [f"--verifiers={one.address}" for one in verifiers] + [f"--drafters={one.address}" for one in drafters]
        return self._start("coordinator", "--tokenizer", str(self.target), *flags)

    def sessions(self, verifier: Service | None = None) -> list[verifier_pb2.SessionInfo]:
        """What ListSessions says."""
        with grpc.insecure_channel((verifier or self.verifier).address) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            return list(stub.ListSessions(verifier_pb2.ListSessionsRequest(), timeout=10).sessions)

    def _start(self, role: str, *arguments: str, ready_s: float = 60.0) -> Service:
        log = self.logs / f"{role}-{time.monotonic_ns()}.log"
        return self._stack.enter_context(Service(role, "--port", "0", *arguments, log=log, ready_s=ready_s))
