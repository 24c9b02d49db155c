"""Merges: they take the aligned updates of one round, and make the new model at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Protocol

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy

from fedrot.aggregation import Aggregator, Mean
from fedrot.errors import UpdateError
from fedrot.strategies.flower_compat import (
    clips_zero,
    equal_weights,
    metrics_function,
    set_broadcast,
    without_metrics,
)
from fedrot.strategies.round.guard import Comparison
from fedrot.strategies.round.inbox import metrics_layout, unlike, with_common_layout
from fedrot.strategies.round.outbox import as_sent, integers_of, of_mean, plain, restored, with_tensors
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Moved, Update
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.strategies.wire.records import without_arrays
from fedrot.tensors import Tensors

#: What a round gives: the new model, None if the old one stays, and metrics.
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

#: Strategies that look at the updates' mean and at nothing else.
OF_THE_MEAN = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)

_ODD = "Its statistics are of another form than most clients'. Collect them alike at every client."


@dataclass(frozen=True)
class Wrapped:
    """The strategy behind alignment, as far as a merge needs it.

    Attributes:
        strategy: the aligned strategy itself.
        wrapped_class: the class whose ``aggregate_train`` comes next; ``aggregate`` is that method.
        weighted_by: the metric that weights the clients.
        broadcast: the model that was sent.
        align: False if updates reach the strategy as they were received.
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
    """How one round's updates become a model.

    Attributes:
        mean: the mean that updates are added to as they come; None if it is not a plain one.
    """

    mean: Mean | None

    def add(self, moved: Moved) -> bool:
        """Add an update; return True if it counts in the mean so far, and the anchor may follow it."""

    def result(self, wrapped: Wrapped, moved_broadcast: Callable[[], Tensors] | None) -> Aggregated:
        """Return the new model and metrics; call it once, at the end.

        Args:
            wrapped: the strategy behind.
            moved_broadcast: returns the broadcast model in the round's coordinates; None if it is there.
        """


@dataclass
class _Candidate:
    """An aggregator, and per update it took: the client, why others refused it, the metrics.

    ``plain``, if there is a guard, takes the same updates as they were received.
    """

    aggregator: Aggregator
    plain: Mean | None = None
    taken: list[tuple[int, str, RecordDict]] = field(default_factory=list)

    def add(self, moved: Moved, refusal: str = "") -> None:
        """Add an update; raises ``UpdateError``, and has added nothing then."""
        update = moved.update
        if type(self.aggregator) is Mean:
            self.aggregator.check(update.tensors, update.weight, moved.statistics)
            self.aggregator.fold_parts(moved.parts, update.weight, moved.statistics)
        else:
            self.aggregator.add(moved.tensors, update.weight, moved.statistics)
        if self.plain is not None:
            self.plain.add(update.tensors, update.weight, update.statistics)
        self.taken.append((update.client, refusal or _ODD, without_arrays(update.message.content)))


class Averaged:
    """Adds updates to an aggregator as they come; the one that most updates agree with counts.

    An aggregator takes its first update as the model of all others. Another one is built from an update
    that none takes: as many as there are clients whose statistics have a form of their own.

    ``comparison`` chooses between the result and the mean of the same updates as they were received.
    """

    def __init__(
        self,
        build: Callable[[], Aggregator],
        record: RoundRecord,
        comparison: Comparison | None = None,
    ) -> None:
        self._build, self.record, self.comparison = build, record, comparison
        first = build()
        self.mean = first if type(first) is Mean else None
        self._candidates = [self._candidate(first)]

    def add(self, moved: Moved) -> bool:
        """Add an update to the first aggregator that takes it; drop it if none does."""
        try:
            counts = self._taker(moved) is self._best
        except UpdateError as error:
            self.record.drop(moved.update.client, str(error))
            return False
        self.record.merged(moved)
        return counts

    def _candidate(self, aggregator: Aggregator) -> _Candidate:
        return _Candidate(aggregator, Mean() if self.comparison is not None else None)

    def _taker(self, moved: Moved) -> _Candidate:
        refusals: list[UpdateError] = []
        for candidate in self._candidates:
            try:
                candidate.add(moved, str(refusals[0]) if refusals else "")
            except UpdateError as error:
                refusals.append(error)
            else:
                return candidate
        another = self._candidate(self._build())
        with suppress(UpdateError):
            another.add(moved, str(refusals[0]))
            self._candidates.append(another)
            return another
        raise refusals[0]

    @property
    def _best(self) -> _Candidate:
        """The candidate that took most updates so far, the first of equals."""
        return max(self._candidates, key=lambda candidate: len(candidate.taken))

    def chosen(self) -> tuple[list[Aggregator], list[RecordDict]]:
        """Return the best aggregator and the metrics of its clients; drop the updates of the others.

        With a guard, the mean of the same updates as they were received comes second.
        """
        best = self._best
        others = [taken for one in self._candidates if one is not best for taken in one.taken]
        for client, refusal, _ in others:
            self.record.drop(client, refusal)
        self._candidates, self.mean = [], None
        both = [best.aggregator] if best.plain is None else [best.aggregator, best.plain]
        return both, [content for _, _, content in best.taken]

    def result(self, wrapped: Wrapped, moved_broadcast: Callable[[], Tensors] | None) -> Aggregated:
        """Return the merged model, after a strategy that looks at the mean has had its turn."""
        record = self.record
        merged, contents, kept_plain = self._merged(wrapped)
        metrics = _train_metrics(wrapped, contents) if contents else None
        if merged is None or wrapped.wrapped_class is FedAvg:
            return merged, metrics
        # To strategies that look at nothing else, the mean is a round's only update.
        integers = integers_of(merged)
        mean, state = of_mean(merged, wrapped.weighted_by), vars(wrapped.strategy)
        before = dict(state)  # Flower's strategies replace what they keep, and change nothing in place.
        # The plain mean has the broadcast model's own coordinates.
        moved = None if kept_plain else moved_broadcast
        with without_metrics(wrapped.strategy):
            arrays, _ = _aggregated(wrapped, record.number, [mean], moved)
        found = _restored(arrays, wrapped.broadcast, integers) if arrays is not None else None
        if found is None or not record.finite(from_arrays(found)):
            state.clear()
            state.update(before)
            return None, metrics
        return found, metrics

    def _merged(self, wrapped: Wrapped) -> tuple[ArrayRecord | None, list[RecordDict], bool]:
        """Return the merged model, None if the round failed, and the metrics of the clients.

        The last value tells whether a guard has kept the plain mean. The aggregators, which may be
        larger than the model, are released when this returns.
        """
        record, comparison = self.record, self.comparison
        aggregators, contents = self.chosen()
        record.accepted = len(contents)
        if not record.enough(wrapped.min_replies):
            return None, contents, False
        sent = wrapped.broadcast if wrapped.wrapped_class is FedAvg else plain(wrapped.broadcast)
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
        """Return an aggregator's result encoded as ``sent``, None if it is not finite."""
        merged = aggregator.result("cpu", last=True) if type(aggregator) is Mean else aggregator.result()
        self.record.note(aggregator)
        found = as_sent(merged, sent)
        return found if self.record.finite(from_arrays(found)) else None


class Listed:
    """Keeps all updates for a strategy that looks at each of them: medians, Krum, privacy wrappers.

    ``integers`` are the arrays of the broadcast model that the new model keeps, and that every update
    shows to the strategy: a mean of them would let one client set them, and noise would spoil them.
    """

    mean: Mean | None = None

    def __init__(self, record: RoundRecord, integers: ArrayRecord) -> None:
        self.record, self._integers = record, integers
        # As floats: Flower's strategies subtract them.
        self._shown = {name: t.double() for name, t in from_arrays(integers).items()}
        self._held: list[Update] = []

    def add(self, moved: Moved) -> bool:
        """Keep the update's message."""
        message = with_tensors(moved, self._shown)
        self._held.append(replace(moved.update, tensors={}, statistics={}, message=message))
        self.record.merged(moved)
        return True

    def result(self, wrapped: Wrapped, moved_broadcast: Callable[[], Tensors] | None) -> Aggregated:
        """Give all updates to the strategy."""
        record = self.record
        good, odd = with_common_layout(self._held, _layout)
        for update in odd:
            what = (
                f"Its records and metrics are {_layout(update)}, most clients' are {_layout(good[0])}."
            )
            record.drop(update.client, f"{what} Send the same metrics from every client.")
        if equal_weights(wrapped.strategy):
            good, odd = with_common_layout(good, lambda update: (update.weight,))
            for update in odd:
                what = f"Its weight is {update.weight:g}, most clients' is {good[0].weight:g}."
                record.drop(update.client, f"{what} The privacy accountant needs equal weights.")
        record.accepted = len(good)
        if not record.enough(wrapped.min_replies):
            return None, None
        with clips_zero():
            messages = [update.message for update in good]
            arrays, metrics = _aggregated(wrapped, record.number, messages, moved_broadcast)
        if arrays is None:
            return None, metrics
        if wrapped.align:
            arrays = _restored(arrays, wrapped.broadcast, self._integers)
        elif arrays.keys() == wrapped.broadcast.keys():
            arrays = _restored(arrays, wrapped.broadcast, integers_of(arrays))
        return arrays if record.finite(from_arrays(arrays)) else None, metrics


def _aggregated(
    wrapped: Wrapped, number: int, messages: list[Message], moved: Callable[[], Tensors] | None
) -> Aggregated:
    """Let the strategy aggregate; a broadcast model that it subtracts is in the mean's coordinates."""
    if moved is not None:
        # A broadcast model that cannot be matched stays as it is.
        with suppress(UpdateError):
            set_broadcast(wrapped.strategy, lambda: plain(as_sent(dict(moved()), wrapped.broadcast)))
    return wrapped.aggregate(number, messages)


def _restored(arrays: ArrayRecord, broadcast: ArrayRecord, integers: ArrayRecord) -> ArrayRecord:
    """Return a strategy's new model as it is sent; the strategy has no say in its integers."""
    found = restored(arrays, broadcast)
    for name, array in integers.items():
        found[name] = array
    return found


def _layout(update: Update) -> tuple[object, ...]:
    """Return what Flower's strategies need to be equal in all replies: record names and metrics."""
    return update.record, *metrics_layout(update.message.content)


def _train_metrics(wrapped: Wrapped, contents: Sequence[RecordDict]) -> MetricRecord:
    """Aggregate the metrics of clients that sent the same ones, as the strategy behind does."""
    good, odd = with_common_layout(contents, metrics_layout)
    if odd:
        log(
            WARNING,
            "The metrics of %d clients are left out: they are not like most. Of the first, %s.",
            len(odd),
            unlike(odd[0], good[0]),
        )
    return metrics_function(wrapped.strategy)(good, wrapped.weighted_by)
