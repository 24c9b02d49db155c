"""The command line in this process, and what it left."""

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
    "depth": 1,
    "width": 32,
    "heads": 2,
    "max_length": 32,
}


def invoke(*arguments):
    """Run ``fedrot``; return the exit code, and the output with single spaces."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def run(*arguments, code=0, says=""):
    """Run ``fedrot``, which has to end with this code and say this; return the
    output.
    """
    found, output = invoke(*arguments)
    assert (found, says in output) == (code, True), output
    return output


def settings(values):
    """Return settings as options of ``fedrot simulate``."""
    return [
        part for name, value in values.items() for part in ("--set", f"{name}={value}")
    ]


def simulated(out, values, *others):
    """Run ``fedrot simulate`` in this process; return what it printed."""
    given = settings({**SMALL, **values})
    return run("simulate", *others, "--out", out, "--workers", 1, *given)


def values(out, scope="central"):
    """Return a run's results of a scope by strategy, seed, round and metric, without
    durations.
    """
    return {
        (row["strategy"], row["seed"], row["round"], row["metric"]): row["value"]
        for row in read_run(out).rows
        if row["scope"] == scope and not row["metric"].startswith("seconds-")
    }


def contents(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
