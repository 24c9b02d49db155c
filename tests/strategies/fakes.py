"""A grid whose clients are functions in this process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity

from fedrot.simulations.federation.grids import LocalGrid
from fedrot.strategies import Aligned

TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

Client = Callable[[Message], Message | None]


def reply(to, tensors, examples, client=None, **metrics):
    """Answer a message with tensors, a number of examples, and optionally the client's
    own id.
    """
    content = RecordDict(
        {
            "arrays": ArrayRecord(tensors),
            "metrics": MetricRecord({"num-examples": examples, **metrics}),
        }
    )
    if client is not None:
        content["client"] = ConfigRecord({"partition-id": client})
    return Message(content, reply_to=to)


def failure(to):
    return Message(Error(code=1, reason="crashed"), reply_to=to)


class FakeGrid(LocalGrid):
    """Delivers every message to the client of its node; ``asked`` has the nodes of
    every delivery.
    """

    def __init__(self, clients):
        super().__init__(clients)
        self.asked: list[list[int]] = []

    def push_messages(self, messages):
        sent = list(messages)
        self.asked.append([message.metadata.dst_node_id for message in sent])
        return super().push_messages(sent)


def grid_of(clients):
    """Return a grid whose nodes are these clients, from number 100 on."""
    return FakeGrid(dict(enumerate(clients, start=100)))


def node_of(app, run=1, **config):
    """Return a node with a real ``ClientApp``."""
    return lambda message: app(message, Context(run, 1, config, RecordDict(), {}))


def in_front_of(strategy):
    """Return the class with alignment in front of a strategy."""
    return type(f"Aligned{strategy.__name__}", (Aligned, strategy), {})


def broadcast(strategy, tensors, nodes=3, server_round=1):
    """Let a strategy send a model to that many clients, or to these; return its
    messages in the order of their nodes.
    """
    if isinstance(nodes, int):
        nodes = [failure] * nodes
    grid = nodes if isinstance(nodes, FakeGrid) else grid_of(nodes)
    arrays = ArrayRecord(dict(tensors))
    sent = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
    return sorted(sent, key=lambda message: message.metadata.dst_node_id)


def replies(asked, sent, weights=(), **metrics):
    """Return the replies of clients 0, 1, ..., which send these updates."""
    weighted = zip(asked, sent, [*weights] or count(10), strict=False)
    return [
        reply(message, update, weight, i, **metrics)
        for i, (message, update, weight) in enumerate(weighted)
    ]


def aggregated(strategy, base, sent, weights=(), nodes=(), **metrics):
    """Return the model and the metrics of a round whose clients send these updates.

    The nodes answer whatever they are asked before.
    """
    asked = broadcast(strategy, base, nodes or len(sent))
    answers = replies(asked, sent, weights, **metrics)
    arrays, figures = strategy.aggregate_train(1, answers)
    assert arrays is not None
    return arrays, dict(figures or {})


def model_in(message):
    """Return the model that a message brings."""
    return tensors_of(message.content.array_records["arrays"])


def round_of(message):
    """Return the number of the round that a message says."""
    return message.content["config"]["server-round"]


def arrays_of(record):
    assert record is not None
    return {name: array.numpy() for name, array in record.items()}


def wire_bytes(record):
    return sum(len(array.data) for array in record.values())


def tensors_of(record):
    return {name: torch.from_numpy(array) for name, array in arrays_of(record).items()}


def largest_difference(a, b):
    left = arrays_of(a)
    right = arrays_of(b)
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)
