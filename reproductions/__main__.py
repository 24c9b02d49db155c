"""``python -m reproductions NAME``: repeats a page of docs/results; and the laboratory's commands."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fedrot.simulations.plugins import PLUGINS, load_plugins

ROOT = str(Path(__file__).parents[1])


def main() -> None:
    """Entry point; every process that it starts knows the laboratory's plug-ins, too."""
    paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {PLUGINS: "reproductions.plugins", "PYTHONPATH": os.pathsep.join(paths)}
    from fedrot.simulations.cli import commands
    from fedrot.simulations.federation.runner import prepare_environment
    from reproductions.commands import app

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare_environment()
    load_plugins()
    commands.PROGRAM[:] = ["python", "-m", "reproductions"]
    known = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    }
    if sys.argv[1:] and not sys.argv[1].startswith("-") and sys.argv[1] not in known:
        sys.argv.insert(1, "repeat")
    app(prog_name="python -m reproductions")


if __name__ == "__main__":
    main()
