"""What a drafter is told at its start: which one it is, where it listens, whom it may speak to, how it drafts."""

import math
import re
from dataclasses import dataclass

from specla.rpc.errors import InvalidRequestError

KNOWN = ("none", "lookup", "suffix", "random", "oracle")
PATTERN = re.compile(r"(\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\*|[0-9]{1,5})")
ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Settings of one drafter; a field is a flag of `specla serve drafter` and a key of its file.

    Attributes:
        name: which drafter: none, lookup, suffix; for tests and benchmarks also random, oracle.
        listen: address to listen on; beyond loopback only with TLS or `insecure`.
        port: TCP port; 0 takes a free one.
        allow_verifiers: HOST:PORT of verifiers it may be sent to; HOST may be `*` or begin with `*.`, PORT may be `*`.
        verifier_root_ca: file of the PEM certificates that verifiers must be signed by; unset: plain text to verifiers.
        max_sessions: sessions drafted for at a time, for each verifier.
        grace_s: seconds that running sessions have after a signal to stop.
        insecure: serve beyond loopback without TLS.
        tls_certificate: file of the PEM certificate chain; needs `tls_key`.
        tls_key: file of the PEM private key.
        max_nodes: candidates of one draft at most, whatever the verifier's budget.
        tau: nats that a candidate's path may be less likely than the likeliest candidate.
        branching: lookup, suffix: continuations considered behind one node.
        min_ngram: lookup: tokens of the shortest context worth a match.
        max_ngram: lookup: tokens of context at which the search for the longest match begins.
        share_history: suffix: draft from earlier outputs of this process as well, whoever asked for them. No text
            passes from one session to another, but a text's speed can tell that the like was produced before.
        history_tokens: suffix: tokens of earlier outputs kept, if `share_history`.
        seed: random, oracle: equal seeds draft alike.
        random_probability: random: what it claims of each of its worthless candidates.
        oracle_file: oracle: JSON lines, each {"token_ids": [prompt and output]}.
        oracle_rate: oracle: share of the positions at which it is right.
        oracle_branching: oracle: candidates a position; 1 drafts chains.
    """

    name: str = "lookup"
    listen: str = "127.0.0.1"
    port: int = 50071
    allow_verifiers: tuple[str, ...] = ("localhost:*", "127.0.0.1:*", "[::1]:*")
    verifier_root_ca: str = ""
    max_sessions: int = 1024
    grace_s: float = 5.0
    insecure: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    max_nodes: int = 32
    tau: float = 4.0
    branching: int = 3
    min_ngram: int = 2
    max_ngram: int = 8
    share_history: bool = False
    history_tokens: int = 262_144
    seed: int = 0
    random_probability: float = 0.5
    oracle_file: str = ""
    oracle_rate: float = 0.8
    oracle_branching: int = 1

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            InvalidRequestError: names the field, what it holds and what it may hold.
        """
        if self.name not in KNOWN:
            raise InvalidRequestError("name", f"no drafter is called {self.name!r}", hint=f"known: {', '.join(KNOWN)}")
        self._check("port", 0 <= self.port <= 65535, "0 to 65535")
        self._check("max_sessions", self.max_sessions >= 1, "1 or more")
        self._check("grace_s", math.isfinite(self.grace_s) and self.grace_s >= 0, "0 or more seconds")
        self._check("max_nodes", 1 <= self.max_nodes <= 128, "1 to 128")
        self._check("tau", math.isfinite(self.tau) and self.tau > 0, "a finite number above 0")
        self._check("seed", self.seed >= 0, "0 or more")
        self._check("min_ngram", self.min_ngram >= 1, "1 or more")
        self._check("max_ngram", self.min_ngram <= self.max_ngram <= 32, "min_ngram to 32")
        self._check("branching", 1 <= self.branching <= 16, "1 to 16")
        self._check("history_tokens", self.history_tokens >= 1, "1 or more")
        self._check("random_probability", 0 < self.random_probability <= 1, "above 0, up to 1")
        self._check("oracle_rate", 0 <= self.oracle_rate <= 1, "0 to 1")
        self._check("oracle_branching", 1 <= self.oracle_branching <= 16, "1 to 16")
        self._check("oracle_file", self.name != "oracle" or bool(self.oracle_file), "the path of a recorded text")
        for pattern in self.allow_verifiers:
            self._check("allow_verifiers", PATTERN.fullmatch(pattern) is not None, "HOST:PORT, *.DOMAIN:PORT, HOST:*")
        self._check("tls_key", bool(self.tls_key) == bool(self.tls_certificate), "set together with tls_certificate")

    def allows(self, address: str) -> bool:
        """Whether `allow_verifiers` has a pattern for this HOST:PORT; anything else, such as a URI, has none."""
        if ADDRESS.fullmatch(address) is None:
            return False
        host, _, port = address.rpartition(":")
        for pattern in self.allow_verifiers:
            allowed_host, _, allowed_port = pattern.rpartition(":")
            if allowed_port in ("*", port) and (
                allowed_host in ("*", host) or (allowed_host.startswith("*.") and host.endswith(allowed_host[1:]))
            ):
                return True
        return False

    def _check(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise InvalidRequestError(field, f"{field} is {getattr(self, field)!r}", hint=f"allowed: {allowed}")
