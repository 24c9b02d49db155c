"""The command line in this process, with all of its jobs."""

from __future__ import annotations

from pathlib import Path

from tests.simulations.commands import invoke


def simulated(out: Path, *arguments: object) -> str:
    """Run ``fedrot`` with these arguments and ``--out``, in one process; return what it printed."""
    code, printed = invoke(*arguments, "--workers", 1, "--out", out)
    assert code == 0, printed
    return printed
