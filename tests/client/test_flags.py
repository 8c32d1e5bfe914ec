from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from specla.client.cli.exits import exit_codes
from specla.client.cli.flags import fields_of, flagged, read_file, take
from specla.rpc.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Base:
    """Shared.

    Attributes:
        host: where it listens.
        port: may be overridden.
    """

    host: str = "here"
    port: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """A role's.

    Engine:
        port: of this role;
            0 is any.
        mode: how.
        rate: a number.
        parts: several [names].
        folder: a path.
        loud: or not.
    """

    port: int = 7
    mode: Literal["exact", "fast"] = "exact"
    rate: float = field(default_factory=lambda: 0.5)
    parts: tuple[str, ...] = ("a", "b")
    folder: Path | None = None
    loud: bool = False

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise InvalidRequestError("rate", f"rate is {self.rate}", hint="at most 1")


FIELDS = fields_of(Settings)


@pytest.fixture
def call() -> Callable[..., Any]:
    """Runs the command with these arguments; gives what the config became, or the exit status."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
        made: list[Any] = []

        def keep(values: dict[str, Any], log_level: str, log_format: str) -> None:
            with exit_codes():
                made.append(take(Settings, values))

        def command(**flags: Any) -> None:
            with exit_codes():
                inner(**flags)

        inner = flagged(FIELDS, keep)
        command.__signature__ = inner.__signature__  # type: ignore[attr-defined]
        app = typer.Typer(rich_markup_mode=None)
        app.command()(command)
        result = CliRunner().invoke(app, list(arguments), env=env or {})
        return made[0] if made else result

    return run


def test_fields_come_with_their_texts_and_defaults() -> None:
    known = {entry.name: entry for entry in FIELDS}
    assert list(known) == ["host", "port", "mode", "rate", "parts", "folder", "loud"]
    assert known["host"].text == "Where it listens."
    assert known["port"].text == "Of this role; 0 is any."
    assert (known["port"].default, known["rate"].default) == (7, 0.5)
    assert known["mode"].choices == ("exact", "fast")


def test_nothing_given_gives_the_defaults(call: Callable[..., Any]) -> None:
    assert call() == Settings()


def test_flags_of_every_kind(call: Callable[..., Any]) -> None:
    arguments = ["--host", "there", "--port", "0", "--mode", "fast", "--rate", "1", "--parts", "x,y", "--parts", "z"]
    arguments += ["--folder", "/tmp", "--loud"]
    assert call(*arguments) == Settings(
        host="there", port=0, mode="fast", rate=1.0, parts=("x", "y", "z"), folder=Path("/tmp"), loud=True
    )


def test_file_then_environment_then_flag(call: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('host = "filed"\nport = 3\nrate = 1\nparts = ["p"]\nfolder = "f"\nloud = true\nmode = "fast"\n')
    filed = Settings(host="filed", port=3, rate=1.0, parts=("p",), folder=Path("f"), loud=True, mode="fast")
    assert call("--config", str(file)) == filed
    made = call("--config", str(file), "--port", "5", "--no-loud", env={"SPECLA_HOST": "around", "SPECLA_PORT": "4"})
    assert (made.host, made.port, made.loud, made.rate) == ("around", 5, False, 1.0)


def test_an_empty_environment_variable_is_unset(call: Callable[..., Any]) -> None:
    assert call(env={"SPECLA_HOST": "", "SPECLA_MODE": ""}) == Settings()


def test_help_names_every_flag(call: Callable[..., Any]) -> None:
    output = call("--help").output
    assert all("--" + entry.name in output for entry in FIELDS)
    assert "several [names]" in " ".join(output.split()).lower()


@pytest.mark.parametrize("arguments", [["--nosuch", "1"], ["--port", "many"], ["--rate", "2"], ["--config", "/none"]])
def test_wrong_usage_exits_2(call: Callable[..., Any], arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("prot = 3", "unknown keys: prot"),
        ("port = true", "port is True"),
        ("port = 1.5", "port is 1.5"),
        ('parts = "a"', "must be a list of strings"),
        ("host = 3", "must be str"),
        ("port = = 3", "is not TOML"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path: Path, content: str, match: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    with pytest.raises(InvalidRequestError, match=match):
        read_file(file, FIELDS)
