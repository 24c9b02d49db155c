"""Which replies may enter the average: checked before anything is computed with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from torch import Tensor

from fedrot.aggregation.statistics import Statistics, brings, check_statistics
from fedrot.errors import UpdateError
from fedrot.strategies.records import model_records, read_statistics, to_tensors
from fedrot.validation import LARGEST_WEIGHT, SMALLEST_WEIGHT, check_finite, check_update

#: Optional ConfigRecord in a reply by which a client names itself independently of its node id.
CLIENT_RECORD, CLIENT_KEY = "client", "partition-id"


@dataclass(frozen=True)
class Reply:
    """A reply that passed: its message, its tensors in the broadcast dtypes, and its weight.

    Statistics are as the client sent them, of its update before the server moves it.
    """

    message: Message
    tensors: dict[str, Tensor]
    weight: float
    statistics: Statistics = field(default_factory=dict)

    @property
    def layout(self) -> tuple[object, ...]:
        """What Flower's strategies need to be equal in all replies: record names and metrics."""
        (arrays,) = model_records(self.message.content)
        ((metrics, record),) = self.message.content.metric_records.items()
        lengths = {name: len(v) if isinstance(v, list) else None for name, v in record.items()}
        return arrays, metrics, tuple(sorted(lengths.items()))


def with_common_layout(replies: Sequence[Reply]) -> tuple[list[Reply], list[Reply]]:
    """Split replies into those laid out like most, and the others."""
    counts = Counter(reply.layout for reply in replies)
    common = counts.most_common(1)[0][0] if counts else ()
    return (
        [reply for reply in replies if reply.layout == common],
        [reply for reply in replies if reply.layout != common],
    )


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
) -> Reply:
    """Check a reply and decode it.

    Args:
        needs: the kinds of statistics that it has to bring.

    Raises:
        UpdateError: it does not hold exactly one ArrayRecord (statistics apart) and one MetricRecord,
            its weight is not a positive number, an array cannot be decoded, the arrays are not a
            finite update of the broadcast model, or statistics are missing or impossible.
    """
    content = message.content
    records = model_records(content)
    if len(records) != 1 or len(content.metric_records) != 1:
        raise UpdateError(
            f"The reply holds {len(records)} ArrayRecords and "
            f"{len(content.metric_records)} MetricRecords; send exactly one of each."
        )
    (metrics,) = content.metric_records.values()
    weight = metrics.get(weighted_by_key)
    if not isinstance(weight, (int, float)) or not SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT:
        raise UpdateError(
            f"The metric '{weighted_by_key}' is {weight!r}; it must be a positive number up to "
            f"{LARGEST_WEIGHT:g} (a client without examples has nothing to average)."
        )
    (arrays,) = records.values()
    try:
        tensors = to_tensors(arrays)
    except Exception as error:
        raise UpdateError(f"The arrays cannot be decoded: {error}") from error
    check_update(tensors, {name: tuple(t.shape) for name, t in broadcast.items()})
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != broadcast[name].is_floating_point():
            raise UpdateError(
                f"The tensor '{name}' is {tensor.dtype}, the broadcast model's is "
                f"{broadcast[name].dtype}. Send the kind of numbers that was received."
            )
    check_finite(tensors)
    # In the broadcast order: Flower's wrappers take tensors by their place.
    cast = {name: tensors[name].to(like.dtype) for name, like in broadcast.items()}
    statistics = read_statistics(content)
    missing = [kind for kind in needs if not brings(statistics, kind)]
    if missing:
        raise UpdateError(
            f"The reply comes without the statistics '{missing[0]}' that the aggregation needs. Put "
            "statistics_record(...) into it under the name 'fedrot-statistics'."
        )
    check_statistics(statistics, {name: tuple(t.shape) for name, t in cast.items()})
    return Reply(message, cast, float(weight), statistics)
