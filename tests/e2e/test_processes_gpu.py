"""Services whose verifiers run on a GPU: the text is that of plain decoding, whoever drafts, joins or dies."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from happenings import generate_and, wait_until

from specla.client import Client, GenerateResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(500),
]

PROMPTS = [f"Question: Tom has {count} apples and gives {count // 2} to Ann. Answer:" for count in range(10, 16)]
TOKENS = 300


@pytest.fixture(scope="module")
def cluster(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(tiny_target, tmp_path_factory.mktemp("logs"), stack, device="cuda")


def generate(client: Client, number: int, **options: object) -> GenerateResult:
    wishes = {"temperature": 1.0, "seed": number, "ignore_eos": True, "max_tokens": TOKENS}
    return client.generate(PROMPTS[number], **(wishes | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> list[GenerateResult]:
    """Each text alone and without drafts."""
    with Client(cluster.coordinator.address) as client:
        return [generate(client, number, drafter="none") for number in range(len(PROMPTS))]


def test_texts_that_run_together_are_those_that_ran_alone(cluster: Cluster, plain: list[GenerateResult]) -> None:
    drafters = ["suffix", "random", "lookup", "none", "suffix", "random"]
    with Client(cluster.coordinator.address) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        results = list(pool.map(lambda n: generate(client, n, drafter=drafters[n]), range(len(PROMPTS))))
    assert [result.token_ids for result in results] == [want.token_ids for want in plain]
    assert sum(result.usage.drafted_tokens for result in results) > TOKENS
    assert len({result.text for result in results}) == len(PROMPTS)


def test_a_killed_drafter_changes_no_text(cluster: Cluster, plain: list[GenerateResult]) -> None:
    doomed = cluster.start_drafter("lookup")
    with cluster.start_coordinator([cluster.verifier], [doomed]) as coordinator, Client(coordinator.address) as client:
        result = generate_and(
            client, PROMPTS[1], 60, doomed.kill, temperature=1.0, seed=1, ignore_eos=True, max_tokens=TOKENS
        )
    assert result.token_ids == plain[1].token_ids


def test_a_killed_verifier_is_followed_by_another_in_the_same_text(
    cluster: Cluster, plain: list[GenerateResult]
) -> None:
    doomed = cluster.start_verifier()
    with (
        cluster.start_coordinator([doomed, cluster.verifier], [cluster.drafters["suffix"]]) as coordinator,
        Client(coordinator.address) as client,
    ):
        wait_until(lambda: coordinator.log.read_text().count("verifier connected") == 2)
        result = generate_and(
            client, PROMPTS[2], 80, doomed.kill, temperature=1.0, seed=2, ignore_eos=True, max_tokens=TOKENS
        )
    assert result.token_ids == plain[2].token_ids
    wait_until(lambda: not cluster.sessions())


def test_a_verifier_that_is_told_to_stop_ends_well(cluster: Cluster) -> None:
    assert cluster.start_verifier().terminate() == 0
