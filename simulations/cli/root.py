"""The root of the command line: ``app``, with which commands are registered, and its options."""

from __future__ import annotations

from typing import Annotated

import typer

import fedrot
from fedrot.simulations.cli.commands import examples, say

#: Help is plain text: markup would drop brackets, and panels would not fit a screen.
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=examples("fedrot simulate --data mine.csv --out runs/mine"),
)


def _version(asked: bool) -> None:
    if asked:
        say(f"fedrot {fedrot.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Which average of your clients' models helps? Averages of transformers, compared."""
