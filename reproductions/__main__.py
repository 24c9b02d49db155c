"""``python -m reproductions NAME``: repeats a page of docs/results; and the laboratory's commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedrot.simulations.plugins import PLUGINS

ROOT = str(Path(__file__).parents[1])
PROGRAM = ["python", "-m", "reproductions"]


def main() -> None:
    """Entry point; every process that it starts knows the laboratory's plug-ins, too."""
    paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {PLUGINS: "reproductions.plugins", "PYTHONPATH": os.pathsep.join(paths)}
    from fedrot.simulations.cli import commands
    from fedrot.simulations.cli.app import prepare
    from reproductions.commands import NAMES, app

    commands.PROGRAM[:] = PROGRAM
    if sys.argv[1:] and not sys.argv[1].startswith("-") and sys.argv[1] not in NAMES:
        sys.argv.insert(1, "repeat")
    prepare()
    app(prog_name=" ".join(PROGRAM))


if __name__ == "__main__":
    main()
