"""``Update`` and ``Moved``, an update before and after alignment, and ``Schema``, its shapes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.errors import UpdateError
from fedrot.report import AlignmentReport
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.tensors import Shaped, Tensors, check_finite, check_update, compute_dtype


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
        tensors: in the broadcast model's dtypes, or in float32 at least if the reply had wider dtypes;
            views of the message's arrays if possible.
        weight: number of examples, or another positive weight.
        statistics: by kind, then by tensor name.
    """

    client: int
    message: Message
    record: str
    tensors: Tensors
    weight: float
    statistics: Statistics = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """The message that the client answers."""
        return question_of(self.message)

    @property
    def checksum(self) -> int:
        """A number that depends on the client's id and on every value of its tensors."""
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
        parts: the tensors on the device, as one mapping or layer by layer; layers can be read once.
        statistics: of the moved tensors.
        report: returns the alignment's report after all of ``parts`` were read; None without alignment.
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


@dataclass(frozen=True)
class Schema:
    """The tensors that a reply must hold: names, shapes and dtypes of ``like``, the broadcast model."""

    like: Tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.like.items()}

    def check(self, given: Mapping[str, Shaped]) -> None:
        """Raise ``UpdateError`` unless names and shapes are those of an update."""
        check_update(given, self.shapes)

    def read(self, arrays: ArrayRecord, copy: bool) -> dict[str, Tensor]:
        """Return a reply's tensors, in the broadcast order and dtypes.

        ``copy`` copies tensors instead of returning views of the received bytes. The order of summation
        depends on memory alignment; a copy makes runs identical.

        Raises:
            UpdateError: an array cannot be decoded, or the tensors are not a finite update of the model.
        """
        tensors = from_arrays(arrays, writable=copy)
        self.check(tensors)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() != self.like[name].is_floating_point():
                raise UpdateError(
                    f"The tensor '{name}' is {tensor.dtype}, the broadcast model's is "
                    f"{self.like[name].dtype}. Send the same kind of numbers."
                )
        check_finite(tensors)
        # Flower's wrappers identify tensors by their position.
        return {name: self._cast(name, tensors[name]) for name in self.like}

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in the broadcast dtype, or in float32 if this rounds it before the mean."""
        dtype = self.like[name].dtype
        cast = tensor.to(dtype)
        if cast.dtype != tensor.dtype and not bool(torch.isfinite(cast).all()):
            raise UpdateError(
                f"The tensor '{name}' has values outside the range of {dtype}, the broadcast dtype. "
                "Check the client's training (learning rate, mixed precision) before sending it."
            )
        narrower = dtype.itemsize < tensor.dtype.itemsize and dtype.is_floating_point
        return tensor.to(compute_dtype(cast)) if narrower else cast
