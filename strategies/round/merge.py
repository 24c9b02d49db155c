"""Merges, which collect the aligned updates of one round and return the new model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Protocol

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Strategy,
)

from fedrot.aggregation import Aggregator, Mean
from fedrot.collect.statistics import TRAINED
from fedrot.errors import UpdateError
from fedrot.strategies.round.guard import Comparison
from fedrot.strategies.round.inbox import metrics_layout, unlike, with_common_layout
from fedrot.strategies.round.outbox import (
    as_sent,
    integers_of,
    of_mean,
    plain,
    restored,
    with_tensors,
)
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Moved, Update
from fedrot.strategies.wire.arrays import from_arrays, records_of_type, without_arrays
from fedrot.strategies.wire.flower_compat import (
    clips_zero,
    equal_weights,
    metrics_function,
    set_broadcast,
    without_metrics,
)
from fedrot.tensors import Tensors

#: The result of a round: the new model, None if the old one stays, and metrics.
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

#: Base strategies that only need the mean of the updates.
OF_THE_MEAN = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)


@dataclass(frozen=True)
class Wrapped:
    """The base strategy, and the settings that a merge needs.

    Attributes:
        wrapped_class: the base strategy, whose ``aggregate_train`` is the method
            ``aggregate``.
        weighted_by: the metric that weights the clients.
        align: False if the base strategy receives updates without alignment.
        min_replies: with fewer accepted replies the round fails.
    """

    strategy: Strategy
    wrapped_class: type
    aggregate: Callable[[int, list[Message]], Aggregated]
    weighted_by: str
    broadcast: ArrayRecord
    align: bool
    min_replies: int


class Merge(Protocol):
    """Collects the updates of one round, and returns the new model.

    Attributes:
        mean: the mean that updates are added to as they arrive; None with other
            aggregations.
    """

    mean: Mean | None

    def add(self, moved: Moved) -> bool:
        """Add an update; return True if it was added, so that the anchor may follow."""

    def result(
        self, wrapped: Wrapped, moved_broadcast: Callable[[], Tensors] | None
    ) -> Aggregated:
        """Return the new model and metrics, once, at the end; see
        ``Aligner.moved_broadcast``.
        """


class Averaged:
    """Adds updates to an aggregator as they arrive.

    ``comparison`` chooses between the result and the mean of the same updates as they
    were received.
    """

    def __init__(
        self,
        build: Callable[[], Aggregator],
        record: RoundRecord,
        comparison: Comparison | None = None,
    ) -> None:
        self.record, self.comparison = record, comparison
        aggregator = build()
        self.mean = aggregator if type(aggregator) is Mean else None
        #: The aggregator, and with a guard the mean of the updates as they were
        #: received.
        self._aggregators = [aggregator] if comparison is None else [aggregator, Mean()]
        #: Metrics and small configurations of the updates.
        self._contents: list[RecordDict] = []

    def add(self, moved: Moved) -> bool:
        """Add an update; drop it if the aggregator refuses it."""
        update, (aggregator, *as_received) = moved.update, self._aggregators
        try:
            if type(aggregator) is Mean:
                aggregator.fold_parts(moved.parts, update.weight, moved.statistics)
            else:
                aggregator.add(moved.tensors, update.weight, moved.statistics)
            for mean in as_received:
                mean.add(update.tensors, update.weight, update.statistics)
        except UpdateError as error:
            self.record.drop(update.client, str(error))
            return False
        self._contents.append(without_arrays(update.message.content))
        self.record.merged(moved)
        if update.origin:
            self.record.origins.append(update.origin)
        return True

    def result(
        self, wrapped: Wrapped, moved_broadcast: Callable[[], Tensors] | None
    ) -> Aggregated:
        """Return the merged model, after the base strategy has aggregated the mean."""
        record = self.record
        merged, contents, kept_plain = self._merged(wrapped)
        metrics = _train_metrics(wrapped, contents) if contents else None
        if merged is None or wrapped.wrapped_class is FedAvg:
            return merged, metrics
        # The base strategy receives the mean as the round's only update.
        integers = integers_of(merged)
        mean, state = of_mean(merged, wrapped.weighted_by), vars(wrapped.strategy)
        before = dict(
            state
        )  # Flower's strategies replace attributes, and change none in place.
        # The plain mean is in the broadcast model's coordinates.
        moved = None if kept_plain else moved_broadcast
        with without_metrics(wrapped.strategy):
            arrays, _ = _aggregated(wrapped, record.number, [mean], moved)
        found = (
            _restored(arrays, wrapped.broadcast, integers)
            if arrays is not None
            else None
        )
        if found is None or not record.finite(from_arrays(found)):
            state.clear()
            state.update(before)
            return None, metrics
        return found, metrics

    def _merged(
        self, wrapped: Wrapped
    ) -> tuple[ArrayRecord | None, list[RecordDict], bool]:
        """Return the merged model, None if the round failed, and the metrics of the
        clients.

        The last value is True if a guard has kept the plain mean. The aggregators,
        which may be larger than the model, are released when this method returns.
        """
        record, comparison, contents = self.record, self.comparison, self._contents
        aggregators, self._aggregators, self.mean = self._aggregators, [], None
        record.accepted = len(contents)
        if not record.enough(wrapped.min_replies):
            return None, contents, False
        sent = (
            wrapped.broadcast
            if wrapped.wrapped_class is FedAvg
            else plain(wrapped.broadcast)
        )
        of_mean = type(aggregators[0]) is Mean
        if comparison is None or (of_mean and not comparison.needed(record)):
            return self._encoded(aggregators[0], sent), contents, False
        as_received = self._encoded(aggregators.pop(), sent)
        aligned = self._encoded(aggregators.pop(), sent)
        if as_received is None or aligned is None:
            return None, contents, False
        kept = comparison.kept(record, aligned, as_received)
        return kept, contents, kept is as_received

    def _encoded(self, aggregator: Aggregator, sent: ArrayRecord) -> ArrayRecord | None:
        """Return an aggregator's result encoded as ``sent``, None if it is not
        finite.
        """
        merged = (
            aggregator.result("cpu", last=True)
            if type(aggregator) is Mean
            else aggregator.result()
        )
        self.record.note(aggregator)
        found = as_sent(merged, sent)
        return found if self.record.finite(from_arrays(found)) else None


class Listed:
    """Holds all updates for a base strategy that needs each of them: medians, Krum,
    privacy wrappers.

    ``integers`` are arrays of the broadcast model that the new model keeps. They
    replace the updates' integers: one client could otherwise set their mean, and a
    privacy wrapper would add noise to them. If a client has marked rows as not trained,
    all updates are averaged by ``Mean`` instead.
    """

    mean: Mean | None = None

    def __init__(self, record: RoundRecord, integers: ArrayRecord) -> None:
        self.record, self._integers = record, integers
        # As floats, because Flower's strategies subtract them.
        self._shown = {name: t.double() for name, t in from_arrays(integers).items()}
        self._held: list[Update] = []

    def add(self, moved: Moved) -> bool:
        """Store the update's message."""
        message, marks = (
            with_tensors(moved, self._shown),
            moved.statistics.get(TRAINED, {}),
        )
        statistics = {TRAINED: marks} if marks else {}
        self._held.append(
            replace(moved.update, tensors={}, statistics=statistics, message=message)
        )
        self.record.merged(moved)
        return True

    def result(
        self, wrapped: Wrapped, moved_broadcast: Callable[[], Tensors] | None
    ) -> Aggregated:
        """Pass all updates to the base strategy."""
        record = self.record
        if any(update.statistics for update in self._held):
            return self._averaged().result(wrapped, moved_broadcast)
        good, odd = with_common_layout(self._held, _layout)
        for update in odd:
            what = (
                f"Its records and metrics are {_layout(update)}, most clients' are "
                f"{_layout(good[0])}."
            )
            record.drop(
                update.client, f"{what} Send the same metrics from every client."
            )
        if equal_weights(wrapped.strategy):
            good, odd = with_common_layout(good, lambda update: (update.weight,))
            for update in odd:
                what = (
                    f"Its weight is {update.weight:g}, most clients' is "
                    f"{good[0].weight:g}."
                )
                record.drop(
                    update.client, f"{what} The privacy accountant needs equal weights."
                )
        record.accepted = len(good)
        record.origins += [update.origin for update in good if update.origin]
        if not record.enough(wrapped.min_replies):
            return None, None
        with clips_zero():
            messages = [update.message for update in good]
            arrays, metrics = _aggregated(
                wrapped, record.number, messages, moved_broadcast
            )
        if arrays is None:
            return None, metrics
        if wrapped.align:
            arrays = _restored(arrays, wrapped.broadcast, self._integers)
        elif arrays.keys() == wrapped.broadcast.keys():
            arrays = _restored(arrays, wrapped.broadcast, integers_of(arrays))
        return arrays if record.finite(from_arrays(arrays)) else None, metrics

    def _averaged(self) -> Averaged:
        """Return the mean of the updates, which leaves out rows that are marked as not
        trained.
        """
        merge = Averaged(Mean, self.record)
        while self._held:
            update = self._held.pop(0)
            tensors = from_arrays(
                records_of_type(update.message.content, ArrayRecord)[update.record]
            )
            merge.add(Moved(update, (tensors,), update.statistics))
        return merge


def _aggregated(
    wrapped: Wrapped,
    number: int,
    messages: list[Message],
    moved: Callable[[], Tensors] | None,
) -> Aggregated:
    """Let the strategy aggregate; first move the broadcast model that it subtracts, if
    any.
    """
    if moved is not None:
        # A broadcast model that cannot be matched is not moved.
        with suppress(UpdateError):
            set_broadcast(
                wrapped.strategy,
                lambda: plain(as_sent(dict(moved()), wrapped.broadcast)),
            )
    return wrapped.aggregate(number, messages)


def _restored(
    arrays: ArrayRecord, broadcast: ArrayRecord, integers: ArrayRecord
) -> ArrayRecord:
    """Return a strategy's new model encoded as the broadcast model, with ``integers``
    restored.
    """
    found = restored(arrays, broadcast)
    for name, array in integers.items():
        found[name] = array
    return found


def _layout(update: Update) -> tuple[object, ...]:
    """Return what must be equal in all replies for Flower's strategies: record names
    and metrics.
    """
    return update.record, *metrics_layout(update.message.content)


def _train_metrics(wrapped: Wrapped, contents: Sequence[RecordDict]) -> MetricRecord:
    """Aggregate the most common layout of metrics by the base strategy's function."""
    good, odd = with_common_layout(contents, metrics_layout)
    if odd:
        log(
            WARNING,
            "The metrics of %d clients are left out, because they differ. Of the "
            "first, %s.",
            len(odd),
            unlike(odd[0], good[0]),
        )
    return metrics_function(wrapped.strategy)(good, wrapped.weighted_by)
