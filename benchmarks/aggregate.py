"""Speed and memory of aggregating a round at the server, against Flower's own FedAvg,
on the CPU.

Both strategies get the same replies of BERT-base size, near the broadcast model. They
take turns within every repetition; a ratio is the geometric mean of the ratios within
the repetitions, with its 95 % interval. Ours decodes, checks, aligns and averages;
FedAvg decodes and averages. With ``--busy N`` the rounds are timed a second time beside
N processes that compute without end.

Memory is measured in a separate process per strategy and number of clients: the
high-water mark of the resident set during ``aggregate_train``, less the resident set
before, broadcast model included. Replies come from an iterator that makes each one on
demand, like a grid that fetches them one at a time. In these processes glibc returns
freed blocks at once: memory that the allocator keeps is not counted.

    python benchmarks/aggregate.py [--clients 10] [--memory-clients 4 16 64] [--repeats
    5] [--busy 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from align import config, drifted, initialise, reset_peak, shapes, status, timed
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedrot.options import AlignmentOptions
from fedrot.simulations.comparison.paired import paired_difference
from fedrot.simulations.federation.grids import LocalGrid
from fedrot.strategies import FedRot, to_arrays
from fedrot.strategies.wire.arrays import encode

State = dict[str, Tensor]

#: Seconds of each contestant in every repetition.
Times = dict[str, list[float]]

#: The compared strategies: name and constructor, given the number of layers.
CONTESTANTS = {
    "FedAvg": lambda layers: FedAvg(),
    "running": lambda layers: FedRot(config(layers)),
    "global": lambda layers: FedRot(
        config(layers), alignment=AlignmentOptions(anchor="global")
    ),
}
OURS = ("running", "global")

#: Environment in which glibc's malloc returns freed blocks of a megabyte and more to
#: the system.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

#: Limits: extra memory at the most clients over that at the fewest, seconds over
#: FedAvg's by anchor, and how many times more than FedAvg's a round's seconds grow
#: beside busy processes.
BARS = {"memory": 1.05, "running": 1.05, "global": 1.08, "busy": 2.0}


def asked(strategy: FedAvg, model: ArrayRecord, clients: int) -> list[Message]:
    """Return the messages of a strategy's first round."""
    grid = LocalGrid(dict.fromkeys(range(1, clients + 1), lambda _: None))
    return list(strategy.configure_train(1, model, ConfigRecord(), grid))


def reply(to: Message, arrays: ArrayRecord) -> Message:
    """Return a client's answer."""
    metrics = MetricRecord({"num-examples": 100 + to.metadata.dst_node_id})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=to)


def arriving(messages: list[Message], model: State, client: State) -> Iterator[Message]:
    """Yield the replies one at a time; their updates lie on the line from the model to
    a client's.
    """
    for place, message in enumerate(messages):
        update = ArrayRecord()
        for name, tensor in model.items():
            update[name] = encode(
                name, torch.lerp(tensor, client[name], 1 - 0.5 * place / len(messages))
            )
        yield reply(message, update)
        del update


def seconds(options: argparse.Namespace) -> tuple[Times, Times]:
    """Return the seconds of every contestant in every repetition, on the machine as it
    is and beside busy processes. The first, untimed repetition warms up.
    """
    model = initialise(options.layers, 0)
    client = drifted(model, options.drift, 1)
    record = to_arrays(model)
    strategies = {name: build(options.layers) for name, build in CONTESTANTS.items()}
    messages = {
        name: asked(s, record, options.clients) for name, s in strategies.items()
    }
    replies = list(arriving(messages["FedAvg"], model, client))

    def repeated() -> Times:
        times: Times = {name: [] for name in strategies}
        for _ in range(options.repeats):
            for name, strategy in strategies.items():
                run = partial(strategy.aggregate_train, 1, replies)
                times[name].append(timed(run, "wall"))
        return times

    for strategy in strategies.values():
        strategy.aggregate_train(1, replies)
    alone = repeated()
    if not options.busy:
        return alone, {}
    with busy(options.busy):
        return alone, repeated()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Let processes compute without end, until the context is left."""
    loop = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(loop) for _ in range(processes)]
    try:
        # They need a moment to start.
        time.sleep(1)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def interval(times: Times, above: str, below: str) -> list[float]:
    """Return the geometric mean of the ratios within repetitions, and its 95 %
    interval.
    """
    logs = [math.log(a / b) for a, b in zip(times[above], times[below], strict=True)]
    paired = paired_difference(logs)
    ends = (0.0, -paired.smallest, paired.smallest)
    return [math.exp(paired.mean + end) for end in ends]


def memory_child(name: str, clients: int, layers: int, drift: float) -> None:
    """Print the peak extra memory of one aggregation, in model sizes."""
    small = initialise(1, 5)
    warm = CONTESTANTS[name](1)
    warm.aggregate_train(
        1, arriving(asked(warm, to_arrays(small), 2), small, drifted(small, drift, 6))
    )
    model = initialise(layers, 0)
    client = drifted(model, drift, 1)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
    strategy = CONTESTANTS[name](layers)
    messages = asked(strategy, to_arrays(model), clients)
    reset_peak()
    before = status("VmRSS")
    arrays, _ = strategy.aggregate_train(1, arriving(messages, model, client))
    peak = status("VmHWM")
    assert arrays is not None
    assert len(arrays) == len(model)
    print((peak - before) / size)


def peak_memory(name: str, clients: int, options: argparse.Namespace) -> float:
    """Return the peak extra memory in model sizes, from a process of its own."""
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--memory-child",
        name,
        str(clients),
    ]
    command += ["--layers", str(options.layers), "--drift", str(options.drift)]
    command += ["--threads", str(options.threads)]
    environment = {**os.environ, **GIVEN_BACK}
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    )
    return float(result.stdout.strip().splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements as plain data."""
    times, loaded = seconds(options)
    slower = {
        name: statistics.median(loaded[name]) / statistics.median(times[name])
        for name in loaded
    }
    memory = {
        name: {
            clients: peak_memory(name, clients, options)
            for clients in options.memory_clients
            # It holds all replies: a few are enough to see how it grows.
            if name in OURS or clients <= options.fedavg_clients
        }
        for name in CONTESTANTS
    }
    return {
        "layers": options.layers,
        "parameters": sum(
            torch.Size(shape).numel() for shape in shapes(options.layers).values()
        ),
        "clients": options.clients,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "drift": options.drift,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "of_fedavg": {name: interval(times, name, "FedAvg") for name in OURS},
        "busy": options.busy,
        "slower_beside_busy": slower,
        "peak_memory_model_sizes": memory,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, and whether the bars are met."""
    numbers = list(result["peak_memory_model_sizes"][OURS[0]])
    table = Table(
        box=SIMPLE_HEAD,
        title=f"Aggregating {result['clients']} replies: {result['layers']} layers, "
        f"{result['parameters'] / 1e6:.0f} M parameters, {result['threads']} threads, "
        f"drift {result['drift']:g}",
    )
    table.add_column("strategy")
    for column in ("seconds", "of FedAvg", *(f"memory K={k}" for k in numbers)):
        table.add_column(column, justify="right", no_wrap=True)
    for name, memory in result["peak_memory_model_sizes"].items():
        label = name if name == "FedAvg" else f"FedRot, {name}"
        cells = [f"{memory[k]:.2f}" if k in memory else "" for k in numbers]
        of_fedavg = "1"
        if name in OURS:
            mean, low, high = result["of_fedavg"][name]
            of_fedavg = f"{mean:.2f} ({low:.2f} to {high:.2f})"
        table.add_row(label, f"{result['seconds'][name]:.2f}", of_fedavg, *cells)
    console.print(table)
    console.print(
        "seconds: medians of one aggregate_train. memory: peak above the resident set "
        "before, in model sizes, at K clients whose replies come one at a time."
    )
    for name in OURS:
        memory = result["peak_memory_model_sizes"][name]
        grown = memory[numbers[-1]] / memory[numbers[0]]
        bars = {
            f"at most {BARS[name]:g}x FedAvg's time": result["of_fedavg"][name][0]
            <= BARS[name],
            f"memory at K={numbers[-1]} within 5 % of K={numbers[0]} "
            f"({grown:.3f})": grown <= BARS["memory"],
        }
        if slower := result["slower_beside_busy"]:
            times = slower[name] / slower["FedAvg"]
            told = f"beside {result['busy']} busy processes {slower[name]:.1f} times "
            told += f"slower, {times:.2f} of FedAvg's {slower['FedAvg']:.1f}"
            bars[told] = times <= BARS["busy"]
        for bar, ok in bars.items():
            console.print(f"{'met   ' if ok else 'MISSED'}  anchor {name}: {bar}")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--clients", type=int, default=10, help="replies of the timed rounds"
    )
    parser.add_argument("--memory-clients", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument(
        "--fedavg-clients", type=int, default=16, help="most replies FedAvg must hold"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--busy", type=int, default=0, help="processes beside a second timing"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads; 0: torch's own choice"
    )
    parser.add_argument(
        "--drift", type=float, default=0.02, help="relative change of the clients"
    )
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the numbers to this file"
    )
    parser.add_argument("--memory-child", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if options.memory_child:
        name, clients = options.memory_child
        memory_child(name, int(clients), options.layers, options.drift)
        return
    result = measure(options)
    show(result, Console())
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
