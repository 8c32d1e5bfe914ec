"""Functions that numba compiles at their first call, for loops on the host that Python would make dear."""

import logging
from functools import cache
from typing import Any

from numba import njit

_log = logging.getLogger(__name__)


@cache
def _warn_once() -> None:
    _log.warning("no folder for compiled code can be written: compiling at every start (NUMBA_CACHE_DIR names one)")


def compiled(function: Any) -> Any:
    """Compiled at the first call and kept on disk (see NUMBA_CACHE_DIR); runs without the interpreter's lock."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        _warn_once()
        return njit(nogil=True, error_model="numpy")(function)
