"""What a drafter is told at its start: which one it is, where it listens, whom it may speak to, how it drafts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specla.rpc.errors import InvalidRequestError
from specla.rpc.settings import ServingConfig, check_distinct

Drafting = Literal["lookup", "suffix", "random"]
NameAlone = Literal["none", Drafting]
Name = Literal[NameAlone, "oracle"]
BY_NAME: tuple[NameAlone, ...] = get_args(NameAlone)
"""Drafters that need nothing but their name."""

KNOWN: tuple[Name, ...] = get_args(Name)
DEFAULTS: tuple[NameAlone, ...] = ("suffix", "lookup")  # of one process, the preferred one first
PATTERN = re.compile(r"(\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\*|[0-9]{1,5})")
ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(ServingConfig):
    """Settings of one drafter; where it listens is ServingConfig's.

    Attributes:
        name: which drafter; random and oracle are for tests and benchmarks.
        port: 0 lets the system choose.
        drain_s: how long a stop waits for sessions in hand, seconds.
        allow_verifiers: HOST:PORT of verifiers it may be sent to; HOST may be `*` or begin with `*.`, PORT may be `*`.
        connect_ca: PEM file of the authority that verifiers' certificates are signed by; unset: plain text to them.
        max_sessions: sessions drafted for at a time, for each verifier.
        max_nodes: candidates of one draft at most, whatever the verifier's budget.
        tau: nats that a candidate's path may be less likely than the likeliest candidate.
        branching: lookup, suffix: continuations considered behind one node.
        min_ngram: lookup: tokens of the shortest context worth a match.
        max_ngram: lookup: tokens of context at which the search for the longest match begins.
        share_history: suffix: draft from earlier outputs of this process as well, whoever asked for them. No text
            passes from one session to another, but a text's speed can tell that the like was produced before.
        history_tokens: suffix: tokens of earlier outputs kept, some 400 bytes each, if `share_history`.
        seed: random, oracle: equal seeds draft alike.
        random_probability: random: what it claims of each of its worthless candidates.
        oracle_file: oracle: JSON lines, each {"token_ids": [prompt and output]}.
        oracle_rate: oracle: share of the positions at which it is right.
        oracle_branching: oracle: candidates a position; 1 drafts chains.
    """

    name: Name = "lookup"
    port: int = 50071
    drain_s: float = 2.0
    allow_verifiers: tuple[str, ...] = ("localhost:*", "127.0.0.1:*", "[::1]:*")
    connect_ca: Path | None = None
    max_sessions: int = 512
    max_nodes: int = 32
    tau: float = 4.0
    branching: int = 3
    min_ngram: int = 2
    max_ngram: int = 8
    share_history: bool = False
    history_tokens: int = 262_144
    seed: int = 0
    random_probability: float = 0.5
    oracle_file: Path | None = None
    oracle_rate: float = 0.8
    oracle_branching: int = 1

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            InvalidRequestError: names the field, what it holds and what it may hold.
        """
        self.check_serving()
        if self.name not in KNOWN:
            raise InvalidRequestError("name", f"no drafter is called {self.name!r}", hint=_known_here(KNOWN))
        self._check("max_sessions", self.max_sessions >= 1, "1 or more")
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
        if self.name == "oracle" and self.oracle_file is None:
            raise InvalidRequestError(
                "oracle_file",
                "the drafter 'oracle' has no recorded text to draft from",
                hint='Give oracle_file, a path of JSON lines {"token_ids": [prompt and output]}',
            )
        for pattern in self.allow_verifiers:
            self._check("allow_verifiers", PATTERN.fullmatch(pattern) is not None, "HOST:PORT, *.DOMAIN:PORT, HOST:*")

    @classmethod
    def of_name(cls, name: str, field: str = "drafters") -> "DrafterConfig":
        """The defaults of a drafter that needs nothing but its name.

        Raises:
            InvalidRequestError: `field` holds another name.
        """
        known = next((one for one in BY_NAME if one == name), None)
        if known is None:
            what = (
                "the drafter 'oracle' runs as a service only" if name == "oracle" else f"no drafter is called {name!r}"
            )
            raise InvalidRequestError(field, what, hint=_known_here(BY_NAME))
        return cls(name=known)

    @classmethod
    def of_names(cls, names: Sequence[str], field: str = "drafters") -> "list[DrafterConfig]":
        """The same for several, as requests may choose from.

        Raises:
            InvalidRequestError: `field` holds another name, or one of them twice.
        """
        check_distinct(field, names)
        return [cls.of_name(name, field) for name in names]

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
            raise InvalidRequestError(field, f"{field} is {getattr(self, field)!r}", hint=f"Allowed: {allowed}")


def _known_here(names: Sequence[str]) -> str:
    return f"Known here: {', '.join(names)}"
