"""The ``fedrot`` command line: all commands, and its entry point."""

from __future__ import annotations

import logging
import signal

from fedrot.errors import safe
from fedrot.simulations.cli import experiment_commands, model_commands  # noqa: F401  # register commands
from fedrot.simulations.cli.commands import app
from fedrot.simulations.environment import load_plugins, prepare_environment


def main() -> None:
    """Entry point of the command line."""
    prepare()
    app()


def prepare() -> None:
    """Prepare the process of a command line.

    SIGTERM interrupts as Ctrl-C does, and logs are ``safe``.
    """
    logging.setLogRecordFactory(_Record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare_environment()
    load_plugins()


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return safe(super().getMessage())
