"""Clients of ``fit_task_head`` without a network: their features are drawn, and some of
them lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedrot.strategies import fit_task_head
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.wire.fitting_messages import (
    COUNT,
    LOSSES,
    REPORT,
    ROWS,
    STAGE,
    SUM,
    SUMS,
    TASK_HEADS,
    WITHHELD,
)
from fedrot.task_head.losses import ONE, TEMPERATURES
from tests.strategies.fakes import Client, grid_of, tensors_of

CLASSES, WIDTH = 3, 12
CENTRES = torch.randn(
    CLASSES, WIDTH, generator=torch.Generator().manual_seed(3)
).double()
EVEN = torch.full((CLASSES,), 1 / CLASSES).double()
OLD = {
    "classifier.weight": torch.zeros(CLASSES, WIDTH),
    "classifier.bias": torch.zeros(CLASSES),
}

#: Numbers of an answer by record, which a lie changes in place.
Answer = dict[str, dict[str, Any]]
Lie = Callable[[Answer], None]


def drawn(seed: int, rows: int, shares: Tensor = EVEN) -> tuple[Tensor, Tensor]:
    """Return features and labels, given the shares of the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(shares, rows, replacement=True, generator=generator)
    noise = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return CENTRES[labels] * 0.7 + noise, labels


def sums_of(features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    hot = one_hot(labels, CLASSES).double()
    return {
        "counts": hot.sum(0),
        "sums": hot.mT @ features,
        "gram": features.mT @ features,
    }


def between(counts: Tensor, sums: Tensor) -> Tensor:
    """Return the part of the Gram matrix that the classes' means explain."""
    return sum(
        (torch.outer(s, s) / n for n, s in zip(counts, sums, strict=True) if n),
        torch.zeros(WIDTH, WIDTH, dtype=torch.float64),
    )


def packed(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return sums as clients send them, written without ``ClassSums.packed``."""
    scatter = sums["gram"] - between(sums["counts"], sums["sums"])
    triangle = torch.cat([row[place:] for place, row in enumerate(scatter)])
    return {
        "counts": sums["counts"],
        "sums": sums["sums"].float(),
        "scatter": triangle.float(),
    }


def unpacked(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    counts = sent["counts"]
    sums = sent["sums"].double()
    upper = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    upper[torch.triu_indices(WIDTH, WIDTH).unbind()] = sent["scatter"].double()
    return {
        "counts": counts,
        "sums": sums,
        "gram": upper + upper.triu(1).mT + between(counts, sums),
    }


def losses_of(
    heads: dict[str, Tensor], features: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Return the answer about heads, computed head by head and temperature by
    temperature.
    """
    pairs = zip(heads["weight"], heads["bias"], strict=True)
    logits = [features @ w.double().mT + b.double() for w, b in pairs]
    rows = torch.stack(
        [
            torch.stack(
                [cross_entropy(one / t, labels, reduction="none") for t in TEMPERATURES]
            )
            for one in logits
        ]
    )
    old = rows[0, ONE].expand_as(rows[0])
    others = [
        old if partner < 0 else rows[partner] for partner in heads["partner"].tolist()
    ]
    correct = [float((one.argmax(1) == labels).sum()) for one in logits]
    return {
        "losses": rows.sum(2),
        "squares": (rows - torch.stack(others)).square().sum(2),
        "counts": torch.tensor([len(labels), *correct], dtype=torch.float64),
    }


def client(
    seed: int,
    rows: int = 60,
    held_out: int = 40,
    lie: Lie | None = None,
    shares: Tensor = EVEN,
) -> Client:
    training = drawn(seed, rows, shares)
    judged = drawn(1000 + seed, held_out, shares)

    def answer(message: Message) -> Message:
        (config,) = message.content.config_records.values()
        found: Answer
        if config[STAGE] == COUNT:
            found = {ROWS: {"training": rows, "held_out": held_out}}
        elif config[STAGE] == SUM:
            found = {SUMS: packed(sums_of(*training))}
        elif config[STAGE] == REPORT:
            withheld = RecordDict({WITHHELD: ConfigRecord()})
            return Message(withheld, reply_to=message)
        else:
            found = {
                LOSSES: losses_of(
                    tensors_of(message.content.array_records[f"{TASK_HEADS}-0"]),
                    *judged,
                )
            }
        if lie is not None:
            lie(found)
        kind = MetricRecord if ROWS in found else ArrayRecord
        return Message(
            RecordDict({name: kind(own) for name, own in found.items()}),
            reply_to=message,
        )

    return answer


def fitted(
    clients: list[Client], old: dict[str, Tensor] | None = None, **given: Any
) -> FittedTaskHead:
    grid = grid_of(clients)
    return fit_task_head(
        grid,
        ArrayRecord(old or OLD),
        {"model_type": "bert"},
        task_head="classifier",
        timeout=1,
        **given,
    )


def accuracy(found: FittedTaskHead, rows: int = 3000) -> float:
    """Return the accuracy on rows of nobody."""
    features, labels = drawn(9999, rows)
    weight, bias = (tensors_of(found.arrays)[name].double() for name in OLD)
    return float(((features @ weight.mT + bias).argmax(1) == labels).double().mean())
