"""``Update`` and ``Moved``: an update before and after alignment."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from flwr.app import Message

from fedrot.aggregation import Aggregator, Statistics
from fedrot.report import AlignmentReport
from fedrot.strategies.reporting.verdict import Row
from fedrot.strategies.round.asked import Question, question_of
from fedrot.tensors import Tensors, flat_bytes

#: Builds the aggregator of a round.
Builder = Callable[[], Aggregator]

#: Returns the broadcast model in a round's coordinates; None if it is in them.
MovedBroadcast = Callable[[], Tensors] | None


@dataclass(frozen=True)
class Update:
    """One client's update, as it was received.

    Attributes:
        client: see ``asked.client_id``.
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
    origin: Row = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """The message that the client answers."""
        return question_of(self.message)

    @cached_property
    def checksum(self) -> int:
        """A number made of the client's id and of every value of its tensors."""
        checksum = zlib.crc32(str(self.client).encode())
        for tensor in self.tensors.values():
            checksum = zlib.crc32(flat_bytes(tensor).numpy().data, checksum)
        return checksum


#: Updates of one round, in an order.
Updates = Sequence[Update]


@dataclass(frozen=True)
class Moved:
    """An update in the round's coordinates.

    Attributes:
        update: as it was received.
        tensors: on the device; empty if the update is aligned layer by layer.
        statistics: of the moved tensors.
        report: returns the alignment's report, after all ``layers`` were read; None
            without alignment.
        layers: the tensors layer by layer, which can be read once; None if they are all
            in ``tensors``.
    """

    update: Update
    tensors: Tensors
    statistics: Statistics
    report: Callable[[], AlignmentReport] | None = None
    layers: Iterable[Tensors] | None = None
