"""deploy/compose.yaml: docker-compose accepts it, and its services work together as it says."""

import shutil
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from composed import COMPOSE, ENV_EXAMPLE, Composed, interpolate, read_env, read_services
from product_tree import ROOT, package_dirs

from specla.v1 import common_pb2, generation_pb2, generation_pb2_grpc, verifier_pb2, verifier_pb2_grpc

pytestmark = pytest.mark.timeout(400)  # four processes start, each with its imports, on whatever machine this is

SHORT, LONG = 200, 4000  # tokens; the long text lasts while one drafter takes over from the other


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed (.ci/run does)")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_docker_compose_accepts_the_file(files: list[str]) -> None:
    chosen = [part for name in files for part in ("-f", str(ROOT / "deploy" / name))]
    command = ["docker-compose", "--env-file", str(ENV_EXAMPLE), *chosen, "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_roles_and_what_guards_them() -> None:
    services = read_services(read_env())
    assert {name: spec["command"][1] for name, spec in services.items()} == {
        "verifier": "verifier",
        "drafter-lookup": "drafter",
        "drafter-suffix": "drafter",
        "coordinator": "coordinator",
    }
    assert all("healthcheck" in spec and "restart" in spec for spec in services.values())
    published = {name: spec["ports"] for name, spec in services.items() if "ports" in spec}
    assert published == {"coordinator": ["127.0.0.1:50051:50051"]}
    targets = {spec["build"]["target"] for spec in services.values()}
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert all(f" AS {target}\n" in dockerfile for target in targets)


def test_images_are_built_from_every_part_of_the_product() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {folder.split("/")[0] for folder in package_dirs().values()} < kept
    assert {"pyproject.toml", "README.md", "LICENSE"} < kept
    assert not kept & {"tests", ".git", "deploy", "docs"}


def test_env_example_names_what_compose_reads() -> None:
    named = set(read_env())
    seen: set[str] = set()

    class Seen(dict[str, str]):
        def get(self, name: str, default: object = None) -> str:  # type: ignore[override]
            seen.add(name)
            return ""

    interpolate(COMPOSE.read_text(), Seen())
    assert seen == named


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Iterator[Composed]:
    with Composed(tmp_path_factory.mktemp("composed"), {"SPECLA_TARGET": str(tiny_target)}) as services:
        yield services


def request(drafters: list[str], seed: int = 7, tokens: int = SHORT) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        text="def total(values):\n    result = 0\n",
        sampling=common_pb2.Sampling(temperature=1.0, seed=seed),
        stopping=common_pb2.Stopping(max_tokens=tokens, ignore_eos=True),
        drafters=drafters,
    )


def deltas(composed: Composed, asked: generation_pb2.GenerateRequest) -> Generator[list[int], None, None]:
    """The token ids of each delta; asserts that the stream ends as it must."""
    with grpc.insecure_channel(composed.address("coordinator")) as channel:
        finished = 0
        for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked, timeout=200):
            if response.HasField("delta"):
                yield list(response.delta.token_ids)
            finished += response.HasField("finished")
        assert finished == 1


def ids_of(composed: Composed, asked: generation_pb2.GenerateRequest) -> list[int]:
    return [token for ids in deltas(composed, asked) for token in ids]


def attached_now(composed: Composed) -> bool:
    with grpc.insecure_channel(composed.address("verifier")) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        sessions = stub.ListSessions(verifier_pb2.ListSessionsRequest(), timeout=10).sessions
        return any(session.drafter_attached for session in sessions)


def wait_attached(composed: Composed, wanted: bool, within_s: float = 30.0) -> bool:
    begun = time.monotonic()
    while attached_now(composed) != wanted:
        if time.monotonic() - begun > within_s:
            return False
        time.sleep(0.01)
    return True


def test_generates_through_both_drafters(composed: Composed) -> None:
    plain = ids_of(composed, request(["none"]))
    assert len(plain) == SHORT
    assert ids_of(composed, request(["lookup"])) == plain
    assert ids_of(composed, request(["suffix"])) == plain
    assert ids_of(composed, request(["none"], seed=8)) != plain


def test_text_goes_on_while_one_drafter_takes_the_place_of_the_other(composed: Composed) -> None:
    undisturbed = ids_of(composed, request(["none"], tokens=LONG))
    with closing(deltas(composed, request(["lookup", "suffix"], tokens=LONG))) as stream:
        ids = next(stream)
        assert wait_attached(composed, True)
        composed.stop("drafter-lookup")
        assert wait_attached(composed, True), "the second drafter did not take over"
        assert len(ids) < LONG
        for more in stream:
            ids += more
    assert ids == undisturbed
    assert composed.check_health("drafter-lookup").returncode != 0
    composed.start("drafter-lookup")
    composed.wait_healthy("drafter-lookup")


def test_services_stop_in_order_when_told(composed: Composed) -> None:
    for service in ("coordinator", "drafter-suffix", "verifier"):
        assert composed.stop(service) == 0, composed.log(service).read_text()
