"""The errors every part raises at its boundary, each with its canonical code, and what mends it.

Knows nothing of gRPC: `specla.rpc.status` turns these into google.rpc.Status and back.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

Code = Literal[
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
]


class SpeclaError(Exception):
    """Base of all errors that may reach a caller.

    Attributes:
        message: what was wrong; never holds prompt text or ids of a prompt.
        hint: what is allowed, and how to mend it.
        metadata: short machine-readable facts (limits, names), sent as ErrorInfo.
    """

    code: ClassVar[Code] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, hint: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{message}. {hint}" if hint else message)
        self.message = message
        self.hint = hint
        self.metadata = dict(metadata or {})


class InvalidRequestError(SpeclaError):
    """A field holds what it may not hold."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str, *, hint: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message, hint=hint, metadata=metadata)
        self.field = field


class PromptTooLongError(InvalidRequestError):
    """The prompt has more tokens than `max_prompt_tokens`."""

    reason = "PROMPT_TOO_LONG"


class TopologyRefusedError(InvalidRequestError):
    """A draft's tree is malformed."""

    reason = "TOPOLOGY_REFUSED"


class UnknownSessionError(SpeclaError):
    """No session of that id lives here."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_SESSION"


class AttachRefusedError(SpeclaError):
    """The attach token is not the one that counts now."""

    code = "PERMISSION_DENIED"
    reason = "ATTACH_REFUSED"


class NumericsMismatchError(SpeclaError):
    """The text was begun under another numerics_id."""

    code = "FAILED_PRECONDITION"
    reason = "NUMERICS_MISMATCH"


class UnsupportedModelError(SpeclaError):
    """A checkpoint this project cannot run: says what was found and what is supported."""

    code = "FAILED_PRECONDITION"
    reason = "UNSUPPORTED_MODEL"


class CapacityError(SpeclaError):
    """No slot, no queue place: try again later.

    Attributes:
        retry_after_s: when it may be worth trying again.
    """

    code = "RESOURCE_EXHAUSTED"
    reason = "NO_CAPACITY"

    def __init__(self, message: str, *, retry_after_s: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class DeadlineError(SpeclaError):
    """The caller's time ran out."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class SessionCancelledError(SpeclaError):
    """The caller, or the loss of its stream, ended the session."""

    code = "CANCELLED"
    reason = "CANCELLED"


class ServiceUnavailableError(SpeclaError):
    """The service is starting, draining or gone."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class InternalError(SpeclaError):
    """A fault of ours; the log has the trace under the id in `metadata`."""
