"""Launches captured as a CUDA graph, while other engines of the same process may be at work."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ONE_AT_A_TIME = threading.Lock()
"""A capture begins by waiting for the whole device, which CUDA refuses while any other one is under way."""


def captured(launch: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` starts, which is compiled already; nothing of it runs.

    Other threads may launch, wait and allocate meanwhile: only this one is watched for calls that cannot be captured.

    Args:
        launch: starts kernels on the current stream.
        pool: handle of the memory that graphs take while they are captured.
    """
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails does not come back by itself
    with (
        _ONE_AT_A_TIME,
        _no_garbage_collected(),
        here,
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        launch()
    return graph


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Among the garbage may be a graph, to free which is a call that cannot be captured: it would end the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
