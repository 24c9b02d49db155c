"""The command line in this process, and what it left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.run_folder import read_run

#: Values by name; rows of a table.
Fields = dict[str, Any]
Rows = list[Fields]

#: Settings of a run of seconds.
SMALL = {
    "train_limit": 128,
    "test_limit": 60,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "max_length": 32,
}


def invoke(*arguments: object) -> tuple[int, str]:
    """Run ``fedrot``; return the exit code, and the output with single spaces."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def run(*arguments: object, code: int = 0, says: str = "") -> str:
    """Run ``fedrot``, which has to end with this code and say this; return the
    output.
    """
    found, output = invoke(*arguments)
    assert (found, says in output) == (code, True), output
    return output


def settings(values: Mapping[str, object]) -> list[str]:
    """Return settings as options of ``fedrot simulate``."""
    return [
        part for name, value in values.items() for part in ("--set", f"{name}={value}")
    ]


def simulated(out: Path, values: Mapping[str, object], *others: object) -> str:
    """Run ``fedrot simulate`` in this process; return what it printed."""
    given = settings({**SMALL, **values})
    return run("simulate", *others, "--out", out, "--workers", 1, *given)


def values(out: Path, scope: str = "central") -> dict[tuple[str, int, int, str], float]:
    """Return a run's results of a scope by strategy, seed, round and metric, without
    durations.
    """
    return {
        (row["strategy"], row["seed"], row["round"], row["metric"]): row["value"]
        for row in read_run(out).rows
        if row["scope"] == scope and not row["metric"].startswith("seconds-")
    }


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
