"""Where logs go: standard error, as lines for people or JSON for machines; prompts never do."""

import logging
import sys
from typing import Any

import structlog

from specla.rpc.errors import InvalidRequestError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")


def configure_logs(level: str = "info", form: str = "console") -> None:
    """Send this process's logs to standard error.

    Raises:
        InvalidRequestError: no such level or form.
    """
    if level not in LEVELS:
        raise InvalidRequestError("log_level", f"there is no log level {level!r}", hint=f"Use {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise InvalidRequestError("log_format", f"there is no log format {form!r}", hint=f"Use {', '.join(FORMATS)}")
    last: Any
    if form == "json":
        last = structlog.processors.JSONRenderer()
    else:
        last = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if form == "json" else []),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def quiet_unless_configured() -> None:
    """For use inside another program: structlog's own default would print every event to standard output."""
    if not structlog.is_configured():
        configure_logs("warning")
