"""The command as a user starts it: a process of its own, with torch out of reach where it must not be needed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from typer.testing import CliRunner

from specla.client.cli.exits import exit_codes
from specla.client.cli.main import app
from specla.drafter_service.config import BY_NAME, KNOWN

BLOCKED = "import sys; sys.modules['torch'] = None; from specla.client.cli.main import run; run()"


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command run in this process sends logs to a stream that ends with it."""
    yield
    structlog.reset_defaults()


def specla(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        env=os.environ | env,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_help_lists_all_commands_without_importing_them() -> None:
    done = specla("--help")
    assert done.returncode == 0
    for command in ("generate", "serve", "doctor", "health", "version", "data", "train", "bench"):
        assert f"\n  {command} " in done.stdout
    heavy = (
        "import sys; from specla.client.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('loaded:', *sorted(m for m in ('torch', 'numpy', 'specla.training.cli') if m in sys.modules))"
    )
    done = specla_python(heavy)
    assert done.stdout.splitlines()[-1] == "loaded:"


def specla_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("role", ["all", "verifier", "drafter", "coordinator"])
def test_every_role_says_its_flags_without_torch(role: str) -> None:
    done = specla("serve", role, "--help")
    assert done.returncode == 0, done.stderr
    assert "--port" in done.stdout
    assert "--config" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["generate"], ", ".join(BY_NAME)),
        (["serve", "drafter"], "|".join(KNOWN)),
        (["serve", "all"], "|".join(BY_NAME)),
        (["demo"], "|".join(BY_NAME[1:])),
        (["bench", "identity"], ", ".join(BY_NAME)),
        (["bench", "drafters"], ", ".join(BY_NAME)),
        (["bench", "price"], ", ".join(BY_NAME)),
    ],
)
def test_help_lists_the_drafters_that_there_are(arguments: list[str], shown: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--help"])
    assert shown in " ".join(done.output.split())


def test_version() -> None:
    assert specla("version").stdout.startswith("specla ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "nosuch"),
        (["generate"], "prompt"),
        (["generate", "a", "--nosuch"], "--nosuch"),
        (["generate", "a", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "a", "--server", "127.0.0.1:1", "--device", "cpu"], "--device has no meaning with --server"),
        (["generate", "a", "--log-level", "loud"], "log_level"),
        (["generate", "a", "--server", "127.0.0.1:1", "--ca", "/nonexistent"], "/nonexistent"),
        (["serve", "nosuch"], "nosuch"),
        (["serve", "coordinator", "--credit", "1"], "credit"),
        (["serve", "coordinator", "--host", "0.0.0.0"], "insecure"),
        (["serve", "coordinator", "--tokenizer", "/nonexistent"], "tokenizer"),
        (["serve", "drafter", "--name", "nosuch"], "nosuch"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert says.lower() in done.stderr.lower()
    assert done.stdout == ""


def test_an_unreachable_server_exits_1() -> None:
    done = specla("generate", "a", "--server", "127.0.0.1:1", "--timeout", "5")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr


def test_standard_input_that_is_no_text_exits_2() -> None:
    done = specla("generate", "-", "--server", "127.0.0.1:1", stdin=b"ab\xff")
    assert done.returncode == 2
    assert "byte 2" in done.stderr


def test_without_torch_generate_says_what_to_install() -> None:
    done = specla("generate", "a")
    assert done.returncode == 1
    assert "torch is not installed; the extra [verifier]" in done.stderr


@pytest.mark.parametrize("arguments", [["bench", "passes"], ["train", "target", "--config", __file__], ["demo"]])
def test_without_torch_commands_of_other_parts_say_what_to_install(arguments: list[str]) -> None:
    done = specla(*arguments)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("specla: torch is not installed; the extra [verifier]")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "drafters", "--temperatures", "x"], "no list of numbers"),
        (["bench", "drafters", "--names", "lookup"], "none, plain decoding"),
        (["demo", "--numerics", "foo"], "foo"),
        (["demo", "--drafter", "none"], "none"),
        (["demo", "--temperature", "1e-5"], "neither 0 (greedy) nor at least 0.0001"),
        (["demo", "--max-tokens", "5000"], "4096"),
        (["demo", "--seed", str(2**64)], str(2**64 - 1)),
    ],
)
def test_wrong_values_of_other_parts_commands_exit_2(arguments: list[str], said: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Loading" not in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is none")
@pytest.mark.parametrize("command", [["demo"], ["bench", "drafters"], ["bench", "identity"], ["bench", "numerics"]])
def test_a_gpu_that_is_not_there_is_refused_by_name(command: list[str], tmp_path: Path) -> None:
    journal = ["--journal", str(tmp_path / "journal.jsonl")] if "identity" in command else []
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--device", "cuda", *journal])
    assert done.exit_code == 2, done.output
    assert "specla: device: device is 'cuda', but" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "a", "--seed", "-1"], f"sampling.seed: seed is -1. Give an integer from 0 to {2**64 - 1}"),
        (["generate", "a", "--drafter", "oracle"], "Known here: none, lookup, suffix, random"),
        (["generate", "a", "--drafter", "nosuch"], "drafter: no drafter is called 'nosuch'. Known here: none, lookup"),
        (["generate", "a", "--max-tokens", "5000"], "max_tokens is 5000. It must be from 1 to 4096"),
        (["generate", "a", "--top-p", "2"], "top_p is 2. It must be above 0, at most 1 (off)"),
        (["generate", "a", "--stop-id", "8192"], "Ids run from 0 to 8191"),
        (["generate", "a", "--stop", ""], "a stop string is empty"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "a", "--timeout", "nan"], "timeout is nan. Give seconds"),
        (["generate", "a", "--threads", "-1"], "threads is -1. Give an integer from 0 to 1024"),
        (["generate", "a", "--device", "gpu"], "Give one of auto, cpu, cuda"),
        (["generate", "a", "--ca", __file__], "--ca has no meaning without --server"),
        (["serve", "all", "--drafters", "lookup,oracle"], "drafters: the drafter 'oracle' runs as a service only"),
        (["generate", "a", "--drafter", "lookup", "--drafter", "lookup"], "drafter: 'lookup' is named twice. Name"),
        (["serve", "all", "--drafters", "lookup,suffix,lookup"], "drafters: 'lookup' is named twice"),
        (["serve", "coordinator", "--drafters", "a:1,a:1"], "drafters: 'a:1' is named twice"),
        (["serve", "coordinator", "--verifiers", "a:1", "--verifiers", "a:1"], "'a:1' is named twice"),
        (["bench", "identity", "--drafters", "none,suffix,suffix"], "'suffix' is named twice. Name it once"),
        (["serve", "all", "--threads", "-1"], "threads is -1"),
        (["serve", "verifier", "--max-rows", "0"], "max_rows is 0"),
        (["serve", "verifier", "--advertised-address", "here"], "advertised_address: 'here' is not HOST:PORT"),
        (["serve", "drafter", "--connect-ca", "/nonexistent"], "connect_ca: /nonexistent cannot be read"),
        (["serve", "coordinator", "--connect-ca", "/nonexistent"], "connect_ca: /nonexistent cannot be read"),
        (["serve", "coordinator", "--tls-cert", "/nonexistent", "--tls-key", "/"], "tls_cert: /nonexistent cannot be"),
        (["bench", "identity", "--drafters", "none,nosuch"], "no drafter is called 'nosuch'. Known here: none"),
        (["bench", "identity", "--temperatures", "0,-1"], "-1 is neither 0 (greedy) nor at least 0.0001"),
        (["bench", "drafters", "--names", "none,oracle"], "a service only. Known here: none, lookup, suffix, random"),
        (["bench", "drafters", "--temperatures", "nan"], "nan is neither 0"),
        (["bench", "drafters", "--max-tokens", "5000"], "4096"),
        (["bench", "price", "--drafters", "none,nosuch"], "no drafter is called 'nosuch'"),
        (["bench", "passes", "--rows", "2,nan"], "nan is no integer from 1 to 129"),
        (["health", "127.0.0.1:1", "--timeout", "-1"], "timeout is -1.0"),
        (["doctor", "--device", "gpu"], "device: device is 'gpu'. Give one of auto, cpu, cuda"),
        (["train", "target", "--config", "/nonexistent"], "'/nonexistent' does not exist"),
        (["train", "target", "--config", __file__, "--device", "gpu"], "'gpu' is not one of 'cuda', 'cpu'"),
        (["train", "eval", "--model", "/nonexistent"], "'/nonexistent' does not exist"),
        (["data", "build", "--vocab-size", "0"], "greater than or equal to 1"),
        (["data", "prompts", "--data", "/nonexistent"], "there is no /nonexistent/tokenizer/tokenizer.json"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(arguments: list[str], says: str) -> None:
    """Torch is out of reach here: whatever came as far as a model would complain of that."""
    done = specla(*arguments, COLUMNS="200")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "a"],
        ["serve", "all", "--port", "0"],
        ["serve", "verifier", "--port", "0"],
        ["demo"],
        *(["bench", name] for name in ("identity", "drafters", "price", "passes", "numerics")),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_target_is_refused_everywhere_in_the_same_words(
    command: list[str], exists: bool, tmp_path: Path
) -> None:
    folder = tmp_path if exists else tmp_path / "nowhere"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--target", str(folder)])
    what = f"{folder} lacks config.json, tokenizer.json, *.safetensors" if exists else f"there is no folder {folder}"
    hint = "A target's folder holds config.json, tokenizer.json and *.safetensors"
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr == f"specla: target: {what}. {hint}\n"


def test_a_folder_that_cannot_be_looked_into_is_refused() -> None:
    done = CliRunner().invoke(app, ["generate", "a", "--target", "a" * 5000])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "cannot be read: File name too long" in done.stderr


@pytest.mark.parametrize(("role", "twice"), [("all", "suffix"), ("coordinator", "127.0.0.1:1")])
def test_a_file_that_names_a_drafter_twice_is_refused(role: str, twice: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'drafters = ["{twice}", "{twice}"]\n')
    done = specla("serve", role, "--config", str(file))
    assert done.returncode == 2, done.stderr
    assert f"specla: drafters: {twice!r} is named twice" in done.stderr


def test_health_of_nothing_exits_1() -> None:
    done = specla("health", "127.0.0.1:1", "--timeout", "2")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stdout


def test_doctor_without_a_model_exits_1(tmp_path: Path) -> None:
    done = specla("doctor", "--target", str(tmp_path))
    assert done.returncode == 1
    assert "lacks config.json" in done.stdout
    assert "cannot generate" in done.stdout


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (ModuleNotFoundError(name="torch"), 1)])
def test_exit_statuses(error: BaseException, status: int) -> None:
    import typer

    with pytest.raises(typer.Exit) as caught, exit_codes():
        raise error
    assert caught.value.exit_code == status
