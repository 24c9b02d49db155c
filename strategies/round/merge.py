"""Merges, which collect the aligned updates of one round and return the new model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
)

from fedrot.aggregation import Aggregator, Mean
from fedrot.collect.statistics import TRAINED
from fedrot.errors import UpdateError, legible
from fedrot.strategies.round.guard import Comparison
from fedrot.strategies.round.inbox import (
    Told,
    averageable,
    metrics_layout,
    not_finite,
    with_common_layout,
)
from fedrot.strategies.round.outbox import (
    as_sent,
    integers_of,
    plain,
    restored,
    with_tensors,
)
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Builder, Moved, MovedBroadcast, Update
from fedrot.strategies.wire.arrays import from_arrays, only_model, without_arrays
from fedrot.strategies.wire.flower_compat import (
    Aggregated,
    clips_zero,
    equal_weights,
    metrics_function,
    set_broadcast,
    with_metrics_of,
    without_metrics,
)
from fedrot.tensors import Tensors

#: A ``ReplyStrategy``, whose module imports this one.
ReplyStrategy = Any

#: Base strategies that only need the mean of the updates.
OF_THE_MEAN = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)


class Averaged:
    """Adds updates to an aggregator as they arrive.

    ``comparison`` chooses between the result and the mean of the same updates as they
    were received.

    Attributes:
        mean: the mean that updates are added to as they arrive; None with other
            aggregations.
    """

    def __init__(
        self,
        build: Builder,
        record: RoundRecord,
        comparison: Comparison | None = None,
    ) -> None:
        self.record = record
        self.comparison = comparison
        #: Deleted by ``result``: it may be larger than the model.
        self._aggregator = build()
        self.mean: Mean | None = None
        if isinstance(self._aggregator, Mean) and self._aggregator.streams:
            self.mean = self._aggregator
        #: With a guard the mean of the updates as they were received.
        self._as_received = None if comparison is None else Mean()
        self._told: list[Told] = []

    def add(self, moved: Moved) -> Tensors | None:
        """Add an update; return its tensors for the anchor, None if it was dropped.

        An update is dropped if the aggregator refuses it. The tensors are empty if it
        was added layer by layer.
        """
        update = moved.update
        try:
            if self._aggregator.streams:
                layers = moved.layers or [moved.tensors]
                self._aggregator.fold_parts(layers, update.weight, moved.statistics)
            else:
                self._aggregator.add(moved.tensors, update.weight, moved.statistics)
        except UpdateError as error:
            self.record.drop(update.client, str(error))
            return None
        if self._as_received is not None:
            self._as_received.fold(update.tensors, update.weight, update.statistics)
        self._told.append(Told(update.client, without_arrays(update.message.content)))
        self.record.merged(moved)
        if update.origin:
            self.record.origins.append(update.origin)
        return moved.tensors

    def result(
        self, strategy: ReplyStrategy, moved_broadcast: MovedBroadcast
    ) -> Aggregated:
        """Return the new model and metrics, once; see ``Aligner.moved_broadcast``.

        Any base strategy but ``FedAvg`` aggregates the mean as one update.
        """
        record = self.record
        record.accepted = len(self._told)
        merged, is_plain = self._merged(strategy)
        metrics = None
        if self._told:
            metrics = metrics_function(strategy)(
                _with_metrics(self._told), strategy._weighted_by
            )
        if merged is None or strategy.wrapped_class is FedAvg:
            return merged, metrics
        # The base strategy receives the mean as the round's only update, in a message
        # like one client's reply.
        weight = MetricRecord({strategy._weighted_by: 1})
        content = RecordDict({"arrays": merged, "metrics": weight})
        mean = Message(content, dst_node_id=0, message_type=MessageType.TRAIN)
        integers = integers_of(merged)
        # Flower's strategies replace attributes, and change none in place.
        state = strategy.__dict__
        before = dict(state)
        # The plain mean is in the broadcast model's coordinates.
        moved = None if is_plain else moved_broadcast
        with without_metrics(strategy):
            arrays, _ = _aggregated(strategy, record.number, [mean], moved)
        if arrays is not None:
            arrays = restored(arrays, strategy._broadcast, integers)
            if record.finite(arrays):
                return arrays, metrics
        state.clear()
        state.update(before)
        return None, metrics

    def _merged(self, strategy: ReplyStrategy) -> tuple[ArrayRecord | None, bool]:
        """Return the merged model, and whether it is the plain mean of a guard.

        None if the round failed. The aggregators are released when this method returns.
        """
        aggregator = self._aggregator
        as_received = self._as_received
        comparison = self.comparison
        is_mean = self.mean is not None
        del self._aggregator
        self._as_received = self.mean = None
        if not self.record.enough(strategy.server.min_replies):
            return None, False
        sent = strategy._broadcast
        if strategy.wrapped_class is not FedAvg:
            sent = plain(sent)
        if (
            comparison is None
            or as_received is None
            or (is_mean and not comparison.needed(self.record))
        ):
            return self._encoded(aggregator, sent), False
        unaligned = self._encoded(as_received, sent)
        aligned = self._encoded(aggregator, sent)
        # Its sums may be larger than the models that are evaluated next.
        del aggregator
        if unaligned is None or aligned is None:
            return None, False
        kept = comparison.kept(self.record, aligned, unaligned)
        return kept, kept is unaligned

    def _encoded(self, aggregator: Aggregator, sent: ArrayRecord) -> ArrayRecord | None:
        """Return an aggregator's result encoded as ``sent``, None if not finite."""
        merged = aggregator.release()
        self.record.note(aggregator)
        encoded = as_sent(merged, sent)
        return encoded if self.record.finite(encoded) else None


class Listed:
    """Holds all updates for a base strategy that needs each: medians, Krum, privacy.

    ``integers`` are arrays of the broadcast model that the new model keeps. They
    replace the updates' integers: one client could otherwise set their mean, and a
    privacy wrapper would add noise to them. From the first client on that has marked
    rows as not trained, all updates are averaged by ``Mean`` instead.
    """

    mean: Mean | None = None

    def __init__(self, record: RoundRecord, integers: ArrayRecord) -> None:
        self.record = record
        self._integers = integers
        # As floats, because Flower's strategies subtract them.
        self._shown = {name: t.double() for name, t in from_arrays(integers).items()}
        self._held: list[Update] = []
        #: Takes over all updates when the first one has marks.
        self._averaged: Averaged | None = None

    def add(self, moved: Moved) -> Tensors | None:
        """Store the update's message, or add the update to the mean."""
        shown = replace(moved, tensors={**moved.tensors, **self._shown})
        if self._averaged is None and moved.statistics.get(TRAINED):
            self._averaged = self._average_held()
        if self._averaged is not None:
            self._averaged.add(shown)
            return moved.tensors
        self._held.append(
            replace(
                moved.update, tensors={}, statistics={}, message=with_tensors(shown)
            )
        )
        self.record.merged(moved)
        return moved.tensors

    def _average_held(self) -> Averaged:
        """Return a mean that leaves out rows that are marked as not trained."""
        merge = Averaged(Mean, self.record)
        while self._held:
            update = self._held.pop(0)
            _, arrays = only_model(update.message.content)
            merge.add(Moved(update, from_arrays(arrays), {}))
        return merge

    def result(
        self, strategy: ReplyStrategy, moved_broadcast: MovedBroadcast
    ) -> Aggregated:
        """Pass all updates to the base strategy."""
        if self._averaged is not None:
            return self._averaged.result(strategy, moved_broadcast)
        record = self.record
        good = self._alike(strategy)
        record.accepted = len(good)
        record.origins += [update.origin for update in good if update.origin]
        if not record.enough(strategy.server.min_replies):
            return None, None
        _with_metrics([Told(update.client, update.message.content) for update in good])
        with clips_zero(), with_metrics_of(strategy, _finite):
            arrays, metrics = _aggregated(
                strategy,
                record.number,
                [update.message for update in good],
                moved_broadcast,
            )
        if arrays is None:
            return None, metrics
        if arrays.keys() == strategy._broadcast.keys():
            arrays = restored(arrays, strategy._broadcast, self._integers)
        return arrays if record.finite(arrays) else None, metrics

    def _alike(self, strategy: ReplyStrategy) -> list[Update]:
        """Drop the updates that the base strategy could not aggregate with most.

        Record names and metrics have to be equal, and for some strategies weights.
        """
        equal = equal_weights(strategy)

        def layout(update: Update) -> tuple[object, ...]:
            weight = (update.weight,) if equal else ()
            return update.record, *metrics_layout(update.message.content), *weight

        good, odd = with_common_layout(self._held, layout)
        for update in odd:
            self.record.drop(
                update.client,
                f"Its records, metrics and weight are {layout(update)}, most clients' "
                f"are {layout(good[0])}. Send the same metrics from every client, and "
                "equal weights for a privacy accountant.",
            )
        return good


#: Collects the updates of one round, and returns the new model.
Merge = Averaged | Listed


def _aggregated(
    strategy: ReplyStrategy,
    number: int,
    messages: list[Message],
    moved: MovedBroadcast,
) -> Aggregated:
    """Let the strategy aggregate; ``moved`` makes the model that it subtracts."""
    if moved:
        # A broadcast model that cannot be matched is not moved.
        with suppress(UpdateError):
            set_broadcast(
                strategy,
                lambda: plain(as_sent(dict(moved()), strategy._broadcast)),
            )
    return strategy._aggregate_behind(number, messages)


def _with_metrics(told: Sequence[Told]) -> list[RecordDict]:
    """Return the contents whose metrics are averaged; warnings name the others."""

    def leave_out(odd: Told, reason: str) -> None:
        log(WARNING, "Metrics of client %d left out: %s", odd.client, legible(reason))

    good = averageable(told, leave_out)
    return [client.content for client in good]


def _finite(contents: list[RecordDict]) -> list[RecordDict]:
    """Return the contents whose metrics are finite; all if there are none."""
    return [content for content in contents if not not_finite(content)] or contents
