"""What only shows with processes that can be killed, and the command line against them."""

import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from cluster import Cluster
from happenings import generate_and, wait_until
from joined import Joined
from processes import Service, command

from specla.client import Client
from specla.rpc.channel import ClientTls
from specla.rpc.errors import ServiceUnavailableError

PROMPT = "Question: Tom has 12 apples and gives 5 to Ann. How many apples has he left? Answer:"
OPTIONS = {"temperature": 1.0, "seed": 21, "ignore_eos": True}


def test_a_killed_drafter_is_followed_by_another_in_the_same_text(cluster: Cluster, one_process: Joined) -> None:
    want = one_process.client.generate(PROMPT, drafter="none", max_tokens=800, **OPTIONS)
    doomed = cluster.start_drafter("random")
    other = cluster.drafters["suffix"]
    with (
        cluster.start_coordinator([cluster.verifier], [doomed, other]) as coordinator,
        Client(coordinator.address) as client,
    ):

        def kill() -> None:
            wait_until(lambda: cluster.sessions()[0].drafter_attached)
            doomed.kill()

        result = generate_and(client, PROMPT, 60, kill, max_tokens=800, **OPTIONS)
        assert result.token_ids == want.token_ids
        assert result.text == want.text
        # And the next request, which asks for the dead one, is served by the one behind it.
        again = client.generate(PROMPT, drafter=["random", "suffix"], max_tokens=200, **OPTIONS)
        assert again.token_ids == want.token_ids[:200]


def test_without_any_drafter_left_the_text_goes_on(cluster: Cluster, one_process: Joined) -> None:
    want = one_process.client.generate(PROMPT, drafter="none", max_tokens=400, **OPTIONS)
    doomed = cluster.start_drafter("lookup")
    with cluster.start_coordinator([cluster.verifier], [doomed]) as coordinator, Client(coordinator.address) as client:
        result = generate_and(client, PROMPT, 60, doomed.kill, max_tokens=400, **OPTIONS)
        assert result.token_ids == want.token_ids


def test_a_killed_verifier_is_followed_by_another_in_the_same_text(cluster: Cluster, one_process: Joined) -> None:
    want = one_process.client.generate(PROMPT, drafter="none", max_tokens=400, **OPTIONS)
    doomed = cluster.start_verifier()
    drafter = cluster.drafters["suffix"]
    with (
        cluster.start_coordinator([doomed, cluster.verifier], [drafter]) as coordinator,
        Client(coordinator.address) as client,
    ):
        wait_until(lambda: coordinator.log.read_text().count("verifier connected") == 2)
        result = generate_and(client, PROMPT, 80, doomed.kill, max_tokens=400, **OPTIONS)
        assert result.token_ids == want.token_ids
        assert result.text == want.text
    wait_until(lambda: not cluster.sessions())


def test_a_killed_client_leaves_no_session(cluster: Cluster) -> None:
    client = subprocess.Popen(
        command("generate", PROMPT, "--server", cluster.coordinator.address, "--ignore-eos", "--max-tokens", "4000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert client.stdout is not None
    assert client.stdout.read(1)
    assert len(cluster.sessions()) == 1
    client.kill()
    client.wait()
    wait_until(lambda: not cluster.sessions(), 3.0)


class TestCommandLine:
    def run(self, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command(*arguments), input=stdin, capture_output=True, text=True, timeout=60, check=False)

    def test_one_json_object_the_same_here_and_there(self, cluster: Cluster) -> None:
        flags = ["--max-tokens", "20", "--temperature", "0.7", "--seed", "3", "--drafter", "suffix", "--json"]
        here = self.run("generate", PROMPT, *flags, "--target", str(cluster.target), "--threads", "1")
        there = self.run("generate", "-", *flags, "--server", cluster.coordinator.address, stdin=PROMPT)
        assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
        one, other = json.loads(here.stdout), json.loads(there.stdout)
        assert list(one) == ["text", "token_ids", "finish_reason", "seed", "numerics_id", "usage"]
        assert list(one["usage"]) == [
            "prompt_tokens",
            "completion_tokens",
            "target_passes",
            "drafted_tokens",
            "accepted_tokens",
        ]
        assert (one["text"], one["token_ids"], one["seed"]) == (other["text"], other["token_ids"], 3)
        assert len(one["token_ids"]) == one["usage"]["completion_tokens"]

    def test_text_to_stdout_figures_to_stderr(self, cluster: Cluster) -> None:
        flags = ["--server", cluster.coordinator.address, "--max-tokens", "30", "--temperature", "0", "--ignore-eos"]
        whole = self.run("generate", PROMPT, *flags)
        assert whole.returncode == 0
        assert whole.stderr.startswith("30 tokens in ")
        assert "tokens/s" in whole.stderr
        stop = whole.stdout[4:8]
        cut = self.run("generate", PROMPT, *flags, "--stop", "never there", "--stop", stop)
        assert cut.stdout == whole.stdout[: whole.stdout.index(stop)]
        assert "ended by stop_string" in cut.stderr

    def test_wrong_values_exit_2(self, cluster: Cluster) -> None:
        for flags in (["--top-p", "0"], ["--temperature", "nan"], ["--max-tokens", "-3"], ["--drafter", "nobody"]):
            done = self.run("generate", PROMPT, "--server", cluster.coordinator.address, *flags)
            assert done.returncode == 2, flags
            assert done.stderr.startswith("specla: ")

    def test_an_interrupt_exits_130_and_frees_the_session(self, cluster: Cluster) -> None:
        flags = ["--server", cluster.coordinator.address, "--ignore-eos", "--max-tokens", "4000"]
        client = subprocess.Popen(command("generate", PROMPT, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.read(1)
        client.send_signal(signal.SIGINT)
        _, stderr = client.communicate(timeout=20)
        assert client.returncode == 130
        assert b"Traceback" not in stderr
        wait_until(lambda: not cluster.sessions(), 3.0)

    def test_output_that_takes_nothing_and_input_that_gives_nothing(self, cluster: Cluster) -> None:
        there = ["--server", cluster.coordinator.address, "--max-tokens", "5"]
        generate = shlex.join(command("generate", "Hello", *there))
        for where, status in ((">/dev/full", 1), (">&-", 1)):
            done = subprocess.run(f"{generate} {where}", shell=True, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
            assert done.stderr.startswith("specla: standard output ")
        closed = shlex.join(command("generate", "-", *there)) + " <&-"
        done = subprocess.run(closed, shell=True, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        done = self.run("generate", "Hello", *there, "--timeout", "nan")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr

    def test_health_and_doctor(self, cluster: Cluster) -> None:
        address = cluster.coordinator.address
        done = self.run("health", address, "--service", "specla.v1.GenerationService")
        assert (done.returncode, done.stdout) == (0, f"{address} specla.v1.GenerationService: SERVING\n")
        done = self.run("doctor", "--target", str(cluster.target))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ready to generate" in done.stdout
        assert "torch:" in done.stdout

    def test_a_busy_port_is_refused(self, cluster: Cluster) -> None:
        port = cluster.coordinator.address.rpartition(":")[2]
        done = self.run("serve", "drafter", "--name", "lookup", "--port", port)
        assert done.returncode == 1
        assert done.stderr.startswith(f"specla: cannot listen on 127.0.0.1:{port}: Address already in use. Another ")
        assert done.stderr.count("\n") == 1, "gRPC has its own line"


def test_serve_all_answers_reads_its_file_and_stops_well(
    tiny_target: Path, tmp_path: Path, one_process: Joined
) -> None:
    file = tmp_path / "all.toml"
    file.write_text(f'target = "{tiny_target}"\nthreads = 1\nport = 0\ndrafters = ["lookup"]\n')
    service = Service("all", "--config", str(file), log=tmp_path / "all.log", ready_as="coordinator")
    with service, Client(service.address) as client:
        assert client.model().drafters == ("lookup", "none")
        want = one_process.client.generate(PROMPT, drafter="none", max_tokens=100, **OPTIONS)
        assert client.generate(PROMPT, max_tokens=100, **OPTIONS).token_ids == want.token_ids
        # Told to stop in the middle of a text, it ends the text first.
        stop = partial(os.kill, service.process.pid, signal.SIGTERM)
        result = generate_and(client, PROMPT, 50, stop, max_tokens=400, **OPTIONS)
        assert len(result.token_ids) == 400
        assert service.process.wait(20) == 0


def test_beyond_plain_text(cluster: Cluster, tmp_path: Path) -> None:
    """A coordinator with TLS: whoever trusts its authority gets text, plain text gets nothing."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    try:
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *name]
        subprocess.run(make, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command to make a certificate")
    flags = ["--tokenizer", str(cluster.target), "--verifiers", cluster.verifier.address, "--port", "0"]
    flags += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    with Service("coordinator", *flags, log=tmp_path / "log") as coordinator:
        address = coordinator.address.replace("127.0.0.1", "localhost")
        with Client(address, tls=ClientTls(root_ca=certificate)) as client:
            assert len(client.generate(PROMPT, max_tokens=5, **OPTIONS).token_ids) == 5
        with Client(address) as client, pytest.raises(ServiceUnavailableError):
            client.generate(PROMPT, max_tokens=5, timeout=5.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_that_is_not_ready_yet(number: signal.Signals, tiny_target: Path) -> None:
    waiting = subprocess.Popen(
        command("serve", "coordinator", "--port", "0", "--verifiers", "127.0.0.1:1", "--tokenizer", str(tiny_target)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr is not None
    assert "listening" in waiting.stderr.readline()
    waiting.send_signal(number)
    assert waiting.wait(10) == 0


def test_a_program_that_forgets_to_close_ends_well(tiny_target: Path) -> None:
    code = (
        "import sys; from specla.client import Local\n"
        "local = Local(sys.argv[1], threads=1)\n"
        "events = local.stream('Hello', max_tokens=2000, ignore_eos=True)\n"
        "next(events), next(events)\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_target)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
