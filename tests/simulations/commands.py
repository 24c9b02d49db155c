"""The command line in this process, and what it left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.experiment_commands import MORE_SETTINGS

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


def options_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings as options of ``fedrot simulate``."""
    found = list[str]()
    for given, value in settings.items():
        name = given.replace("-", "_")
        option = "start" if name == "starts" else name.replace("_", "-")
        found += ["--set", f"{name}={value}"] if name in MORE_SETTINGS else [f"--{option}", str(value)]
    return found


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
