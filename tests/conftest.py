"""What all tests share: repeatable property tests, few threads, and a tiny random target."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported anywhere: these tests multiply small matrices, for which threads only cost.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Before Triton is imported anywhere: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tiny_target import make_tiny_target

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def logs_as_structlog_has_them() -> Iterator[None]:
    """A test that configures the process's logs does not do so for the next."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random target: 2 layers, 2 heads of 16, hidden 64, 320 tokens. Read only."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny_target"))


@pytest.fixture(scope="session")
def tiny_target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny targets of other shapes, each once: `tiny_target_of(v_heads=4, tied=False)`. Read only."""
    made: dict[tuple[tuple[str, object], ...], Path] = {}

    def make(**shape: object) -> Path:
        key = tuple(sorted(shape.items()))
        if key not in made:
            made[key] = make_tiny_target(tmp_path_factory.mktemp("tiny_target"), **shape)  # type: ignore[arg-type]
        return made[key]

    return make
