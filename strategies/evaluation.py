"""Evaluations that clients send: which of them a strategy can average."""

from __future__ import annotations

from collections.abc import Iterable
from logging import WARNING

from flwr.app import Message

from fedrot.errors import UpdateError
from fedrot.strategies.reporting.json_log import log_fields
from fedrot.strategies.reporting.metrics_log import EVALUATE
from fedrot.strategies.round.inbox import (
    Answers,
    client_id,
    metrics_layout,
    read_weight,
    with_common_layout,
)
from fedrot.strategies.round.round_report import legible


def readable_evaluations(
    replies: Iterable[Message], answers: Answers, server_round: int, weighted_by: str
) -> list[Message]:
    """Return the evaluations to average, then the error replies; log what is dropped.

    The evaluations are left out if they have no examples in all: there is nothing to average.
    """
    good: list[Message] = []
    failed: list[Message] = []

    def drop(message: Message, reason: str) -> None:
        client = client_id(message)
        fields = {"round": server_round, "stage": EVALUATE, "client": client, "dropped": reason}
        log_fields(WARNING, fields, "Evaluation of client %d dropped: %s", client, legible(reason))

    for message in replies:
        if message.has_error():
            failed.append(message)
            continue
        try:
            answers.check(message)
            read_weight(message.content, weighted_by)
        except UpdateError as error:
            drop(message, str(error))
        else:
            good.append(message)
    good, odd = with_common_layout(good, lambda message: metrics_layout(message.content))
    for message in odd:
        drop(message, "Its metrics are not like most.")
    examples = sum(read_weight(message.content, weighted_by) for message in good)
    return (good if examples else []) + failed
