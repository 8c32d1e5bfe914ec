"""Faults of ours: what is told about an exception that nobody foresaw.

Whoever asked hears INTERNAL with an id and nothing of the exception's text, which could hold a prompt. The log gets the
trace under that id.
"""

import secrets
import traceback
from collections.abc import Callable

import structlog

from specla.rpc.errors import InternalError

log = structlog.get_logger("specla.rpc")


def fault_of(work: Callable[[], object]) -> Exception | None:
    """What `work` raises, for those who have something to end before they raise it."""
    try:
        work()
    except Exception as fault:
        return fault
    return None


def internal_error(where: str, error: BaseException) -> InternalError:
    """An InternalError for an exception that is a fault of ours; logs its type and trace, never its text."""
    error_id = secrets.token_hex(6)
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("internal error", error_id=error_id, where=where, type=type(error).__name__, trace=frames)
    return InternalError(
        "internal error", hint=f"The server's log has it under {error_id}", metadata={"error_id": error_id}
    )
