"""Replies of clients that evaluate: which of them are averaged."""

from __future__ import annotations

import copy
from logging import WARNING

from flwr.app import Error, Message
from flwr.common import log

from fedrot.errors import legible, refusal
from fedrot.strategies.round.asked import Asked, client_id
from fedrot.strategies.round.inbox import averageable, read_weight
from fedrot.strategies.wire.flower_compat import Messages


def readable_evaluations(
    replies: Messages, asked: Asked, weighted_by: str
) -> list[Message]:
    """Return the evaluations to average, then error replies; log dropped evaluations.

    No evaluation is returned if all together have no examples. An evaluation is dropped
    if a metric is not finite (``averageable``), also one without examples: the mean
    would not be finite. Reasons of error replies are shortened to one line, because
    Flower's strategies log them unchanged.
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
            read_weight(message.content, weighted_by, zero=True)
        except Exception as error:
            drop(message, refusal(error))
        else:
            good.append(message)
    good = averageable(good, drop)
    if not any(read_weight(reply.content, weighted_by, zero=True) for reply in good):
        return failed
    return good + failed
