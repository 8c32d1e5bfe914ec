"""What README.md tells a reader to type works, and its figures are the measured ones."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from product_tree import ROOT, load_tool
from typer.testing import CliRunner

from specla.client.cli.main import app
from specla.drafter_service.config import KNOWN
from specla.v1 import generation_pb2, generation_pb2_grpc

README = (ROOT / "README.md").read_text()
SPECLA = str(Path(sys.executable).parent / "specla")
ADDRESS = "127.0.0.1:50051"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def run(command: list[str], stdin: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=90, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a coordinator with everything behind it, as README starts it."""
    command = [SPECLA, "serve", "all", "--port", "0", "--target", str(tiny_target)]
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            ready = re.fullmatch(r"READY .*=(127\.0\.0\.1:\d+)\n", process.stdout.readline())
            assert ready is not None, log.read_text()
            yield ready.group(1)
        finally:
            process.terminate()
            process.wait(20)


def test_make_targets_exist() -> None:
    named = set(re.findall(r"^ {4}make ([a-z-]+)|`make ([a-z-]+)`", README, re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= {a or b for a, b in named}
    assert [a or b for a, b in named if not re.search(rf"^{a or b}:", makefile, re.M)] == []


def commands() -> list[str]:
    lines = re.findall(r"^ {4}\.venv/bin/specla (.*?)(?:\s+#.*|\s*<.*)?$", README, re.M)
    return [*lines, *re.findall(r"`specla ([a-z][^`]*)`", README)]


@pytest.mark.parametrize("command", commands())
def test_specla_commands_and_flags_exist(command: str) -> None:
    words = re.sub(r'"[^"]*"', "TEXT", command).split()
    names = []
    for word in words:
        if not re.fullmatch(r"[a-z]+", word):
            break
        names.append(word)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*names, "--help"])
    assert done.exit_code == 0, done.output
    for flag in (word for word in words if word.startswith("--")):
        assert flag in done.output, f"specla {' '.join(names)} has no {flag}"


@pytest.mark.parametrize("program", blocks("python"))
def test_python_program_runs(program: str, server: str, tiny_target: Path) -> None:
    assert "Local()" in program or ADDRESS in program
    program = program.replace("Local()", f"Local(target={str(tiny_target)!r})").replace(ADDRESS, server)
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_grpcurl_request_is_a_request(server: str) -> None:
    (command,) = blocks("sh")
    ((request, address, method),) = re.findall(r"-d '(.*?)' (\S+) (\S+)$", command, re.S)
    assert address == ADDRESS
    assert method == "specla.v1.GenerationService/Generate"
    message = json_format.ParseDict(json.loads(request), generation_pb2.GenerateRequest())
    with grpc.insecure_channel(server) as channel:
        responses = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=60))
    assert responses[0].started.seed == 1
    assert responses[-1].finished.usage.completion_tokens > 0


@pytest.mark.skipif(
    shutil.which("node") is None or not (ROOT / "node_modules/@grpc/grpc-js").is_dir(),
    reason="Node.js or its gRPC package is not installed (make buf-lint installs the latter)",
)
def test_node_program_runs_and_says_the_same(server: str) -> None:
    (program,) = blocks("js")
    done = run(["node", "-"], stdin=program.replace(ADDRESS, server))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    command = [SPECLA, "generate", "Once upon a time", "--server", server, "--temperature=0.7", "--seed=1"]
    same = run([*command, "--max-tokens=100", "--json"])
    assert same.returncode == 0, same.stderr
    assert done.stdout.splitlines() == json.loads(same.stdout)["text"].splitlines()  # whatever ends a line


def test_the_drafters_named_are_those_that_there_are() -> None:
    (named,) = re.findall(r"^- Drafters: (.*?)\.", README, re.M | re.S)
    assert re.findall(r"`(\w+)`", named) == [name for name in KNOWN if name not in ("random", "oracle")]


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_figures_are_the_measured_ones() -> None:
    tool = load_tool("readme_figures")
    assert tool.with_figures(README, tool.block(ROOT / "benchmarks/results")) == README


def test_a_goal_that_was_missed_is_shown(tmp_path: Path) -> None:
    result: dict[str, Any] = {
        "title": "Passes",
        "device": "cpu, 2 cores",
        "versions": {"python": "3.11", "torch": "2.13"},
        "command": "specla bench passes",
        "date": "2026-01-01",
        "notes": {},
        "rows": [
            {"case": "5 rows", "name": "exact", "median": 12.3456, "low": 12, "high": 13, "unit": "ms"},
            {"case": "5 rows", "name": "over plain", "median": 1.52345, "low": 1.5, "high": 1.6, "unit": "x"},
        ],
        "goals": [
            {"name": "5 rows", "want": 1.4, "got": 1.52345, "unit": "x", "sense": "at most", "met": False},
            {"name": "9 rows", "want": 2.1, "got": 2.0, "unit": "x", "sense": "at most", "met": True},
        ],
    }
    (tmp_path / "passes.json").write_text(json.dumps(result))
    shown = load_tool("readme_figures").block(tmp_path)
    assert "| 5 rows | at most 1.4 x | 1.523 x | **no** |" in shown
    assert "| 9 rows | at most 2.1 x | 2 x | yes |" in shown
    assert "| 5 rows | over plain | 1.523 | 1.5 .. 1.6 | x |" in shown
    assert "1 more rows in `benchmarks/results/passes.json`" in shown
    many = [{**result["goals"][1], "name": f"goal {i}"} for i in range(9)]
    (tmp_path / "passes.json").write_text(json.dumps({**result, "goals": [*many, result["goals"][0]]}))
    shown = load_tool("readme_figures").block(tmp_path)
    assert "9 of 10 goals are met." in shown
    assert shown.index("| **no** |") < shown.index("<details>") < shown.index("goal 8")
    (tmp_path / "passes.json").write_text(json.dumps({**result, "goals": [{**goal, "met": None} for goal in many]}))
    shown = load_tool("readme_figures").block(tmp_path)
    assert "0 of 9 goals are met." in shown
    assert "| **no** |" not in shown
    assert shown.index("<details>") < shown.index("| not judged |")


def test_a_figure_changed_by_hand_is_found(tmp_path: Path) -> None:
    tool = load_tool("readme_figures")
    assert tool.with_figures(README.replace(tool.END, "77 times as fast\n" + tool.END), tool.block(tmp_path)) != (
        README.replace(tool.END, "77 times as fast\n" + tool.END)
    )


def test_small_and_large_figures_keep_their_digits() -> None:
    figure = load_tool("readme_figures").figure
    values = [3.0621e-06, 1e-05, 0.97123, 12.4, 1520, 12345.6, 0.0]
    assert [figure(x) for x in values] == ["3.062e-06", "1e-05", "0.9712", "12.4", "1520", "12346", "0"]
