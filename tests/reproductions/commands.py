"""The laboratory's command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from reproductions.commands import app


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())
