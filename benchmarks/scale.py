"""Seconds and memory of one round of ``FedRot`` at the server: many clients, or a large
model.

Every reply is made when the strategy asks for it, tensor by tensor: the model that the
clients received plus noise (2 % of each tensor). Its making is not timed. Weights are
random, shapes are those of ``gpu.py`` or of MiniLM. Memory is the high-water mark of
the resident set during ``aggregate_train``, less the resident set before it, which
holds the model once. Each number of clients has a process of its own, and glibc
returns freed blocks at once.

    python benchmarks/scale.py --model minilm --clients 10 100 1000
    python benchmarks/scale.py --model llama-1b --clients 3 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from aggregate import GIVEN_BACK, asked, reply
from align import reset_peak, status
from flwr.app import ArrayRecord, Message
from flwr.supercore.task_identity import TaskIdentity
from gpu import DRIFT, DTYPES, Shape
from gpu import MODELS as LARGE
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedrot.strategies import FedRot
from fedrot.strategies.wire.arrays import encode, from_arrays

MODELS = {"minilm": Shape("bert", 6, 384, 12, 12, 1536, 30522), **LARGE}


def random_model(shape: Shape, dtype: torch.dtype) -> ArrayRecord:
    """Return a model as a server holds it."""
    generator = torch.Generator().manual_seed(0)
    record = ArrayRecord()
    for name, size in shape.shapes(shape.layers).items():
        tensor = torch.randn(size, generator=generator).mul_(0.02)
        record[name] = encode(name, tensor.to(dtype))
    return record


class Clients:
    """Replies of clients, which are made one at a time; ``seconds`` is how long their
    making took.
    """

    def __init__(self, messages: list[Message], record: ArrayRecord) -> None:
        self.messages = messages
        self.record = record
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Message]:
        for message in self.messages:
            start = time.perf_counter()
            generator = torch.Generator().manual_seed(message.metadata.dst_node_id)
            update = ArrayRecord()
            for name, tensor in from_arrays(self.record).items():
                noise = torch.randn(tensor.shape, generator=generator)
                changed = tensor + noise.mul_(DRIFT * 0.02)
                update[name] = encode(name, changed.to(tensor.dtype))
                del noise, changed
            answer = reply(message, update)
            del update
            self.seconds += time.perf_counter() - start
            yield answer
            del answer


def one_round(model: str, clients: int, dtype: str) -> dict[str, float]:
    """Return what one round takes."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    shape = MODELS[model]
    record = random_model(shape, DTYPES[dtype])
    size = sum(len(array.data) for array in record.values())
    strategy = FedRot(shape.config(shape.layers))
    replies = Clients(asked(strategy, record, clients), record)
    reset_peak()
    before = status("VmRSS")
    start = time.perf_counter()
    arrays, _ = strategy.aggregate_train(1, replies)
    seconds = time.perf_counter() - start - replies.seconds
    assert arrays is not None
    peak = (status("VmHWM") - before) / size
    return {
        "clients": clients,
        "gigabytes": size / 1e9,
        "seconds": seconds,
        "memory": peak,
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*MODELS], default="minilm")
    parser.add_argument("--dtype", choices=[*DTYPES], default="float32")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(one_round(options.model, *options.clients, options.dtype)))
        return
    rows = []
    environment = {**os.environ, **GIVEN_BACK}
    for clients in options.clients:
        command = [sys.executable, __file__, "--child", "--model", options.model]
        command += ["--dtype", options.dtype, "--clients", str(clients)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    columns = ("clients", "model", "seconds", "seconds a client", "memory beside it")
    table = Table(*columns, box=SIMPLE_HEAD, title=f"{options.model}, {options.dtype}")
    for row in rows:
        table.add_row(
            f"{row['clients']}",
            f"{row['gigabytes']:.2f} GB",
            f"{row['seconds']:.1f}",
            f"{row['seconds'] / row['clients']:.3f}",
            f"{row['memory']:.2f} model sizes",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
