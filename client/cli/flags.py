"""Flags and file keys from the fields of config dataclasses: a field added there is a flag here."""

import dataclasses
import inspect
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from specla.rpc.errors import InvalidRequestError

C = TypeVar("C")

_LEVELS = "debug, info, warning or error."


class Field(NamedTuple):
    """One setting.

    Attributes:
        name: of the field, the file key, and with dashes the flag.
        kind: str, int, float, bool, Path or tuple (of strings).
        choices: values of a Literal, or of a tuple of them; empty if free.
        default: shown in `--help`.
        text: from the class docstring.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    default: object
    text: str


def fields_of(*classes: type, leave_out: Sequence[str] = ()) -> list[Field]:
    """The settings of several config classes together; of two equal names the first class has it."""
    found: dict[str, Field] = {}
    for cls in classes:
        hints, texts = get_type_hints(cls), _texts(cls)
        for field in dataclasses.fields(cls):
            if field.name in leave_out or field.name in found:
                continue
            kind, choices = _kind(hints[field.name])
            default = field.default_factory() if callable(field.default_factory) else field.default
            found[field.name] = Field(field.name, kind, choices, default, texts.get(field.name, ""))
    return list(found.values())


def take(cls: type[C], values: Mapping[str, Any], **fixed: Any) -> C:
    """The config of a class from those values that are its fields, and from `fixed`.

    Raises:
        InvalidRequestError: the class refuses a value.
    """
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**({name: value for name, value in values.items() if name in names} | fixed))


def read_file(path: Path, fields: Sequence[Field]) -> dict[str, Any]:
    """Settings from a TOML file whose keys are field names.

    Raises:
        InvalidRequestError: no such file, not TOML, an unknown key, or a value of the wrong kind.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidRequestError("config", f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError("config", f"{path} is not TOML: {error}") from None
    known = {field.name: field for field in fields}
    unknown = sorted(content.keys() - known.keys())
    if unknown:
        raise InvalidRequestError(
            "config", f"{path} has unknown keys: {', '.join(unknown)}", hint=f"Known are {', '.join(sorted(known))}"
        )
    return {name: _from_file(known[name], value) for name, value in content.items()}


def flagged(fields: Sequence[Field], run: Callable[[dict[str, Any], str, str], None]) -> Callable[..., None]:
    """A function that typer turns into a command: a flag a field, `--config`, `--log-level` and `--log-format`.

    `run` gets the values that were set (file first, then environment and flags), log level and log format.
    """

    def command(*, config: Path | None, log_level: str, log_format: str, **flags: Any) -> None:
        values = read_file(config, fields) if config is not None else {}
        for field in fields:
            if flags[field.name] not in (None, [], ()):
                values[field.name] = _from_flag(field, flags[field.name])
        run(values, log_level, log_format)

    options: list[tuple[str, Any, Any]] = [
        (field.name, Annotated[_annotation(field), _option(field)], None) for field in fields
    ]
    options += [
        ("config", Annotated[Path | None, typer.Option(metavar="FILE", help="TOML; keys are these names.")], None),
        ("log_level", Annotated[str, typer.Option(metavar="LEVEL", envvar="SPECLA_LOG_LEVEL", help=_LEVELS)], "info"),
        (
            "log_format",
            Annotated[str, typer.Option(metavar="console|json", envvar="SPECLA_LOG_FORMAT", help="Of logs.")],
            "console",
        ),
    ]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in options
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {name: annotation for name, annotation, _ in options}
    return command


def _texts(cls: type) -> dict[str, str]:
    """`name: text` lines of the docstrings of a class and its bases, continuation lines joined."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        lines = inspect.cleandoc(base.__dict__.get("__doc__") or "").splitlines()
        name, indent = "", 0
        for line in lines:
            found = re.fullmatch(r"( +)([a-z]\w*): (.+)", line)
            deeper = len(line) - len(line.lstrip())
            if found and (not name or len(found[1]) <= indent):
                name, indent = found[2], len(found[1])
                texts[name] = found[3]
            elif name and line.strip() and deeper > indent:
                texts[name] += " " + line.strip()
            else:
                name = ""
    return {name: text[:1].upper() + text[1:] for name, text in texts.items()}


def _kind(hint: Any) -> tuple[type, tuple[str, ...]]:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not types.NoneType)
    kind = hint
    if get_origin(hint) is tuple:
        kind, hint = tuple, get_args(hint)[0]
    if get_origin(hint) is Literal:
        return (tuple if kind is tuple else str), tuple(map(str, get_args(hint)))
    return kind, ()


def _annotation(field: Field) -> Any:
    return list[str] | None if field.kind is tuple else field.kind | None


def _option(field: Field) -> Any:
    flag = "--" + field.name.replace("_", "-")
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    shown = "" if default in (None, "", False) else f" [default: {default}]"
    return typer.Option(
        f"{flag}/--no-{flag[2:]}" if field.kind is bool else flag,
        help=field.text + shown,
        envvar=f"SPECLA_{field.name.upper()}",
        show_envvar=False,
        show_default=False,
        metavar="|".join(field.choices) or None,
    )


def _from_flag(field: Field, value: Any) -> Any:
    if field.kind is tuple:
        return tuple(part.strip() for one in value for part in one.split(",") if part.strip())
    return value


def _from_file(field: Field, value: Any) -> Any:
    if field.kind is tuple and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if field.kind is Path and isinstance(value, str):
        return Path(value)
    if field.kind is float and type(value) is int:
        return float(value)
    if type(value) is field.kind:  # exactly: true is no number
        return value
    wanted = "a list of strings" if field.kind is tuple else field.kind.__name__
    raise InvalidRequestError(field.name, f"{field.name} is {value!r}", hint=f"It must be {wanted}")
