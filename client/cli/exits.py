"""From errors to exit statuses: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED, USAGE, INTERRUPTED = 1, 2, 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what ends a command into a line on standard error and an exit status.

    Raises:
        typer.Exit: with the status.
    """
    # Imported late in name only: errors know nothing of gRPC and load in no time.
    from specla.rpc.errors import InvalidRequestError, SpeclaError

    try:
        yield
    except InvalidRequestError as error:
        complain(f"{error.field}: {error}" if error.field else str(error))
        raise typer.Exit(USAGE) from None
    except SpeclaError as error:
        complain(str(error))
        raise typer.Exit(FAILED) from None
    except ModuleNotFoundError as error:
        complain(f"{error.name} is not installed; the extra [verifier] ([train], [dev]) brings it: see README.md")
        raise typer.Exit(FAILED) from None
    except FileNotFoundError as error:
        complain(f"{error.filename}: no such file")
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except RuntimeError as error:
        # An interrupt in the middle of a lock's own code can surface as a complaint of the lock.
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()  # its reader has gone: nobody is left to tell
        raise typer.Exit(FAILED) from None
    except OutputError as error:
        _drop_output()
        complain(str(error))
        raise typer.Exit(FAILED) from None


class OutputError(Exception):
    """Standard output takes nothing: it is closed, or its disk is full."""


def write_out(text: str) -> None:
    """Write to standard output, at once.

    Raises:
        OutputError: it takes nothing.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output takes nothing: {error.strerror}") from None


def _drop_output() -> None:
    """Keep the interpreter from flushing what is left into a broken standard output at its exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """One line on standard error."""
    typer.echo(f"specla: {text}", err=True)
