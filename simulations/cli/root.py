"""The root of the command line: ``app``, with which commands are registered, and its options."""

from __future__ import annotations

from typing import Annotated

import typer

import fedrot
from fedrot.simulations.cli.commands import examples, say

app = typer.Typer(no_args_is_help=True, epilog=examples("fedrot simulate --out runs/first"))


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
    """Aligned federated averaging of transformers, compared with plain averaging."""
