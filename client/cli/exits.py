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
        complain(f"{error.name} is not installed; pip install 'specla[verifier]' (or [train], [dev]) brings it")
        raise typer.Exit(FAILED) from None
    except FileNotFoundError as error:
        complain(f"{error.filename}: no such file")
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


def complain(text: str) -> None:
    """One line on standard error."""
    typer.echo(f"specla: {text}", err=True)
