"""The inbox of a round: reads updates from messages, and drops invalid ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import DEBUG, WARNING
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from torch import Tensor

from fedrot.collect.statistics import TRAINED, brings
from fedrot.errors import UpdateError, legible, refusal
from fedrot.strategies.reporting.verdict import Row
from fedrot.strategies.round.asked import ADAPTER_RECORD, Asked, client_id
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Update
from fedrot.strategies.wire.arrays import (
    decoded,
    from_arrays,
    headers,
    model_hash,
    only_model,
    records_of_type,
    shapes_of,
    singly,
)
from fedrot.strategies.wire.flower_compat import figures_of
from fedrot.strategies.wire.label_names import read_names
from fedrot.strategies.wire.statistics_record import read_statistics
from fedrot.tensors import (
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    Shape,
    Shaped,
    TensorDict,
    Tensors,
    check_finite,
    check_update,
    compute_dtype,
)

#: Integers of metrics from this size on cannot be averaged as floats.
_LARGEST_INTEGER = 2**63

#: Maximum number of keys and numbers in a reply's metrics, which stay in memory until
#: the round ends.
_MOST_NUMBERS = 100_000

T = TypeVar("T")


class Told(NamedTuple):
    """The metrics and small configurations of one client's update."""

    client: int
    content: RecordDict


Reply = TypeVar("Reply", Message, Told)


def with_common_layout(
    items: Sequence[T], layout: Callable[[T], tuple[object, ...]]
) -> tuple[list[T], list[T]]:
    """Split replies into those with the most common layout, and the others."""
    layouts = [layout(item) for item in items]
    # Of equally common ones the first.
    common = max(layouts, key=Counter(layouts).__getitem__, default=())
    alike: list[T] = []
    odd: list[T] = []
    for item, its_layout in zip(items, layouts, strict=True):
        (alike if its_layout == common else odd).append(item)
    return alike, odd


def metrics_layout(
    content: RecordDict,
) -> tuple[str, tuple[tuple[str, int | None], ...]]:
    """Return the name, keys and list lengths of a content's only MetricRecord."""
    ((name, record),) = records_of_type(content, MetricRecord).items()
    lengths = {
        key: len(v) if isinstance(v, list) else None for key, v in record.items()
    }
    return name, tuple(sorted(lengths.items()))


def averageable(
    items: Sequence[Reply], leave_out: Callable[[Reply, str], None]
) -> list[Reply]:
    """Return the replies whose metrics can be averaged together.

    Their numbers are finite, and their metrics are those of most. If no reply has
    finite numbers only, none is left out for that, and the mean is not finite either.

    Args:
        leave_out: called with every other reply and the reason.
    """
    judged = [(item, not_finite(item.content)) for item in items]
    finite = [item for item, what in judged if not what]
    if items and not finite:
        log(
            WARNING,
            "No client has finite metrics only. Of the first: %s",
            legible(judged[0][1]),
        )
    else:
        for item, what in judged:
            if what:
                leave_out(item, f"{what} Send a finite number, or omit this metric.")
    good, odd = with_common_layout(
        finite or items, lambda item: metrics_layout(item.content)
    )
    for item in odd:
        leave_out(
            item,
            f"Its metrics differ: it has {_listed(item.content)}; most have "
            f"{_listed(good[0].content)}.",
        )
    return good


def not_finite(content: RecordDict) -> str:
    """Return which metric of a content is NaN or infinite; empty if none is."""
    for metrics in records_of_type(content, MetricRecord).values():
        for key, number in singly(metrics):
            if not math.isfinite(number):
                return f"The metric '{key:.60}' is {number!r}."
    return ""


def _listed(content: RecordDict) -> str:
    name, lengths = metrics_layout(content)
    keys = (key if n is None else f"{key} (list of {n})" for key, n in lengths)
    return legible(f"{', '.join(keys):.200} in '{name:.60}'")


@dataclass(frozen=True)
class Schema:
    """What a reply must hold: names, shapes and dtypes of the broadcast, ``like``."""

    like: Tensors
    #: Names of tensors that are checked later to be finite, see ``Aligner``.
    measured: Collection[str] = field(default=(), kw_only=True)
    #: What ``ADAPTER_RECORD`` must not contradict; empty if the model is no adapter.
    settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor, by name."""
        return shapes_of(self.like)

    def check(self, tensors: Mapping[str, Shaped]) -> None:
        """Raise ``UpdateError`` unless names and shapes are those of an update."""
        check_update(tensors, self.shapes)

    def read(self, arrays: ArrayRecord, copy: bool) -> TensorDict:
        """Return a reply's tensors, in the broadcast order and dtypes.

        Names, shapes and dtypes are checked before an array is decoded; nothing in a
        round checks them again. ``copy`` copies tensors instead of returning views of
        the received bytes. The order of summation depends on memory alignment; a copy
        makes runs identical.

        Raises:
            UpdateError: an array cannot be decoded, or the tensors are not an update of
                the model, finite but for those that are ``measured``.
        """
        claims = headers(arrays)
        self.check(claims)
        for name, claim in claims.items():
            wanted = self.like[name].dtype
            if claim.dtype.is_floating_point != wanted.is_floating_point:
                raise UpdateError(
                    f"The tensor '{name}' is {claim.dtype}, the broadcast model's is "
                    f"{wanted}. Send the same kind of numbers."
                )
        tensors = decoded(arrays, claims, writable=copy)
        check_finite({n: t for n, t in tensors.items() if n not in self.measured})
        # Flower's wrappers identify tensors by their position.
        return {name: self._cast(name, tensors[name]) for name in self.like}

    def about(self, tensors: Tensors) -> Row:
        """Return what rows with hashes say about a model or an update."""
        return {}

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in the broadcast dtype, or float32 if this would round it."""
        dtype = self.like[name].dtype
        cast = tensor.to(dtype)
        if cast.dtype != tensor.dtype and not bool(torch.isfinite(cast).all()):
            raise UpdateError(
                f"The tensor '{name}' has values outside the range of {dtype}, the "
                "broadcast dtype. Check the client's training (learning rate, mixed "
                "precision) before sending it."
            )
        narrower = dtype.itemsize < tensor.dtype.itemsize and dtype.is_floating_point
        return tensor.to(compute_dtype(cast)) if narrower else cast


@dataclass(frozen=True)
class Inbox:
    """Reads the replies of one round: where the form of a training reply is checked.

    Attributes:
        strategy: says which metrics it uses, and how labels are checked.
        needs: the kinds of statistics that a reply must have.
        in_front: the name of a subclass's overriding ``aggregate_train``; empty without
            an override.
    """

    # A ``PlaysRounds``, whose module imports this one.
    strategy: Any
    asked: Asked
    schema: Schema
    record: RoundRecord
    needs: Collection[str]
    in_front: str = ""

    def read(self, message: Message) -> Update | None:
        """Return a reply's update, or None if the reply is dropped or is an error."""
        if message.has_error():
            client = self.asked.failed(message)
            if client is not None:
                self.record.fail(client, message.error.reason or "no reason given")
            return None
        try:
            self.asked.accept(message)
            update = self.decode(message)
        except Exception as error:
            self.record.drop(client_id(message), refusal(error))
            return None
        log(DEBUG, "Reply of client %d: weight %g", update.client, update.weight)
        return update

    def decode(self, message: Message) -> Update:
        """Check a reply and return its update; raises ``UpdateError``."""
        content = message.content
        strategy = self.strategy
        copy = strategy.server.deterministic
        record, arrays = only_model(content)
        weight = read_weight(content, strategy._weighted_by)
        (metrics,) = records_of_type(content, MetricRecord).values()
        figures = figures_of(strategy) | figures_of(strategy._weighting)
        for name, most in figures.items():
            value = metrics.get(name)
            if not isinstance(value, int | float) or not 0 <= value <= most:
                raise UpdateError(
                    f"The metric '{name}' is {value!r:.60}; the strategy needs a "
                    f"number from 0 to {most:g}."
                )
        wanted = self.schema.settings
        settings: Mapping[str, Any] = records_of_type(content, ConfigRecord).get(
            ADAPTER_RECORD, {}
        )
        for name, value in wanted.items():
            if (sent := settings.get(name, value)) != value:
                raise UpdateError(
                    f"The adapter's {name} is {sent!r:.60}, the server's "
                    f"{value!r:.60}. Build it with the server's LoraConfig."
                )
        strategy.check_labels(message.metadata.src_node_id, read_names(content))
        tensors = self.schema.read(arrays, copy)
        statistics = read_statistics(content, self.schema.shapes, copy)
        for kind in self.needs:
            if not brings(statistics, kind):
                raise UpdateError(
                    f"The reply has no statistics '{kind}', which the aggregation "
                    "needs. Let the client call "
                    "fedrot.strategies.add_statistics(content, message, model, "
                    "batches) before it replies (docs/how-to/statistics.md)."
                )
        if statistics and not strategy.uses_statistics:
            log(
                WARNING,
                "The statistics '%s' are not used: this strategy uses none.",
                "', '".join(sorted(statistics)),
            )
            statistics = {}
        if not self.needs:
            statistics = {
                kind: by_name for kind, by_name in statistics.items() if kind == TRAINED
            }
        client = client_id(message)
        origin: Row = {}
        if strategy.reporting.hashes:
            origin = {
                "client": client,
                "node": message.metadata.src_node_id,
                "sha256": model_hash(from_arrays(arrays)),
                "weight": weight,
                "statistics": sorted(statistics),
                **{name: settings.get(name) for name in wanted},
                **self.schema.about(tensors),
            }
        return Update(client, message, record, tensors, weight, statistics, origin)

    def close(self) -> None:
        """Record the clients that have not answered."""
        for client in self.asked.silent:
            left_out = f", or {self.in_front} left it out" if self.in_front else ""
            self.record.fail(
                client, f"No answer before the timeout{left_out}.", who="Client"
            )


def read_weight(content: RecordDict, weighted_by_key: str, zero: bool = False) -> float:
    """Return the weight in a content's only MetricRecord.

    Args:
        zero: whether a client may have no examples.

    Raises:
        UpdateError: there is no valid weight.
    """
    records = records_of_type(content, MetricRecord)
    if len(records) != 1:
        raise UpdateError(
            f"The reply holds {len(records)} MetricRecords; send exactly one."
        )
    (metrics,) = records.values()
    if weighted_by_key not in metrics:
        raise UpdateError(
            f"The MetricRecord has no '{weighted_by_key}' (it has: "
            f"{', '.join(metrics) or 'nothing'}). Send this metric, or name another "
            "one as weight of the clients: weighted_by_key=..."
        )
    weight = metrics[weighted_by_key]
    smallest = 0.0 if zero and weight == 0 else SMALLEST_WEIGHT
    if not isinstance(weight, int | float) or not smallest <= weight <= LARGEST_WEIGHT:
        allowed = f"{SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"
        without = "; without examples, send 0" if zero else ""
        raise UpdateError(
            f"The metric '{weighted_by_key}' is {weight!r:.60}. It weights the client, "
            f"and must be a number from {allowed}{without}."
        )
    if (
        sum(len(v) + 1 if isinstance(v, list) else 1 for v in metrics.values())
        > _MOST_NUMBERS
    ):
        raise UpdateError(
            f"The MetricRecord holds more than {_MOST_NUMBERS} keys and numbers."
        )
    for key, number in singly(metrics):
        if isinstance(number, int) and abs(number) >= _LARGEST_INTEGER:
            raise UpdateError(
                f"The metric '{key}' has an integer of more than 64 bits. Send a float."
            )
    return float(weight)
