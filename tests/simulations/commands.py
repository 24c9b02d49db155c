"""The command line in this process, and what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedrot.simulations.cli.app import app

#: Settings of a run of seconds.
SMALL: dict[str, Any] = {
    "train_limit": 128,
    "test_limit": 60,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "max_length": 32,
}


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
