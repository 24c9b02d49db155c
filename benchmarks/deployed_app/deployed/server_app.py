"""The server: rounds of FedAvg and of FedRot in turn, with their seconds as rows of
``rows.jsonl``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

# Of the folder of benchmarks, which ``deployed.py`` puts on the path.
from align import config, initialise, reset_peak, status
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedrot.strategies import FedRot, to_arrays

#: Seconds after which a round goes on without a client.
TIMEOUT = 3600

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that notes when messages are configured, and when aggregation ends."""

    times: tuple[float, ...] = ()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the round's messages."""
        messages = super().configure_train(server_round, arrays, config, grid)
        self.times = (time.perf_counter(),)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model."""
        result = super().aggregate_train(server_round, replies)
        self.times = (*self.times, time.perf_counter())
        return result


class TimedFedRot(Timed, FedRot):
    """FedRot with the same notes."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; the first of each strategy is the warm-up."""
    settings = context.run_config
    layers, clients = int(settings["layers"]), int(settings["clients"])
    nodes: dict[str, Any] = {
        "min_train_nodes": clients,
        "min_available_nodes": clients,
        "fraction_evaluate": 0.0,
    }
    strategies: dict[str, Timed] = {
        "FedAvg": Timed(**nodes),
        "FedRot": TimedFedRot(config(layers), **nodes),
    }
    model = to_arrays(initialise(layers, 0))
    number = 0
    for pair in range(int(settings["pairs"])):
        for name, strategy in strategies.items():
            number += 1
            reset_peak()
            result = strategy.start(
                grid, model, 1, TIMEOUT, ConfigRecord({"number": number})
            )
            metrics: dict[str, Any] = dict(result.train_metrics_clientapp.get(1, {}))
            model = result.arrays
            configured, ended = strategy.times
            row = {
                "number": number,
                "strategy": name,
                "warm_up": pair == 0,
                "seconds": ended - configured,
                "peak_memory": status("VmHWM"),
                "load": os.getloadavg()[0],
                "threads": torch.get_num_threads(),
                "metrics": metrics,
            }
            with (Path(str(settings["out"])) / "rows.jsonl").open(
                "a", encoding="utf-8"
            ) as rows:
                rows.write(json.dumps(row) + "\n")
