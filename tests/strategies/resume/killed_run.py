"""Runs that are killed: a process that imports everything once and forks one child per command.

Commands are JSON lines on stdin. For each, it prints the child's process id, then whatever the child
marks, then ``ended``; the child stays there to be killed until a line says otherwise, and its exit
code is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, Result
from transformers import BertConfig, BertForSequenceClassification

from fedrot._io import replacing
from fedrot.strategies import Aligned
from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.run import run
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.settings import Reporting, Server
from tests.models import near
from tests.strategies.fakes import Client, FakeGrid, reply, tensors_of

ROUNDS, CLIENTS, NODES = 6, 4, 2
CONFIG = BertConfig(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    vocab_size=3000,
    max_position_embeddings=64,
)
METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


#: The mark at which a child waits for its kill.
LAST_MARK: str | None = None


def mark(*what: Any) -> None:
    """Say where the child is, and wait there if it is to go no further."""
    line = " ".join(map(str, what))
    os.write(1, (line + "\n").encode())  # pipes take lines of this size whole
    while line == LAST_MARK:
        signal.pause()


class MarkedStrategy(Aligned, FedAdam):
    """Aligned FedAdam that says when it aggregates."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        mark("aggregate", server_round)
        aggregated = super().aggregate_train(server_round, replies)
        mark("aggregated", server_round)
        return aggregated


class MarkedCheckpoints(Checkpointing):
    """Checkpointing that say when they are written."""

    def save(self, number: int, result: Result, state: RunState) -> Path:
        mark("write", number)
        path = super().save(number, result, state)
        mark("written", number)
        return path


def client(index: int) -> Client:
    """Return a client whose answer follows from what it is sent."""

    def train(message: Message) -> Message:
        received = tensors_of(message.content.array_records["arrays"])
        number: Any = message.content.config_records["config"]["server-round"]
        update = near(received, 0.01 * (1 + index), 10 * number + index)
        return reply(message, update, 10 + 3 * index, index, train_loss=0.5 / (number + index))

    return train


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    """Return metrics that depend on the model and on the global random generators."""
    norm = sum(float(t.double().square().sum()) for t in tensors_of(arrays).values())
    drawn = [random.random(), float(np.random.normal()), float(torch.rand(()))]
    return MetricRecord({"norm": norm, "drawn": drawn, "undefined": float("nan")})


def play(folder: str, until: str | None = None) -> None:
    """Play the run, or the rest of it, and write what it ended with; wait at a mark for a kill."""
    global LAST_MARK
    home, LAST_MARK = Path(folder), until
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model = BertForSequenceClassification(CONFIG)
    strategy = MarkedStrategy(
        CONFIG,
        fraction_train=NODES / CLIENTS,
        fraction_evaluate=0.0,
        server=Server(deterministic=True),
        eta=0.01,
        reporting=Reporting(rows=home / "report.jsonl"),
    )
    grid = FakeGrid({100 + i: client(i) for i in range(CLIENTS)})
    mark("start")
    result = run(
        strategy,
        grid,
        ArrayRecord(model.state_dict()),
        ROUNDS,
        evaluate_fn=evaluate,
        checkpoints=MarkedCheckpoints(home / "checkpoints", keep=2),
        resume=home / "checkpoints",
    )
    with replacing(home / "end.json") as temporary:
        temporary.write_text(json.dumps(ending(result, home / "report.jsonl")), encoding="utf-8")
    mark("finish")


def ending(result: Result, report: Path) -> dict[str, Any]:
    """Return all that has to be the same in an uninterrupted run."""
    digest = hashlib.sha256()
    for name, array in result.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape} {array.stype}".encode())
        digest.update(array.data)
    metrics = {
        kind: {number: dict(record) for number, record in getattr(result, kind).items()}
        for kind in METRICS
    }
    lines = report.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {"model": digest.hexdigest(), "metrics": repr(metrics), "rows": rows, "next": random.random()}


def die(folder: str, at: int) -> None:
    """Save one more round to a folder of checkpoints, and die just before a file operation.

    Past the last operation the checkpoint is written and the child ends by itself.
    """
    checkpoints = Checkpointing(folder, keep=1)
    newest = checkpoints.newest()
    result = Result(ArrayRecord({k: t + 1 for k, t in tensors_of(newest.result.arrays).items()}))
    state = RunState(FedAvg(), ConfigRecord(), ConfigRecord())
    done = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > at:
                mark("dies before", operation.__name__)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    with checkpoints.writing():
        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        checkpoints.save(newest.round + 1, result, state)


def serve() -> None:
    """Fork a child per command until stdin ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = {"play": play, "die": die}[command.pop("do")]
        child = os.fork()
        if child == 0:
            try:
                what(**command)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        mark(child)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        mark("ended")
        sys.stdin.readline()
        mark(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    serve()
