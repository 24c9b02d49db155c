"""``python -m reproductions NAME``: repeats a page of docs/results."""

from __future__ import annotations

import os
from pathlib import Path

from fedrot.simulations.environment import PLUGINS

ROOT = str(Path(__file__).parents[1])
PROGRAM = ["python", "-m", "reproductions"]


def main() -> None:
    """Entry point; every process that it starts knows the laboratory's plug-ins,
    too.
    """
    paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        PLUGINS: "reproductions.plugins",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    from fedrot.simulations.cli import commands
    from fedrot.simulations.cli.app import prepare
    from reproductions.commands import app

    commands.PROGRAM[:] = PROGRAM
    prepare()
    app(prog_name=" ".join(PROGRAM))


if __name__ == "__main__":
    main()
