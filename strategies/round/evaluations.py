"""Replies of clients that evaluate: which of them are averaged."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from logging import WARNING

from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common import log

from fedrot.errors import UpdateError, legible, refusal
from fedrot.strategies.round.asked import Asked, client_id
from fedrot.strategies.round.inbox import (
    metrics_layout,
    numbers_of,
    read_weight,
    unlike,
    with_common_layout,
)
from fedrot.strategies.wire.arrays import records_of_type


def readable_evaluations(
    replies: Iterable[Message], asked: Asked, weighted_by: str
) -> list[Message]:
    """Return the evaluations to average, then error replies; log dropped evaluations.

    No evaluation is returned if all together have no examples. An evaluation without
    examples is dropped if a metric is NaN, because the mean over all clients would be
    NaN. Reasons of error replies are shortened to one line, because Flower's strategies
    log them unchanged.
    """
    good: list[Message] = []
    failed: list[Message] = []

    def drop(message: Message, reason: str) -> None:
        log(
            WARNING,
            "Evaluation of client %d dropped: %s",
            client_id(message),
            legible(reason),
        )

    for message in replies:
        if message.has_error():
            if asked.failed(message) is not None:
                failed.append(copy.copy(message))
                reason = legible(message.error.reason or "no reason given")
                failed[-1].error = Error(message.error.code, reason)
            continue
        try:
            asked.accept(message)
            examples = read_weight(message.content, weighted_by)
            if not examples:
                _check_finite_metrics(message.content, weighted_by)
        except Exception as error:
            drop(message, refusal(error))
        else:
            good.append(message)
    good, odd = with_common_layout(
        good, lambda message: metrics_layout(message.content)
    )
    for message in odd:
        drop(
            message, f"Its metrics differ: {unlike(message.content, good[0].content)}."
        )
    examples = sum(read_weight(message.content, weighted_by) for message in good)
    return (good if examples else []) + failed


def _check_finite_metrics(content: RecordDict, weighted_by: str) -> None:
    """Raise ``UpdateError`` if a metric is NaN or infinite."""
    (metrics,) = records_of_type(content, MetricRecord).values()
    for key, number in numbers_of(metrics):
        if not math.isfinite(number):
            raise UpdateError(
                f"The metric '{weighted_by}' is {metrics[weighted_by]!r:.60}: there "
                f"are no examples, and the metric '{key:.60}' is {number!r}. Omit this "
                "metric, or send a finite number."
            )
