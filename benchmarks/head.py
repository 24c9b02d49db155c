"""Memory of the server while it fits a task head to the sums of many clients.

The clients answer with sums of random features and have no network, so that the memory
is the server's: the model that it sends, and what it keeps of the answers. Printed is
the largest memory of the process beyond that before the fit, in sizes of the model, for
each number of clients. The default is the size of BERT-base.

    python benchmarks/head.py [--clients 4 50 200] [--width 768] [--megabytes 440]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedrot.simulations.federation.grids import LocalGrid
from fedrot.strategies import fit_task_head, to_arrays
from fedrot.strategies.wire.fitting_messages import (
    COUNT,
    LOSSES,
    ROWS,
    STAGE,
    SUM,
    SUMS,
    TASK_HEADS,
)
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.sums import ClassSums

CLASSES, ROWS_OF_A_CLIENT = 6, 100


def client(seed: int, width: int) -> Callable[[Message], Message]:
    """Return a node that answers with sums of random features."""

    def answer(message: Message) -> Message:
        (config,) = message.content.config_records.values()
        if config[STAGE] == COUNT:
            counts = {"training": ROWS_OF_A_CLIENT, "held_out": ROWS_OF_A_CLIENT}
            return Message(
                RecordDict({ROWS: MetricRecord({**counts})}), reply_to=message
            )
        if config[STAGE] == SUM:
            features = torch.randn(
                ROWS_OF_A_CLIENT, width, generator=torch.Generator().manual_seed(seed)
            )
            hot = torch.nn.functional.one_hot(
                torch.arange(ROWS_OF_A_CLIENT) % CLASSES, CLASSES
            ).double()
            wide = features.double()
            sums = ClassSums(hot.sum(0), hot.mT @ wide, wide.mT @ wide)
            return Message(
                RecordDict({SUMS: to_arrays(sums.packed())}), reply_to=message
            )
        heads = message.content.array_records[f"{TASK_HEADS}-0"]["bias"].shape[0]
        losses = torch.full(
            (heads, len(TEMPERATURES)), 100.0 + seed, dtype=torch.float64
        )
        counts = torch.full((1 + heads,), float(ROWS_OF_A_CLIENT), dtype=torch.float64)
        found = {"losses": losses, "squares": losses, "counts": counts}
        return Message(RecordDict({LOSSES: to_arrays(found)}), reply_to=message)

    return answer


def measure(clients: int, width: int, megabytes: int) -> float:
    """Return the additional memory of a fit, in sizes of the model."""
    rows = megabytes * 2**18 // width
    model = {"embeddings.weight": torch.randn(rows, width)}
    model |= {
        "classifier.weight": torch.zeros(CLASSES, width),
        "classifier.bias": torch.zeros(CLASSES),
    }
    arrays = ArrayRecord(model)
    grid = LocalGrid({node: client(node, width) for node in range(1, clients + 1)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with outside_of_the_engine():
        fit_task_head(
            grid, arrays, {"model_type": "distilbert"}, task_head="classifier"
        )
    return (
        (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        / 2**10
        / megabytes
    )


def main() -> None:
    """Measure each number of clients in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 50, 200])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--megabytes", type=int, default=440)
    options = parser.parse_args()
    for clients in options.clients:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (clients, options.width, options.megabytes))
        print(
            f"{clients} clients: {found:.2f} sizes of a model of {options.megabytes} MB"
        )


if __name__ == "__main__":
    main()
