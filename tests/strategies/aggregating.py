"""Clients with statistics, and rounds of FedRot that merge them; shared by the tests of
aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from flwr.app import MetricRecord
from torch import Tensor

import fedrot
from fedrot.aggregation import Mean
from fedrot.strategies import statistics_record
from fedrot.strategies.wire.arrays import STATISTICS
from tests.models import VOCABULARY, State, near
from tests.models import largest_difference as difference
from tests.strategies.classifier import SYMMETRY, build, state
from tests.strategies.fakes import broadcast, reply, tensors_of

Statistics = Mapping[str, Mapping[str, Tensor]]
OUTPUT = "bert.encoder.layer.0.attention.output.dense.weight"
UP, DOWN = (
    "bert.encoder.layer.0.intermediate.dense.weight",
    "bert.encoder.layer.0.output.dense.weight",
)
HEAD = ("classifier.weight", "classifier.bias")
PARTS = fedrot.AlignmentOptions().parts
PERMUTATIONS = fedrot.AlignmentOptions(parts=("heads", "ffn"))
ANCHOR = pytest.mark.parametrize("anchor", ["global", "running"])


@dataclass(frozen=True)
class Client:
    update: State
    weight: float
    statistics: Statistics


def batches(seed, rows=16, length=12):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return [{"input_ids": ids, "attention_mask": mask}]


def loaded(tensors):
    model = build()
    model.load_state_dict(tensors)
    return model


def grams(tensors, seed=0, **options):
    return fedrot.collect_gram(loaded(tensors), batches(seed), **options)


def fishers(tensors, seed=0):
    return fedrot.collect_fisher(loaded(tensors), batches(seed, rows=6))


@cache
def _honest(collect):
    updates = [near(state(), 0.05, seed) for seed in range(3)]
    return tuple(
        Client(update, weight, collect(update, seed))
        for seed, (update, weight) in enumerate(
            zip(updates, (3.0, 10.0, 5.0), strict=True)
        )
    )


def honest(collect=grams):
    """Return three clients that trained from the broadcast model, each on data of its
    own.
    """
    return [
        replace(
            client,
            update={name: tensor.clone() for name, tensor in client.update.items()},
        )
        for client in _honest(collect)
    ]


def scrambled(clients, collect=grams, parts=PARTS):
    """Return the same functions in other coordinates, with statistics of those."""
    found = []
    for seed, client in enumerate(clients):
        update = fedrot.random_equivalent(client.update, SYMMETRY, seed + 10, parts)
        found.append(Client(update, client.weight, collect(update, seed)))
    return found


def answer(to, client, index, dtype=torch.float32, **metrics):
    message = reply(to, client.update, client.weight, index, **metrics)
    if client.statistics:
        message.content[STATISTICS] = statistics_record(client.statistics, dtype)
    return message


def finished(
    strategy, clients, server_round=1, base=None, dtype=torch.float32, **metrics
):
    """Play a round that may have no model; each metric is one number for each
    client.
    """
    asked = broadcast(strategy, base or state(), len(clients), server_round)
    replies = [
        answer(message, client, i, dtype, **{n: of[i] for n, of in metrics.items()})
        for i, (message, client) in enumerate(zip(asked, clients, strict=True))
    ]
    return strategy.aggregate_train(server_round, replies)


def play(*given, **settings):
    arrays, metrics = finished(*given, **settings)
    assert arrays is not None
    return arrays, metrics or MetricRecord()


def merged(aggregator, clients):
    for client in clients:
        aggregator.add(client.update, client.weight, client.statistics)
    return aggregator.result()


def mean(clients):
    return merged(Mean(), [replace(client, statistics={}) for client in clients])


def apart(result, expected):
    return difference(tensors_of(result), expected)


def headless(client, rows):
    """Return a client that trained some rows of the head, or has none."""
    if rows is None:
        update = {
            name: tensor for name, tensor in client.update.items() if name not in HEAD
        }
        full, marked = fedrot.completed(update, state())
    else:
        full, marked = fedrot.completed(
            client.update, state(), dict.fromkeys(HEAD, rows)
        )
    return Client(full, client.weight, {**client.statistics, **marked})
