"""Functions that numba compiles at their first call, for loops on the host that Python would make dear."""

import logging
from functools import cache
from typing import Any

try:
    from numba import njit
except ModuleNotFoundError as _error:
    _missing: ModuleNotFoundError | None = _error
else:
    _missing = None

_log = logging.getLogger(__name__)


@cache
def _warn_once() -> None:
    _log.warning("no folder for compiled code can be written: compiling at every start (NUMBA_CACHE_DIR names one)")


def compiled_where_numba_is(function: Any) -> Any:
    """As `compiled`; where there is no numba the function itself, which gives the same and takes longer."""
    return function if _missing is not None else compiled(function)


def compiled(function: Any) -> Any:
    """Compiled at the first call and kept on disk (see NUMBA_CACHE_DIR); runs without the interpreter's lock.

    Raises:
        ModuleNotFoundError: there is no numba.
    """
    if _missing is not None:
        raise _missing
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        _warn_once()
        return njit(nogil=True, error_model="numpy")(function)
