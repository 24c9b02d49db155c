"""``Update`` and ``Moved``: an update before and after alignment."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from flwr.app import Message

from fedrot.aggregation import Statistics
from fedrot.report import AlignmentReport
from fedrot.tensors import Tensors


class Question(NamedTuple):
    """A message to a node; at most one update of a round answers it."""

    message_id: str
    node: int


def question_of(reply: Message) -> Question:
    """Return the question that a reply claims to answer."""
    return Question(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)


@dataclass(frozen=True)
class Update:
    """One client's update, as it was received.

    Attributes:
        client: see ``inbox.client_id``.
        message: the reply, with its metrics and configurations.
        record: name of the reply's ArrayRecord.
        tensors: in the broadcast model's dtypes, or in float32 at least if the reply
            had wider dtypes; views of the message's arrays if possible.
        weight: number of examples, or another positive weight.
        statistics: by kind, then by tensor name.
        origin: the row with the update's hash; empty without
            ``Reporting(hashes=True)``.
    """

    client: int
    message: Message
    record: str
    tensors: Tensors
    weight: float
    statistics: Statistics = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """The message that the client answers."""
        return question_of(self.message)

    @property
    def checksum(self) -> int:
        """A number that depends on the client's id and on every value of its
        tensors.
        """
        found = zlib.crc32(str(self.client).encode())
        for tensor in self.tensors.values():
            values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            found = zlib.crc32(values.numpy().data, found)
        return found


@dataclass(frozen=True)
class Moved:
    """An update in the round's coordinates.

    Attributes:
        update: as it was received.
        parts: the tensors on the device, as one mapping or layer by layer; layers can
            be read once.
        statistics: of the moved tensors.
        report: returns the alignment's report after all of ``parts`` were read; None
            without alignment.
    """

    update: Update
    parts: Iterable[Tensors]
    statistics: Statistics
    report: Callable[[], AlignmentReport] | None = None

    @property
    def tensors(self) -> Tensors:
        """The tensors of an update that is not moved layer by layer."""
        (whole,) = self.parts
        return whole
