"""Processor time of ``fedrot simulate`` beside Flower's own simulation of FedAvg.

Both train the same model of many clients on the same rows for the same rounds, with the
ClientApp of ``fedrot simulate``, and test every round's model on the same rows.
``fedrot simulate`` also measures each site, and writes rows and a report. Flower's own
is ``run_simulation`` with one actor a core. Processor time is that of all processes
that a run has started, also while they end; runs take turns.

    python benchmarks/simulate.py [--clients 100] [--rounds 3] [--repeats 3]
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas
import psutil
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.client_app import app as client_app
from fedrot.simulations.models import load_tensors
from fedrot.simulations.tasks.training import evaluate
from fedrot.strategies.wire.loaded_model import tensors_of

#: Seconds between two looks at the processes of a run.
PAUSE = 0.1


def flowers_own(clients: int, rounds: int) -> None:
    """Run FedAvg in Flower's simulation, and print the last accuracy."""
    experiment = Experiment(
        clients=clients,
        rounds=rounds,
        partition="iid",
        strategies=("fedavg",),
        seeds=(0,),
    )
    run = CellRun(experiment, 0, experiment.strategies[0])
    network = run.model()
    test_rows = np.arange(len(run.task.test.labels))
    found = []

    def tested(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        load_tensors(network, arrays.to_torch_state_dict(), "")
        scores = evaluate(network, run.task, run.task.test, test_rows)
        found.append(scores["accuracy"])
        return MetricRecord({"accuracy": found[-1]})

    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients)
        strategy.start(
            grid,
            ArrayRecord(tensors_of(network)),
            rounds,
            # No trainings are shared.
            train_config=ConfigRecord({**run.job, "cache": ""}),
            evaluate_fn=tested,
        )

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, clients, backend_config=resources)
    print(f"accuracy {found[-1]:.4f}")


def ours(clients: int, rounds: int, folder: str) -> list[str]:
    """Return the command of the same run."""
    command = [sys.executable, "-m", "fedrot", "simulate", "--partition", "iid"]
    command += ["--clients", str(clients), "--rounds", str(rounds), "--seeds", "0,"]
    return [*command, "--strategies", "fedavg", "--out", f"{folder}/run"]


def accuracy_in(folder: str) -> float:
    """Return the last accuracy on all test rows of a run of ``fedrot simulate``."""
    rows = pandas.read_csv(f"{folder}/run/rows.csv")
    central = rows[(rows["scope"] == "central") & (rows["metric"] == "accuracy")]
    return float(central.sort_values("round")["value"].iloc[-1])


def processor_seconds(command: list[str]) -> tuple[float, float, str]:
    """Return the processor time of a command's processes, its seconds, and output."""
    start = time.perf_counter()
    used = dict[tuple[int, float], float]()
    with tempfile.TemporaryFile("w+") as output:
        with psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                for each in [process, *process.children(recursive=True)]:
                    try:
                        times = each.cpu_times()
                        key = each.pid, each.create_time()
                    except psutil.NoSuchProcess:
                        continue
                    used[key] = times.user + times.system
                time.sleep(PAUSE)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{text}")
    return sum(used.values()), time.perf_counter() - start, text


def main() -> None:
    """Run both in turns, and print their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = ["--clients", str(options.clients), "--rounds", str(options.rounds)]
    if options.child:
        logging.getLogger("flwr").setLevel(logging.WARNING)
        flowers_own(options.clients, options.rounds)
        return
    ratios = []
    for repeat in range(options.repeats):
        theirs = [sys.executable, str(Path(__file__)), "--child", *size]
        flower, flower_wall, text = processor_seconds(theirs)
        with tempfile.TemporaryDirectory() as folder:
            mine, wall, _ = processor_seconds(
                ours(options.clients, options.rounds, folder)
            )
            accuracy = accuracy_in(folder)
        ratios.append(mine / flower)
        print(
            f"turn {repeat}: Flower {flower:.1f} s of processors, {flower_wall:.1f} s, "
            f"{text.splitlines()[-1]}; fedrot simulate {mine:.1f} s, {wall:.1f} s, "
            f"accuracy {accuracy:.4f}"
        )
    print(
        f"ratio {fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{options.clients} clients, {options.rounds} rounds"
    )


if __name__ == "__main__":
    main()
