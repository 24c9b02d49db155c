"""Which replies may enter the average: checked before anything is computed with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from flwr.app import Message, Metadata, RecordDict
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.statistic_kinds import Statistics, brings, check_statistics
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.strategies.wire.records import model_records, read_statistics
from fedrot.tensors import LARGEST_WEIGHT, SMALLEST_WEIGHT, check_finite, check_update

#: Optional ConfigRecord in a reply by which a client names itself independently of its node id.
CLIENT_RECORD, CLIENT_KEY = "client", "partition-id"

#: Integers of metrics beyond this cannot be averaged as floats.
_LARGEST_INTEGER = 2**63

#: What a reply's metrics may have: they wait in memory until the round ends.
_MOST_NUMBERS = 100_000

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A reply that passed: its message, its tensors in the broadcast dtypes, and its weight.

    Attributes:
        client: see ``client_id``.
        record: name of its ArrayRecord, which the message may have lost since.
        statistics: as the client sent them, of its update before the server moves it.
    """

    message: Message
    client: int
    record: str
    tensors: Mapping[str, Tensor]
    weight: float
    statistics: Statistics = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """What replies are sorted by: their clients' ids, and their nodes' where these are equal."""
        return self.client, self.message.metadata.src_node_id

    @property
    def layout(self) -> tuple[object, ...]:
        """What Flower's strategies need to be equal in all replies: record names and metrics."""
        return self.record, *metrics_layout(self.message.content)


class Asked:
    """Whom a round asked: what answers another question, or the same one twice, has no part in it.

    Attributes:
        clients: the clients' own ids by node, as far as they have named themselves in this run.
    """

    def __init__(self, messages: Iterable[Metadata] = (), clients: dict[int, int] | None = None) -> None:
        # Grids give messages their ids when they are sent.
        self._metadata = list(messages)
        self.clients = {} if clients is None else clients

    @property
    def anybody(self) -> bool:
        """Whether anybody was asked."""
        return bool(self._metadata)

    def answers(self) -> Answers:
        """Return what keeps account of the replies of one round."""
        return Answers({(m.message_id, m.dst_node_id) for m in self._metadata}, self.clients)


class Answers:
    """The replies of one round, as they come."""

    def __init__(self, asked: set[tuple[str, int]], clients: dict[int, int]) -> None:
        self._asked = asked
        self._silent = set(asked)
        self._clients = clients

    def check(self, message: Message) -> None:
        """Note a reply.

        Raises:
            UpdateError: it answers no question of this round, or one that was answered already.
        """
        question = message.metadata.reply_to_message_id, message.metadata.src_node_id
        if question not in self._asked:
            raise UpdateError("It answers no request of this round: late, or not meant for us.")
        if question not in self._silent:
            raise UpdateError("Its sender has answered before in this round; that answer counts.")
        self._silent.remove(question)
        self._clients[question[1]] = client_id(message)

    def failed(self, message: Message) -> int | None:
        """Note an error in the place of a reply, and return whose it is; None if nobody waits for it.

        For a node that is gone the SuperLink answers, under its own id.
        """
        to = message.metadata.reply_to_message_id
        of = [question for question in self._asked if question[0] == to]
        node = of[0][1] if len(of) == 1 else message.metadata.src_node_id
        if (to, node) not in self._silent:
            return None
        self._silent.remove((to, node))
        return self._clients.get(node, node)

    @property
    def silent(self) -> list[int]:
        """The clients that have not answered, by their own ids where they have named themselves."""
        return sorted(self._clients.get(node, node) for _, node in self._silent)


def with_common_layout(
    items: Sequence[T], layout: Callable[[T], tuple[object, ...]]
) -> tuple[list[T], list[T]]:
    """Split replies into those laid out like most, and the others."""
    layouts = [layout(item) for item in items]
    counts = Counter(layouts)
    common = counts.most_common(1)[0][0] if counts else ()
    return (
        [item for item, own in zip(items, layouts, strict=True) if own == common],
        [item for item, own in zip(items, layouts, strict=True) if own != common],
    )


def metrics_layout(content: RecordDict) -> tuple[object, ...]:
    """Return the name, keys and list lengths of a content's only MetricRecord."""
    ((name, record),) = content.metric_records.items()
    lengths = {key: len(v) if isinstance(v, list) else None for key, v in record.items()}
    return name, tuple(sorted(lengths.items()))


def own_id(content: RecordDict) -> int | None:
    """Return the partition id that a client put into its reply, None if it put none."""
    record = content.config_records.get(CLIENT_RECORD)
    own = record.get(CLIENT_KEY) if record is not None else None
    return own if isinstance(own, int) else None


def client_id(message: Message) -> int:
    """Return the client's own partition id if it sent one, else its node id."""
    own = own_id(message.content) if message.has_content() else None
    return message.metadata.src_node_id if own is None else own


def read_reply(
    message: Message,
    broadcast: Mapping[str, Tensor],
    weighted_by_key: str,
    needs: Collection[str] = (),
    copy: bool = False,
    loss_key: str | None = None,
) -> Reply:
    """Check a reply and decode it.

    Args:
        broadcast: the model that was sent. Tensors that a client sends as unchanged are its.
        needs: the kinds of statistics that it has to bring.
        copy: give the update memory of its own in place of views of what was received. Libraries add
            up in another order where numbers lie elsewhere relative to vector registers, so that without
            it the last bits depend on where a message happens to be.
        loss_key: the metric that the strategy weights updates by, as q-FedAvg does.

    Raises:
        UpdateError: it does not hold exactly one ArrayRecord (statistics apart) and one MetricRecord,
            its weight is not a positive number, an array cannot be decoded, the arrays are not a
            finite update of the broadcast model, or statistics are missing or impossible.
    """
    content = message.content
    records = model_records(content)
    if len(records) != 1:
        raise UpdateError(
            f"The reply holds {len(records)} ArrayRecords and "
            f"{len(content.metric_records)} MetricRecords; send exactly one of each."
        )
    weight = read_weight(content, weighted_by_key, SMALLEST_WEIGHT)
    if loss_key is not None:
        (metrics,) = content.metric_records.values()
        loss = metrics.get(loss_key)
        if not isinstance(loss, float) or not 0 <= loss < math.inf:
            raise UpdateError(f"The metric '{loss_key}' is {loss!r:.60}; it must be a finite float.")
    ((record, arrays),) = records.items()
    shapes = {name: tuple(t.shape) for name, t in broadcast.items()}
    check_update(arrays, shapes)
    tensors = from_arrays(arrays, since=broadcast, writable=copy)
    # What legacy arrays hold, which claim no shape, is known only now.
    check_update(tensors, shapes)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != broadcast[name].is_floating_point():
            raise UpdateError(
                f"The tensor '{name}' is {tensor.dtype}, the broadcast model's is "
                f"{broadcast[name].dtype}. Send the kind of numbers that was received."
            )
    check_finite(tensors)
    # In the broadcast order: Flower's wrappers take tensors by their place.
    cast = {name: tensors[name].to(like.dtype) for name, like in broadcast.items()}
    for name, tensor in cast.items():
        if tensor.dtype != tensors[name].dtype and not bool(torch.isfinite(tensor).all()):
            raise UpdateError(
                f"The tensor '{name}' holds values beyond {tensor.dtype}, in which the model was "
                "broadcast. Check the client's training (learning rate, mixed precision) before "
                "sending it."
            )
    statistics = read_statistics(content, copy)
    missing = [kind for kind in needs if not brings(statistics, kind)]
    if missing:
        raise UpdateError(
            f"The reply comes without the statistics '{missing[0]}' that the aggregation needs. Put "
            "statistics_record(...) into it under the name 'fedrot-statistics'."
        )
    check_statistics(statistics, shapes)
    return Reply(message, client_id(message), record, cast, weight, statistics)


def read_weight(content: RecordDict, weighted_by_key: str, smallest: float = 0.0) -> float:
    """Return the weight in a content's only MetricRecord.

    Raises:
        UpdateError: there is not exactly one MetricRecord, its weight is not a number from ``smallest``
            to ``LARGEST_WEIGHT``, or another integer is too large to be averaged.
    """
    if len(content.metric_records) != 1:
        raise UpdateError(
            f"The reply holds {len(content.metric_records)} MetricRecords; send exactly one."
        )
    (metrics,) = content.metric_records.values()
    if weighted_by_key not in metrics:
        raise UpdateError(
            f"The MetricRecord has no '{weighted_by_key}' (it has: {', '.join(metrics) or 'nothing'}). "
            "Send it, or name the metric that weights the clients: weighted_by_key=..."
        )
    weight = metrics.get(weighted_by_key)
    if not isinstance(weight, (int, float)) or not smallest <= weight <= LARGEST_WEIGHT:
        raise UpdateError(
            f"The metric '{weighted_by_key}' is {weight!r:.60}; it must be a positive number up to "
            f"{LARGEST_WEIGHT:g} (a client without examples has nothing to average)."
        )
    if sum(len(value) if isinstance(value, list) else 1 for value in metrics.values()) > _MOST_NUMBERS:
        raise UpdateError(f"The MetricRecord holds more than {_MOST_NUMBERS} numbers.")
    for key, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, int) and abs(number) >= _LARGEST_INTEGER for number in numbers):
            raise UpdateError(f"The metric '{key}' holds an integer beyond 64 bits. Send a float.")
    return float(weight)
