"""`specla generate` when its stream breaks: it says how to go on, and `--resume` does."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from coordinating import coordinator, until
from scripted_verifier import ScriptedVerifier
from typer.testing import CliRunner

from specla.client.cli.main import app
from specla.client.config import CoordinatorConfig
from specla.client.server import generation_server

RUN = "import sys; sys.modules['torch'] = None; from specla.client.cli.main import run; run()"


async def specla_generate(*flags: str, breaks_at: int | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of `specla generate` against a server that loses its verifier, if told."""
    verifier = ScriptedVerifier()
    verifier.stall_at = breaks_at
    server = generation_server(CoordinatorConfig(port=0, drain_s=0.2), coordinator([verifier]))
    await server.start()
    command = [sys.executable, "-c", RUN, "generate", "Hello", "--server", server.address, "--max-tokens", "40"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=pipe, stderr=pipe)
    try:
        if breaks_at is not None:
            sessions = verifier.sessions
            await until(lambda: any(one.length - one.prompt_len >= breaks_at for one in sessions.values()), 20.0)
            verifier.die()
        out, errors = await asyncio.wait_for(process.communicate(), 30.0)
    finally:
        if process.returncode is None:
            process.kill()
        await server.stop()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


def part(**changed: object) -> str:
    """What --json prints of a generation that broke off, but for what is changed."""
    printed = {"text": "a", "token_ids": [1], "finish_reason": None, "seed": 1, "numerics_id": "b", "usage": None}
    return json.dumps(printed | changed)


async def test_a_stream_that_breaks_says_how_to_go_on() -> None:
    status, text, errors = await specla_generate("--seed", "11", breaks_at=21)
    first, second = errors.splitlines()
    assert (status, bool(text)) == (1, True)
    assert first.startswith("broken off after 21 tokens; seed 11, numerics_id scripted")
    assert "--json" in first
    assert second.startswith("specla: the verifier was lost")


async def test_json_of_a_broken_stream_is_resumed_as_if_nothing_had_happened(tmp_path: Path) -> None:
    status, out, _ = await specla_generate("--seed", "11", "--json")
    whole = json.loads(out)
    assert (status, len(whole["token_ids"]), whole["numerics_id"]) == (0, 40, "scripted")
    status, out, errors = await specla_generate("--seed", "11", "--json", breaks_at=21)
    broken = json.loads(out)
    assert status == 1
    assert broken["token_ids"] == whole["token_ids"][:21]
    assert (broken["seed"], broken["numerics_id"]) == (11, "scripted")
    assert (broken["finish_reason"], broken["usage"]) == (None, None)
    assert "broken off after 21 tokens" in errors
    file = tmp_path / "part.json"
    file.write_text(out)
    status, out, errors = await specla_generate("--resume", str(file), "--json", breaks_at=30)
    again = json.loads(out)
    assert again["token_ids"] == whole["token_ids"][: len(again["token_ids"])]
    assert len(again["token_ids"]) >= 30
    file.write_text(out)
    status, out, errors = await specla_generate("--resume", str(file), "--json")
    assert status == 0, errors
    done = json.loads(out)
    assert (done["text"], done["token_ids"]) == (whole["text"], whole["token_ids"])
    assert done["usage"]["completion_tokens"] == 40
    assert errors.startswith(f"{40 - len(again['token_ids'])} tokens in "), "the speed is of what came now"


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ("{", [], "resume: "),
        ("[]", [], "is no output of --json"),
        ("[" * 100_000, [], "is no output of --json"),
        (part(text="\ud800"), [], "is no output of --json"),
        (part(numerics_id="\ud800"), [], "is no output of --json"),
        (part(finish_reason="length"), [], "had ended (length)"),
        ('{"token_ids": [1], "seed": 1, "text": "a"}', [], "is no output of --json"),
        (part(token_ids=[1.5]), [], "is no output of --json"),
        (part(), ["--seed", "2"], "--seed has no meaning"),
    ],
)
def test_what_cannot_be_resumed_is_refused(content: str, flags: list[str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    file.write_text(content)
    done = CliRunner().invoke(app, ["generate", "a", "--server", "127.0.0.1:1", "--resume", str(file), *flags])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert says in done.stderr
