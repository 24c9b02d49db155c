"""Clients with statistics, and rounds of FedRot that merge them; shared by the tests of
aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
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
PERMUTATIONS = fedrot.AlignmentOptions(parts=("heads", "ffn"))
ANCHOR = pytest.mark.parametrize("anchor", ["global", "running"])


@dataclass(frozen=True)
class Client:
    update: State
    weight: float
    statistics: Statistics


def batches(seed: int, rows: int = 16, length: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return [{"input_ids": ids, "attention_mask": mask}]


def loaded(tensors: State) -> Any:
    model = build()
    model.load_state_dict(tensors)
    return model


def grams(tensors: State, seed: int = 0, **options: Any) -> Statistics:
    return fedrot.collect_gram(loaded(tensors), batches(seed), **options)


def fishers(tensors: State, seed: int = 0) -> Statistics:
    return fedrot.collect_fisher(loaded(tensors), batches(seed, rows=6))


@cache
def _honest(collect: Callable[..., Statistics]) -> tuple[Client, ...]:
    updates = [near(state(), 0.05, seed) for seed in range(3)]
    return tuple(
        Client(update, weight, collect(update, seed))
        for seed, (update, weight) in enumerate(
            zip(updates, (3.0, 10.0, 5.0), strict=True)
        )
    )


def honest(collect: Callable[..., Statistics] = grams) -> list[Client]:
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


def scrambled(
    clients: Iterable[Client],
    collect: Callable[..., Statistics] = grams,
    parts: tuple[str, ...] = fedrot.AlignmentOptions().parts,
) -> list[Client]:
    """Return the same functions in other coordinates, with statistics of those."""
    found = []
    for seed, client in enumerate(clients):
        update = fedrot.random_equivalent(client.update, SYMMETRY, seed + 10, parts)
        found.append(Client(update, client.weight, collect(update, seed)))
    return found


def answer(
    to: Message,
    client: Client,
    index: int,
    dtype: torch.dtype = torch.float32,
    **metrics: Any,
) -> Message:
    message = reply(to, client.update, client.weight, index, **metrics)
    if client.statistics:
        message.content[STATISTICS] = statistics_record(client.statistics, dtype)
    return message


def finished(
    strategy: FedAvg,
    clients: Sequence[Client],
    server_round: int = 1,
    base: State | None = None,
    dtype: torch.dtype = torch.float32,
    **metrics: Any,
) -> Any:
    """Play a round that may have no model; each metric is one number for each
    client.
    """
    asked = broadcast(strategy, base or state(), len(clients), server_round)
    replies = [
        answer(message, client, i, dtype, **{n: of[i] for n, of in metrics.items()})
        for i, (message, client) in enumerate(zip(asked, clients, strict=True))
    ]
    return strategy.aggregate_train(server_round, replies)


def play(*given: Any, **settings: Any) -> tuple[ArrayRecord, MetricRecord]:
    arrays, metrics = finished(*given, **settings)
    assert arrays is not None
    return arrays, metrics or MetricRecord()


def merged(aggregator: Any, clients: Iterable[Client]) -> State:
    for client in clients:
        aggregator.add(client.update, client.weight, client.statistics)
    return aggregator.result()


def mean(clients: Iterable[Client]) -> State:
    return merged(Mean(), [replace(client, statistics={}) for client in clients])


def apart(result: ArrayRecord, expected: State) -> float:
    return difference(tensors_of(result), expected)


def headless(client: Client, rows: Iterable[int] | None) -> Client:
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
