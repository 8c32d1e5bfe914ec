"""Subcommands of `specla bench`."""
import typer

bench = typer.Typer(help="Measure.")
