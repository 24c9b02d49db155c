"""Seconds of a whole round in a deployment, FedRot against Flower's own FedAvg, on one
machine.

A SuperLink and four SuperNodes run as docs/how-to/deploy.md starts them, with TLS and
keys, on loopback. The model has BERT-base's size in float32. Clients do not train: they
reply with the received model plus a small drift. One ServerApp runs rounds of FedAvg
and of FedRot in turn; the first of each warms up. A ratio is FedRot's seconds by
FedAvg's in two neighbouring rounds; the median of the ratios is reported.

A round lasts from the end of ``configure_train`` to the end of ``aggregate_train``:
sending the model, waiting for the clients, fetching, checking, aligning and averaging
their replies. ``memory`` is the peak of the resident set of the ServerApp's process.
Clients and server share the machine: what a client computes takes time from the server,
which has one thread for that reason (docs/results/speed.md).

The SuperLink keeps its state in memory. Clients draw their drift from their partition
id and the number of the round. Whatever was started is stopped at the end, after an
error and Ctrl-C, too.

    python benchmarks/deployed.py [--layers 12] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import flwr
import psutil
import torch
from align import shapes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tests.deployment.federation import Federation  # noqa: E402

APP = ROOT / "benchmarks" / "deployed_app"
CLIENTS = 4
BAR = 1.05
#: Seconds between two looks at the processes' memory.
PAUSE = 2.0


def start(federation: Federation, options: argparse.Namespace, out: Path) -> None:
    """Start the SuperLink, the SuperNodes and the run."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(APP, federation.folder / "my-app", ignore=ignored)
    federation.run("certificates")
    threads = (
        f"export OMP_NUM_THREADS={options.threads}"
        if options.threads
        else "unset OMP_NUM_THREADS"
    )
    federation.start("superlink", f"{threads}\n{federation.command('superlink')}")
    federation.until(federation.listens, "the SuperLink listens")
    federation.run("connection")
    federation.run("register")
    for client in range(CLIENTS):
        federation.start(f"node{client}", federation.command("node", client))
    settings = {
        "layers": options.layers,
        "clients": CLIENTS,
        "pairs": options.rounds + 1,
        "drift": options.drift,
    }
    given = " ".join(f"{name}={value}" for name, value in settings.items())
    federation.start(
        "run", f"flwr run my-app secure --stream -c 'out=\"{out}\" {given}'"
    )


def resident(federation: Federation) -> int:
    """Return the bytes of the resident sets of all processes."""
    found = 0
    for process in federation.left():
        try:
            found += process.memory_info().rss
        except psutil.Error:
            continue
    return found


def read(out: Path) -> list[dict[str, Any]]:
    """Return the rounds that have ended."""
    file = out / "rows.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


def rounds(
    options: argparse.Namespace, console: Console
) -> tuple[list[dict[str, Any]], int]:
    """Return the rounds, and the most memory that all processes had at once."""
    with tempfile.TemporaryDirectory() as name, Federation(Path(name)) as federation:
        out = federation.folder / "results"
        out.mkdir()
        start(federation, options, out)
        run, seen, most = federation.processes["run"], 0, 0
        while run.poll() is None:
            most = max(most, resident(federation))
            for row in read(out)[seen:]:
                seen += 1
                console.print(
                    f"round {row['number']}, {row['strategy']}: {row['seconds']:.1f} s"
                )
            time.sleep(PAUSE)
        found = read(out)
        if len(found) < 2 * (options.rounds + 1):
            raise RuntimeError(
                f"The run ended after {len(found)} rounds.\n{federation.logs()}"
            )
    return found, most


def neighbours(rows: list[dict[str, Any]]) -> list[float]:
    """Return FedRot's seconds by FedAvg's for every two neighbouring rounds after the
    warm-up.
    """
    timed = [row for row in rows if not row["warm_up"]]
    pairs = [
        {row["strategy"]: row["seconds"] for row in both} for both in pairwise(timed)
    ]
    return [pair["FedRot"] / pair["FedAvg"] for pair in pairs]


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return all measurements as plain data."""
    rows, most = rounds(options, console)
    ratios = neighbours(rows)
    parameters = sum(
        torch.Size(shape).numel() for shape in shapes(options.layers).values()
    )
    return {
        "layers": options.layers,
        "parameters": parameters,
        "clients": CLIENTS,
        "drift": options.drift,
        "cores": os.cpu_count(),
        "threads": rows[0]["threads"],
        "versions": {
            "flwr": flwr.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
        "ratios": ratios,
        "of_fedavg": statistics.median(ratios),
        "peak_memory_of_all": most,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, and whether the bar is met."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"Rounds of {result['clients']} clients in a deployment: "
        f"{result['layers']} layers, "
        f"{result['parameters'] / 1e6:.0f} M parameters, {result['cores']} cores, "
        f"{result['threads']} threads, drift {result['drift']:g}",
    )
    table.add_column("round", justify="right")
    table.add_column("strategy", no_wrap=True)
    for column in ("seconds", "memory", "load"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        memory = f"{row['peak_memory'] / 2**30:.2f} GiB"
        label = f"{row['strategy']}{', warm-up' if row['warm_up'] else ''}"
        table.add_row(
            str(row["number"]),
            label,
            f"{row['seconds']:.1f}",
            memory,
            f"{row['load']:.1f}",
        )
    console.print(table)
    console.print(
        "Ratios of neighbouring rounds: "
        f"{', '.join(f'{ratio:.3f}' for ratio in result['ratios'])}. Median: "
        f"{result['of_fedavg']:.3f}. Memory of all processes together: at most "
        f"{result['peak_memory_of_all'] / 2**30:.1f} GiB."
    )
    ok = result["of_fedavg"] <= BAR
    console.print(f"{'met   ' if ok else 'MISSED'}  at most {BAR:g}x FedAvg's round")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds of each strategy"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of the server; 0: torch's own choice",
    )
    parser.add_argument(
        "--drift", type=float, default=0.02, help="relative change of the clients"
    )
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the numbers to this file"
    )
    options = parser.parse_args()
    # The ServerApp's process takes shapes and configuration of the model from align.py.
    paths = [str(APP.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # What was started is stopped on the way out; a signal's default would not take it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    result = measure(options, console)
    show(result, console)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
