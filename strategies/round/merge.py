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
from torch import Tensor

from fedrot.aggregation import Aggregator, Mean
from fedrot.aggregation.layerwise import fold_by_layer
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.flower_compat import metrics_function, without_metrics
from fedrot.strategies.round.aligner import LayerwiseAligner
from fedrot.strategies.round.inbox import metrics_layout, with_common_layout
from fedrot.strategies.round.outbox import as_sent, of_mean, plain, restored, with_tensors
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.update import Update
from fedrot.strategies.round.waiting import Store
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.strategies.wire.records import without_arrays

#: What a round gives: the new model, None if the old one stays, and metrics.
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

#: Strategies that look at the updates' mean and at nothing else.
OF_THE_MEAN = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)

#: At most this many aggregators are built in a round. An aggregator takes its first update as the
#: model of all others; a second one is built from an update that the first refuses.
CANDIDATES = 3

_ODD = "Its statistics are of another form than most clients'. Collect them alike at every client."


@dataclass(frozen=True)
class Wrapped:
    """The strategy behind alignment, as far as a merge needs it.

    Attributes:
        strategy: the aligned strategy itself.
        wrapped_class: the class whose ``aggregate_train`` comes next; ``aggregate`` is that method.
        weighted_by: the metric that weights the clients.
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
    """How one round's updates become a model."""

    def add(self, update: Update) -> bool:
        """Add an update; return True if it counts in the mean so far."""

    def result(self, wrapped: Wrapped) -> Aggregated:
        """Return the new model and metrics; call it once, at the end."""


@dataclass
class _Candidate:
    """An aggregator, and per update it took: the client, why others refused it, the metrics."""

    aggregator: Aggregator
    taken: list[tuple[int, str, RecordDict]] = field(default_factory=list)

    def add(self, update: Update, refusal: str = "") -> None:
        self.aggregator.add(update.tensors, update.weight, update.statistics)
        self.note(update, refusal)

    def note(self, update: Update, refusal: str = "") -> None:
        self.taken.append((update.client, refusal or _ODD, without_arrays(update.message.content)))


class AggregatorMerge:
    """Adds updates to an aggregator as they come; the one that most updates agree with counts.

    ``mean`` is the aggregator if it is a plain mean, which refuses no form of update.
    """

    def __init__(
        self, build: Callable[[], Aggregator], this_round: Round, mean: Mean | None = None
    ) -> None:
        self._build, self.this_round, self.mean = build, this_round, mean
        self._candidates = [_Candidate(build() if mean is None else mean)]
        self._gone: list[tuple[int, str, RecordDict]] = []

    def add(self, update: Update) -> bool:
        """Add an update to the first aggregator that takes it; drop it if none does."""
        try:
            return self._taker(update) is self._best
        except UpdateError as error:
            self.this_round.drop(update.client, str(error))
            return False

    def _taker(self, update: Update) -> _Candidate:
        refusals: list[UpdateError] = []
        for candidate in self._candidates:
            try:
                candidate.add(update, str(refusals[0]) if refusals else "")
            except UpdateError as error:
                refusals.append(error)
            else:
                return candidate
        another = _Candidate(self._build())
        with suppress(UpdateError):
            another.add(update, str(refusals[0]))
            if len(self._candidates) == CANDIDATES:
                # The candidate with the fewest updates goes, the newest of equals; never the best.
                fewest = min(reversed(self._candidates), key=lambda candidate: len(candidate.taken))
                self._candidates.remove(fewest)
                self._gone += fewest.taken
            self._candidates.append(another)
            return another
        raise refusals[0]

    @property
    def _best(self) -> _Candidate:
        """The candidate that took most updates so far, the first of equals."""
        return max(self._candidates, key=lambda candidate: len(candidate.taken))

    def chosen(self) -> tuple[Aggregator, list[RecordDict]]:
        """Return the best aggregator and the metrics of its clients; drop the updates of the others."""
        best = self._best
        others = [taken for one in self._candidates if one is not best for taken in one.taken]
        for client, refusal, _ in self._gone + others:
            self.this_round.drop(client, refusal)
        self._candidates, self._gone, self.mean = [], [], None
        return best.aggregator, [content for _, _, content in best.taken]

    def result(self, wrapped: Wrapped) -> Aggregated:
        """Return the merged model, after a strategy that looks at the mean has had its turn."""
        this_round = self.this_round
        merged, contents = self._merged(wrapped)
        metrics = _train_metrics(wrapped, contents) if contents else None
        if merged is None:
            return None, metrics
        if wrapped.wrapped_class is FedAvg:
            return as_sent(merged, wrapped.broadcast), metrics
        # To strategies that look at nothing else, the mean is a round's only update.
        mean = of_mean(as_sent(merged, plain(wrapped.broadcast)), wrapped.weighted_by)
        with without_metrics(wrapped.strategy):
            arrays, _ = wrapped.aggregate(this_round.number, [mean])
        if arrays is None or not this_round.finite(from_arrays(arrays)):
            return None, metrics
        return restored(arrays, wrapped.broadcast), metrics

    def _merged(self, wrapped: Wrapped) -> tuple[dict[str, Tensor] | None, list[RecordDict]]:
        """Return the merged tensors, None if the round failed, and the metrics of the clients.

        The aggregator, which may be larger than the model, is released when this returns.
        """
        plain_mean = self.mean
        aggregator, contents = self.chosen()
        self.this_round.accepted = len(contents)
        if not self.this_round.enough(wrapped.min_replies):
            return None, contents
        merged = aggregator.result() if plain_mean is None else plain_mean.result("cpu", last=True)
        self.this_round.note(aggregator.notes)
        return (merged if self.this_round.finite(merged) else None), contents


class LayerwiseMerge(AggregatorMerge):
    """Aligns each update on a GPU layer by layer, and adds it to a mean that the GPU holds."""

    def __init__(self, this_round: Round, mean: Mean, aligner: LayerwiseAligner) -> None:
        super().__init__(Mean, this_round, mean)
        self._held, self._aligner = mean, aligner

    def add(self, update: Update) -> bool:
        """Align an update and add it; drop it if its statistics cannot follow."""
        plan, anchor = self._aligner.plan, self._aligner.rule.current
        given = (update.tensors, update.weight, anchor, plan.symmetry, plan.options, plan.device)
        try:
            report = fold_by_layer(self._held, *given, update.statistics)
        except FedrotError as error:
            self.this_round.drop(update.client, str(error))
            return False
        self.this_round.report(update.client, report)
        self._candidates[0].note(update)
        return True


class ListMerge:
    """Keeps all updates for a strategy that looks at each of them: medians, Krum, privacy wrappers."""

    def __init__(self, store: Store, this_round: Round) -> None:
        self._store, self.this_round = store, this_round
        self._held: list[Update] = []

    def add(self, update: Update) -> bool:
        """Keep the update's message."""
        message = with_tensors(update, self._store)
        self._held.append(replace(update, message=message, tensors={}, statistics={}, received={}))
        return True

    def result(self, wrapped: Wrapped) -> Aggregated:
        """Give all updates to the strategy."""
        this_round = self.this_round
        good, odd = with_common_layout(self._held, _layout)
        for update in odd:
            what = (
                f"Its records and metrics are {_layout(update)}, most clients' are {_layout(good[0])}."
            )
            this_round.drop(update.client, f"{what} Send the same metrics from every client.")
        this_round.accepted = len(good)
        if not this_round.enough(wrapped.min_replies):
            return None, None
        arrays, metrics = wrapped.aggregate(this_round.number, [update.message for update in good])
        if arrays is None or not this_round.finite(from_arrays(arrays)):
            return None, metrics
        return restored(arrays, wrapped.broadcast) if wrapped.align else arrays, metrics


def _layout(update: Update) -> tuple[object, ...]:
    """Return what Flower's strategies need to be equal in all replies: record names and metrics."""
    return update.record, *metrics_layout(update.message.content)


def _train_metrics(wrapped: Wrapped, contents: Sequence[RecordDict]) -> MetricRecord:
    """Aggregate the metrics of clients that sent the same ones, as the strategy behind does."""
    good, odd = with_common_layout(contents, metrics_layout)
    if odd:
        log(WARNING, "The metrics of %d clients are left out: they are not like most.", len(odd))
    return metrics_function(wrapped.strategy)(good, wrapped.weighted_by)
