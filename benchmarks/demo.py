"""`specla demo`: the same prompts, plainly and speculatively, in turns; same text, sooner."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specla.benchmarks.crowding import waited_s, warning
from specla.benchmarks.options import MOST_TOKENS, ThreadsOption, checked_temperature, folder_of
from specla.client.detokenizer import Detokenizer
from specla.client.local import Local
from specla.client.results import GenerateResult
from specla.client.tokenizer import Tokenizer
from specla.drafter_service.config import Drafting

demo = typer.Typer(help="Plain and speculative decoding of the same prompts, one after the other.")

PROMPTS = {
    "code that repeats itself": '''class Point:
    """A point in space."""

    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def set_x(self, value):
        """Set the x coordinate."""
        self.x = value

    def set_y(self, value):
        """Set the y coordinate."""
        self.y = value

    def set_z(self, value):
''',
    "a worked sum": "Question: At the fair, Wei buys 11 books at 6 dollars each and 12 postcards at 14 dollars each. "
    "Wei pays with 250 dollars. How much change does Wei get?\nAnswer:",
    "prose": "The President said that the people of the United States",
}
TEMPERATURES = {"prose": 0.7}  # the others are greedy
DRAFTED = "bold green"
ROUNDS = 2
"""How often each is timed, in turns: other programs disturb single runs."""


@dataclass(frozen=True)
class Timed:
    """One text and the seconds it took, prefill included; and those that threads waited for a core meanwhile."""

    result: GenerateResult
    seconds: float
    waited: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return len(self.result.token_ids) / self.seconds


@demo.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    target: Annotated[Path | None, typer.Option(envvar="SPECLA_TARGET", help="Checkpoint; default: shipped.")] = None,
    drafter: Annotated[Drafting, typer.Option(help="Drafter to set against plain decoding.")] = "suffix",
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of each text.")] = 80,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy.", show_default="0.7 for prose, else 0")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="The same for both.")] = 1,
    numerics: Annotated[Literal["exact", "fast"], typer.Option(help="Kind of arithmetic.")] = "exact",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the target runs.")] = "cpu",
    threads: ThreadsOption = 0,
) -> None:
    """Generate each prompt with and without drafts, in turns, and compare; exits 1 if a text differs."""
    if context.invoked_subcommand is not None:
        return
    checked_temperature(temperature)
    console = Console(highlight=False)
    folder = folder_of(target)
    pieces = Tokenizer.load(folder).pieces
    table = Table(title="The same text, sooner?")
    for column in ("prompt", "plain tokens/s", "speculative tokens/s", "speed-up", "tokens a pass", "identical"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    identical = True
    waited = counted = 0.0
    takes = "some ten seconds" if device == "cpu" else "a minute or more"
    console.print(f"[dim]Loading the target; the very first start compiles the kernels, {takes}.[/]")
    with Local(folder, drafters=(drafter,), device=device, numerics=numerics, threads=threads) as local:
        info = local.model()
        console.print(f"[dim]{info.model}, {info.numerics_id}; seed {seed}[/]")
        local.generate("warm up", drafter="none", max_tokens=4, temperature=0.0)
        for name, prompt in PROMPTS.items():
            degrees = TEMPERATURES.get(name, 0.0) if temperature is None else temperature
            console.rule(f"{name}, T = {degrees:g}")
            runs: dict[str, list[Timed]] = {"none": [], drafter: []}
            for who in list(runs) * ROUNDS:
                with console.status("[dim]plain decoding[/]" if who == "none" else f"[dim]with {who}[/]"):
                    timed = _timed(local, prompt, who, max_tokens=max_tokens, temperature=degrees, seed=seed)
                    runs[who].append(timed)
            console.print(Text(prompt, style="dim"), end="")
            plain, drafted = (min(found, key=lambda timed: timed.seconds) for found in runs.values())
            waited += plain.waited + drafted.waited
            counted += plain.seconds + drafted.seconds
            _print_coloured(console, drafted.result, pieces)
            texts = [(timed.result.token_ids, timed.result.text) for found in runs.values() for timed in found]
            same = all(text == texts[0] for text in texts)
            identical = identical and same
            usage = drafted.result.usage
            table.add_row(
                name,
                f"{plain.speed:.1f}",
                f"{drafted.speed:.1f}",
                f"{plain.seconds / drafted.seconds:.2f}x",
                f"{usage.completion_tokens / usage.target_passes:.2f}",
                "[green]yes[/]" if same else "[red]NO[/]",
            )
    console.rule()
    console.print(Text.assemble("Tokens in ", ("this colour", DRAFTED), " were drafted and accepted."))
    console.print(table)
    if not identical:
        console.print("[red]A text differs from plain decoding: that must not happen.[/]")
        raise typer.Exit(1)
    if disturbed := warning(waited, counted):
        console.print(disturbed, style="yellow", soft_wrap=True)
    console.print("Drafts gain where a text repeats itself; elsewhere they should cost next to nothing.")
    console.print(
        "Each text was timed twice, and the shorter time counts: `specla bench drafters` measures properly.",
        soft_wrap=True,
    )
    console.print("Try next:")
    for command in (
        '  .venv/bin/specla generate "def add(a, b):" --max-tokens 64 --temperature 0.7 --seed 7',
        "  .venv/bin/specla serve all          # then Generate from any gRPC client: see README.md",
        "  .venv/bin/specla bench --help       # measure it on this machine",
    ):
        console.print(command, soft_wrap=True)


def _timed(local: Local, prompt: str, drafter: str, *, max_tokens: int, temperature: float, seed: int) -> Timed:
    waited, start = waited_s(), time.perf_counter()
    result = local.generate(prompt, drafter=drafter, max_tokens=max_tokens, temperature=temperature, seed=seed)
    return Timed(result, time.perf_counter() - start, max(0.0, waited_s() - waited))  # less if a thread has ended


def _print_coloured(console: Console, result: GenerateResult, pieces: tuple[bytes, ...]) -> None:
    text = Text()
    for piece, drafted in _by_token(result, pieces):
        text.append(piece, style=DRAFTED if drafted else "")
    console.print(text)


def _by_token(result: GenerateResult, pieces: tuple[bytes, ...]) -> Iterator[tuple[str, bool]]:
    """The text token by token, with whether it was drafted; a character goes with the token that completes it."""
    detokenizer = Detokenizer(pieces)
    for token, drafted in zip(result.token_ids, result.drafted, strict=True):
        yield detokenizer.feed(token), drafted
    yield detokenizer.flush(), False
