"""The promise of every strategy: a reply is in the mean, or it is dropped by name as if never sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedrot.tensors import LARGEST_NORM
from tests.models import near
from tests.strategies.classifier import state
from tests.strategies.fakes import broadcast, largest_difference, reply
from tests.strategies.hostile import SETUPS

Client = Callable[[Message], Message]

HONEST = [near(state(), 0.02, seed) for seed in (1, 2, 3)]
GOOD = near(state(), 0.02, 4)
NAME = "classifier.weight"
TENSOR = GOOD[NAME]
#: One strategy for each way in which a round takes updates.
DOORS = ("running", "deterministic", "FedMedian", "guard", "other basis")


def sends(tensor: Any = TENSOR, examples: Any = 10, **more: Any) -> Client:
    """Return a client that sends a good update with another tensor ``NAME``; None leaves it out."""
    update = {n: t for n, t in {**GOOD, NAME: tensor, **more}.items() if t is not None}
    return lambda to: reply(to, update, examples)


def with_content(change: Callable[[RecordDict], object]) -> Client:
    def answer(to: Message) -> Message:
        message = reply(to, GOOD, 10)
        change(message.content)
        return message

    return answer


def with_array(dtype: str, data: bytes) -> Client:
    array = Array(dtype, tuple(TENSOR.shape), "numpy.ndarray", data)
    return with_content(lambda content: content["arrays"].update({NAME: array}))


def with_metric(value: Any) -> Client:
    return with_content(lambda content: content["metrics"].update(more=value))


def late(to: Message) -> Message:
    message = reply(to, GOOD, 10)
    message.metadata.__dict__["_reply_to_message_id"] = "of another round"
    return message


#: Replies that are dropped, each with the word that its reason must have.
BAD: dict[str, tuple[Client, str]] = {
    "NaN": (sends(TENSOR * torch.nan), NAME),
    "NaN in float16": (sends(TENSOR.half() * torch.nan), NAME),
    "Inf in one row": (sends(TENSOR.index_fill(0, torch.tensor(0), torch.inf)), NAME),
    "beyond the largest norm": (sends(torch.full_like(TENSOR, 2 * LARGEST_NORM)), NAME),
    "another shape": (sends(TENSOR.T.contiguous()), NAME),
    "one column less": (sends(TENSOR[:, :-1]), NAME),
    "a missing tensor": (sends(None), NAME),
    "an extra tensor": (sends(more=torch.ones(3)), "more"),
    "integers": (sends(TENSOR.long()), NAME),
    "complex": (with_array("complex64", b"x" * 9), NAME),
    "cut off": (with_array("float32", b"\x93NUMPY"), NAME),
    "no npy": (with_array("float32", b"garbage"), NAME),
    "nothing": (with_content(RecordDict.clear), "0 ArrayRecords"),
    "no tensors": (with_content(lambda c: c.update(arrays=ArrayRecord())), "missing"),
    "two models": (with_content(lambda c: c.update(more=ArrayRecord())), "2 ArrayRecords"),
    "no metrics": (with_content(lambda c: c.pop("metrics")), "0 MetricRecords"),
    "no weight": (with_content(lambda c: c.update(metrics=MetricRecord({"a": 1}))), "num-examples"),
    **{
        f"weight {weight!r:.9}": (sends(examples=weight), "num-examples")
        for weight in (0, -3, 1e39, 1e-60, float("nan"), [1, 2], 10**400)
    },
    **{
        f"integer {number!r:.9}": (with_metric(number), "64 bits")
        for number in (2**63, -(2**63), 10**400, [1, 10**400])
    },
    "late": (late, "no request"),
}

#: Replies that are in the mean.
TAKEN: dict[str, Client] = {
    "float64": sends(TENSOR.double()),
    "an own id": with_content(lambda c: c.update(client=ConfigRecord({"partition-id": -9}))),
    "a text as id": with_content(lambda c: c.update(client=ConfigRecord({"partition-id": "me"}))),
    "a configuration": with_content(lambda c: c.update(more=ConfigRecord({"a": "b"}))),
}


def played(setup: str, clients: list[Client]) -> tuple[ArrayRecord, dict[str, Any]]:
    """Play one round, and return its model and metrics."""
    strategy = SETUPS[setup]()
    asked = broadcast(strategy, state(), len(clients))
    asked.sort(key=lambda message: message.metadata.dst_node_id)
    replies = [client(message) for client, message in zip(clients, asked, strict=True)]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    return arrays, dict(metrics or {})


def honest() -> list[Client]:
    return [lambda to, u=update: reply(to, u, 10, 1) for update in HONEST]


@pytest.fixture(scope="module")
def expected() -> Callable[[str], ArrayRecord]:
    """Return the model of a round of the honest clients alone, which is played once per setup."""
    known: dict[str, ArrayRecord] = {}

    def model(setup: str) -> ArrayRecord:
        if setup not in known:
            known[setup], _ = played(setup, honest())
        return known[setup]

    return model


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("setup", DOORS)
def test_dropped_by_name_as_if_never_sent(
    setup: str, name: str, expected: Callable[[str], ArrayRecord], warnings: Callable[[], str]
) -> None:
    answer, word = BAD[name]
    # The first reply would be the anchor of the others.
    arrays, metrics = played(setup, [answer, *honest()])
    assert metrics["fedrot-replies-dropped"] == 1
    assert metrics["fedrot-replies-accepted"] == len(HONEST)
    assert word in warnings()
    assert largest_difference(arrays, expected(setup)) == 0


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("setup", DOORS)
def test_in_the_mean(setup: str, name: str, expected: Callable[[str], ArrayRecord]) -> None:
    arrays, metrics = played(setup, [*honest(), TAKEN[name]])
    assert metrics["fedrot-replies-dropped"] == 0
    assert largest_difference(arrays, played(setup, [*honest(), sends()])[0]) <= 1e-6
    assert largest_difference(arrays, expected(setup)) > 1e-4
