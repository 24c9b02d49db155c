"""Runs in child processes that are killed, and that go on in another child."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAdam

from fedrot.strategies import Aligned
from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.run import run
from fedrot.strategies.settings import Reporting, Server
from tests.models import near
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import (
    grid_of,
    model_in,
    reply,
    round_of,
    tensors_of,
)

ROUNDS, CLIENTS, NODES = 3, 4, 2
METRICS = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)
#: Says where a child is; the child waits at its last mark to be killed.


@dataclass(frozen=True)
class Ended:
    """What a child marked, when (seconds since it was started), and its exit code."""

    marks: dict[str, float]
    code: int


def child(work, kill_at="", seconds=0.0, until=""):
    """Let a child work; kill it so many seconds after a mark. It does not go on from
    ``until``.
    """
    reading, writing = os.pipe()
    started = time.monotonic()
    process = os.fork()
    if process == 0:

        def mark(what):
            os.write(writing, f"{what}\n".encode())
            while what == until:
                signal.pause()

        try:
            work(mark)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    marks = {}
    with os.fdopen(reading) as lines:
        for line in lines:
            marks[line.strip()] = time.monotonic() - started
            if line.strip() == kill_at:
                time.sleep(seconds)
                os.kill(process, signal.SIGKILL)
    return Ended(marks, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def client(index):
    """Return a client whose answer follows from what it is sent."""

    def train(message):
        received = model_in(message)
        number = round_of(message)
        update = near(received, 0.01 * (1 + index), 10 * number + index)
        return reply(
            message,
            update,
            10 + 3 * index,
            index,
            train_loss=0.5 / (number + index),
            norm_bit=index % 2,
        )

    return train


def evaluate(number, arrays):
    """Return metrics that depend on the model and on the global random generators."""
    norm = sum(float(t.double().square().sum()) for t in tensors_of(arrays).values())
    drawn = [random.random(), float(np.random.normal()), float(torch.rand(()))]
    return MetricRecord({"norm": norm, "drawn": drawn, "undefined": float("nan")})


def play(folder, mark):
    """Play the run, or the rest of it, and write what it ended with."""

    class Marked(Aligned, FedAdam):
        def aggregate_train(self, server_round, replies):
            mark(f"aggregate {server_round}")
            aggregated = super().aggregate_train(server_round, replies)
            mark(f"aggregated {server_round}")
            return aggregated

    class MarkedCheckpoints(Checkpointing):
        def save(self, number, result, state):
            mark(f"write {number}")
            path = super().save(number, result, state)
            mark(f"written {number}")
            return path

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    mark("start")
    result = run(
        Marked(
            SYMMETRY,
            fraction_train=NODES / CLIENTS,
            fraction_evaluate=0.0,
            server=Server(deterministic=True),
            eta=0.01,
            reporting=Reporting(rows=folder / "rows.jsonl"),
        ),
        grid_of(map(client, range(CLIENTS))),
        ArrayRecord(state()),
        ROUNDS,
        evaluate_fn=evaluate,
        checkpoints=MarkedCheckpoints(folder / "checkpoints", keep=2),
    )
    rows = (folder / "rows.jsonl").read_text("utf-8")
    (folder / "end").write_text(repr((ending(result), rows)))
    mark("finish")


def ending(result):
    """Return a result in a form that compares bit for bit, and the next random
    numbers.
    """
    metrics = {
        kind: repr(
            {number: dict(record) for number, record in getattr(result, kind).items()}
        )
        for kind in METRICS
    }
    arrays = [(k, a.dtype, a.shape, a.stype, a.data) for k, a in result.arrays.items()]
    drawn = (random.random(), float(np.random.normal()), float(torch.rand(())))
    return {**metrics, "arrays": arrays, "drawn": drawn}
