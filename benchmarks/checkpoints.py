"""A long run with checkpoints: seconds for 100 rounds, size of the folder, and memory
of the process.

    python benchmarks/checkpoints.py [--rounds 1000] [--clients 20] [--width 64]

The clients answer with the model plus noise and train no network, so that the time is
the server's. Time and folder should grow by the same amount in every 100 rounds, and
memory should not grow.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from logging import ERROR, getLogger
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedrot.simulations.federation.grids import LocalGrid
from fedrot.strategies import Checkpointing, FedRot, from_arrays
from fedrot.strategies.wire.flower_compat import outside_of_the_engine


def client(seed: int) -> Callable[[Message], Message]:
    """Return a node that answers with the received model plus noise, and a few
    metrics.
    """
    generator = torch.Generator().manual_seed(seed)

    def answer(message: Message) -> Message:
        (arrays,) = message.content.array_records.values()
        noise = {
            k: t + torch.randn(t.shape, generator=generator)
            for k, t in from_arrays(arrays).items()
        }
        metrics = MetricRecord(
            {"num-examples": 10 + seed, "loss": 0.5, "accuracy": 0.25}
        )
        return Message(
            RecordDict({"arrays": ArrayRecord(noise), "metrics": metrics}),
            reply_to=message,
        )

    return answer


def memory() -> float:
    """Return the resident memory of this process in MB."""
    (line,) = (
        one
        for one in Path("/proc/self/status").read_text().splitlines()
        if "VmRSS" in one
    )
    return int(line.split()[1]) / 1024


def main() -> None:
    """Run, and print a line per 100 rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args()
    getLogger("flwr").setLevel(ERROR)
    grid = LocalGrid({node: client(node) for node in range(1, given.clients + 1)})
    model = {
        "layer.weight": torch.zeros(given.width, given.width),
        "layer.bias": torch.zeros(given.width),
    }
    with tempfile.TemporaryDirectory() as folder, outside_of_the_engine():
        started = time.process_time()

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
            nonlocal started
            if number and number % 100 == 0:
                size = (
                    sum(file.stat().st_size for file in Path(folder).rglob("*")) / 1024
                )
                seconds = time.process_time() - started
                print(
                    f"{number:6d} {seconds:7.2f} s {size:8.0f} KB {memory():7.1f} MB",
                    flush=True,
                )
                started = time.process_time()
            return MetricRecord({"loss": 1 / (1 + number), "accuracy": 0.5})

        strategy = FedRot(
            alignment=None, fraction_evaluate=0.0, checkpoints=Checkpointing(folder)
        )
        strategy.start(grid, ArrayRecord(model), given.rounds, evaluate_fn=evaluate)


if __name__ == "__main__":
    main()
