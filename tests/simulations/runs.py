"""Settings of small runs, and what they left."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedrot.simulations.federation.run_folder import read_rows

SMALL = shlex.split(
    "--train-limit 480 --test-limit 200 --clients 2 --set width=32 --set heads=2 --max-length 32"
    " --seeds 1 --rounds 2 --lr 5e-3 --local-epochs 2"
)


def central(run: Path, start: str, arm: str, metric: str, server_round: int) -> float:
    (value,) = [
        row["value"]
        for row in read_rows(run)
        if (row["scope"], row["start"], row["arm"], row["metric"], row["round"])
        == ("central", start, arm, metric, server_round)
    ]
    return float(value)
