"""The laboratory's command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from reproductions.commands import app


def run(*arguments: object, code: int = 0, says: str = "") -> str:
    """Run the laboratory, which has to end with this code and say this; return the
    output.
    """
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    output = " ".join(result.output.split())
    assert (result.exit_code, says in output) == (code, True), output
    return output
