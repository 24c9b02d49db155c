"""Wall time of a small grid on two Ray nodes against one, each node with one core of
this machine.

    python benchmarks/grid.py [GRID] --data-dir DIR [--json FILE]

Both runs are the same command, ``fedrot simulate GRID --set ray=ADDRESS``, in a process
of its own, with loading and tables. The ratio is two nodes' time over one node's; 0.5
would be perfect.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from ray.cluster_utils import Cluster
from rich.console import Console

#: Largest acceptable ratio.
BAR = 0.7


def seconds(grid: str, data_dir: Path, nodes: int) -> float:
    """Return the wall time of the grid on a fresh cluster of so many nodes."""
    one_core = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=one_core)
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=1)
    try:
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "fedrot", "simulate", grid, "--out", out]
            command += [
                "--set",
                f"ray={cluster.address}",
                "--data-dir",
                str(data_dir.resolve()),
            ]
            start = perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return perf_counter() - start
    finally:
        cluster.shutdown()


def main() -> None:
    """Measure both, print and perhaps save the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grid", nargs="?", default="different-rounds")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # Ray's workers inherit it; without a limit one node would use both cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    one, two = (seconds(given.grid, given.data_dir, nodes) for nodes in (1, 2))
    ratio = two / one
    console = Console()
    console.print(
        f"{given.grid}: one node {one:.0f} s, two nodes {two:.0f} s, ratio {ratio:.2f}"
    )
    console.print(f"bar: {BAR}", style="green" if ratio <= BAR else "red")
    found = {
        "grid": given.grid,
        "seconds_one": one,
        "seconds_two": two,
        "ratio": ratio,
        "bar": BAR,
    }
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
