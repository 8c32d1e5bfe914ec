"""Subcommands of `specla data` and `specla train`."""
import typer

data = typer.Typer(help="Build training data.")
train = typer.Typer(help="Train models.")
