"""The root of the `specla` command: its own subcommands, and those that other parts bring as entry points."""

import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from specla.client.cli.exits import INTERRUPTED, exit_codes
from specla.drafter_service.config import BY_NAME

# What `--help` says of commands that live outside the client, so that it need not import them.
_ELSEWHERE = {
    "bench": "Measure speed, identity and acceptance.",
    "data": "Build training data.",
    "demo": "Plain and speculative decoding of the same prompts, one after the other.",
    "train": "Train targets.",
}


class _NotLoaded(TyperCommand):
    """Stands for a command of another part until it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=_ELSEWHERE.get(name, ""))


class _Root(TyperGroup):
    """A group that also has the commands of the entry-point group `specla.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Own commands first, then those of other parts."""
        return [*super().list_commands(ctx), *sorted(_elsewhere())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in for a command of another part: enough for `--help`."""
        own = super().get_command(ctx, cmd_name)
        if own is None and cmd_name in _elsewhere():
            return _NotLoaded(cmd_name)
        return own

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, imported now that it is called."""
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, _NotLoaded):
            command = _load(_elsewhere()[command.name or ""])
        return name, command, rest


def _elsewhere() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="specla.commands")}


def _load(point: EntryPoint) -> Any:
    with exit_codes():
        command = typer.main.get_command(point.load())
    command.name = point.name
    run = command.invoke

    def invoke(context: Any) -> Any:
        with exit_codes():
            return run(context)

    command.invoke = invoke  # type: ignore[assignment, method-assign]
    return command


app = typer.Typer(
    name="specla",
    cls=_Root,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding for language models with recurrent state.",
)


_CA = typer.Option(metavar="FILE", help="PEM authority of the server: use TLS.", exists=True, dir_okay=False)


@app.callback()
def _root() -> None:
    pass


@app.command("generate", help="Continue a prompt, here or on a running coordinator.")
def _generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input, as it is.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Drafter ({', '.join(BY_NAME)}), or several in order of preference; none decodes plainly.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="1")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.", show_default="0")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].", show_default="1")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].", show_default="0")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="In [0.001, 1000].", show_default="1")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="In [-2, 2].", show_default="0")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="In [-2, 2].", show_default="0")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal text.", show_default="drawn")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="The text ends before it; may be given several times.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="Token id that ends the text; several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind an end-of-text token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Go on with a --json of the same prompt and options that broke off; without --seed.",
        ),
    ] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Coordinator to ask.")] = None,
    ca: Annotated[Path | None, _CA] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it is given up.")] = 600.0,
    target: Annotated[
        str | None, typer.Option(envvar="SPECLA_TARGET", metavar="DIR", help="Model folder.", show_default="shipped")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Where it runs; auto is the CPU.")] = None,
    numerics: Annotated[str | None, typer.Option(metavar="exact|fast", help="Kind of arithmetic.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of one operation.")] = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = "warning",
) -> None:
    from specla.client.cli.generate import Here, There, generate

    if server is not None and str(context.get_parameter_source("target")).endswith("ENVIRONMENT"):
        target = None  # the default of this machine, not of that server
    with exit_codes():
        generate(
            prompt,
            {
                "drafter": drafter or None,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "seed": seed,
                "stop": stop or None,
                "stop_ids": stop_id or None,
                "ignore_eos": ignore_eos or None,
                "timeout": timeout,
            },
            resume=resume,
            as_json=as_json,
            here=Here(target=target, device=device, numerics=numerics, threads=threads),
            there=There(server=server, ca=ca),
            log_level=log_level,
        )


@app.command("doctor", help="Say what device, versions and model are found, and whether they work.")
def _doctor(
    target: Annotated[str | None, typer.Option(envvar="SPECLA_TARGET", metavar="DIR", help="Model folder.")] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto is the CPU.")] = "auto",
) -> None:
    from specla.client.cli.doctor import doctor

    with exit_codes():
        doctor(target, device)


@app.command("health", help="Ask a service whether it can serve; exits 0 only if it can.")
def _health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of any service.")],
    service: Annotated[str, typer.Option(help="Full name of one service.", show_default="the whole server")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 3.0,
    ca: Annotated[Path | None, _CA] = None,
) -> None:
    from specla.client.cli.health import health

    with exit_codes():
        health(address, service, timeout, ca)


@app.command("version", help="Print the version.")
def _version() -> None:
    typer.echo(f"specla {version('specla')}")


class _Serve(TyperGroup):
    """Its commands' flags are the fields of config classes, read when `serve` is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The roles."""
        from specla.client.cli.serve import ROLES

        return list(ROLES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a role, or None."""
        from specla.client.cli.serve import ROLES, command_of

        return command_of(cmd_name) if cmd_name in ROLES else None


serve = typer.Typer(
    cls=_Serve, no_args_is_help=True, rich_markup_mode=None, help="Run a service, or all of them in one process."
)


@serve.callback()
def _serve() -> None:
    pass


app.add_typer(serve, name="serve")


def run() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:  # before or behind a command; inside one, exit_codes deals with it
        sys.exit(INTERRUPTED)
