"""The ``fedrot`` command line: all commands, and its entry point."""

from __future__ import annotations

import signal

import typer

from fedrot.simulations.cli import experiment_commands, model_commands
from fedrot.simulations.cli.root import app
from fedrot.simulations.federation import runner
from fedrot.simulations.plugins import load_plugins

#: The modules that register commands with ``app``, in the order of ``fedrot --help``.
COMMANDS = (experiment_commands, model_commands)


def main(commands: typer.Typer = app, program: str | None = None) -> None:
    """Entry point of a command line; SIGTERM interrupts as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner.prepare_environment()
    load_plugins()
    commands(prog_name=program)
