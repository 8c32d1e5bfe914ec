"""The same engine joined in two ways: all in one process, and as processes that speak over sockets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import DRAFT_WAIT_S, DRAFTERS, DRAFTING, MAX_PROMPT, Cluster
from joined import Joined

from specla.client import Client, Local
from specla.verifier_service.config import VerifierConfig


@pytest.fixture(scope="session")
def one_process(tiny_target: Path) -> Iterator[Joined]:
    config = VerifierConfig(
        target=tiny_target,
        threads=1,
        max_prompt_tokens=MAX_PROMPT,
        max_sessions=8,
        drafting=DRAFTING,
        max_draft_wait_s=DRAFT_WAIT_S,
    )
    with Local(verifier=config, drafters=DRAFTERS) as local:
        yield Joined(local, local.parts.scheduler.list_sessions)


@pytest.fixture(scope="session")
def cluster(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(tiny_target, tmp_path_factory.mktemp("logs"), stack)


@pytest.fixture(scope="session")
def processes(cluster: Cluster) -> Iterator[Joined]:
    with Client(cluster.coordinator.address) as client:
        yield Joined(client, cluster.sessions)


@pytest.fixture(params=["one_process", "processes"])
def joined(request: pytest.FixtureRequest) -> Joined:
    """Every test that takes this runs over both joins."""
    made: Joined = request.getfixturevalue(request.param)
    return made
