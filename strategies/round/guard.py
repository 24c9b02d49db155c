"""``Guard``: a round keeps the mean without alignment unless its result is better."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from logging import INFO

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log

from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.strategies.arguments import check_functions, read_evaluate
from fedrot.strategies.reporting.verdict import KEPT_ALIGNED
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.wire.flower_compat import Evaluate, StageMetrics

#: Words in the names of metrics whose lower, or higher, values are better.
LOWER = {
    "loss",
    "perplexity",
    "error",
    "mse",
    "rmse",
    "mae",
    "nll",
    "brier",
    "wer",
    "cer",
}
HIGHER = {
    "accuracy",
    "acc",
    "precision",
    "recall",
    "f1",
    "auc",
    "matthews",
    "pearson",
    "spearman",
    "r2",
}

#: Names of the two results in metrics; the first is kept if values are equal.
PLAIN = "plain"
ALIGNED = "aligned"
#: Name, in the log, of the result of an aggregation.
MERGED = "merged"


@dataclass(frozen=True)
class Guard:
    """Keeps the plain mean of a round unless the round's result is better.

    The round's result is the mean of the aligned updates, or the result of ``FedRot``'s
    ``aggregation``. The plain mean is that of the same updates as they were received.
    At the end of the round the server evaluates both and keeps the better one. It keeps
    the plain mean if they are equal, or if both are means of updates that were not
    moved. A guard needs CPU memory for one more model, and up to two evaluations a
    round.

    Server optimisers (FedAvgM, FedAdam, ...) receive the mean that was kept. The guard
    evaluates means, not the models after the optimiser's step.

    Example: ``FedRot(config, guard="accuracy")``, or ``FedRot(config,
    guard=Guard("points", True))``.

    Attributes:
        metric: name of a number that the evaluation returns.
        higher_is_better: None derives it from the words of the metric's name: lower is
            better for ``eval-loss``, higher for ``macro_f1``, see ``LOWER`` and
            ``HIGHER``.
        evaluate: a function like ``evaluate_fn`` of ``start``, which returns the metric
            in every round. Use other data than in ``evaluate_fn``: results on data that
            chose the model are too good. None takes ``evaluate_fn``.

    Raises:
        FedrotError: an argument has another type, or the metric's name does not show
            which values are better.
    """

    metric: str
    higher_is_better: bool | None = None
    evaluate: Evaluate | None = None

    def __post_init__(self) -> None:
        if not (self.metric and isinstance(self.metric, str)):
            raise FedrotError(
                f"metric is {self.metric!r}; give the name of a metric, like "
                "'accuracy'."
            )
        check_functions(self, "evaluate")
        if self.higher_is_better is None:
            words = set(re.split(r"[^a-z0-9]+", self.metric.lower()))
            if bool(words & HIGHER) == bool(words & LOWER):
                raise FedrotError(
                    f"The name '{self.metric}' does not show whether higher or lower "
                    f"values are better: write guard=Guard('{self.metric}', "
                    "higher_is_better=True), or False."
                )
            object.__setattr__(self, "higher_is_better", bool(words & HIGHER))


class Comparison:
    """Evaluates the plain mean and the other result of a round; keeps the better one.

    Args:
        argument: of a strategy: ``guard``.
        options: all by which the strategy aligns.
        aggregates: whether the strategy has an ``aggregation``.
    """

    def __init__(
        self,
        argument: object,
        options: Collection[AlignmentOptions],
        *,
        aggregates: bool,
    ) -> None:
        guard = Guard(argument) if isinstance(argument, str) else argument
        if not isinstance(guard, Guard):
            raise FedrotError(
                f"guard is a {type(argument).__name__}; give a metric's name, "
                "guard='accuracy', or a Guard."
            )
        if not options and not aggregates:
            raise FedrotError(
                "guard compares the aligned mean with the plain mean; with "
                "alignment=None there is only the plain mean. Omit one of the two "
                "arguments."
            )
        self.guard = guard
        self._name = MERGED if aggregates else ALIGNED
        # Canonical tensors differ even if no group is moved.
        self._always = any(each.may_be_canonical for each in options)
        self._evaluate = guard.evaluate and read_evaluate(guard.evaluate)
        self._known: tuple[int, ArrayRecord, StageMetrics] | None = None

    def evaluating(self, evaluate: Evaluate | None, merges: bool) -> Evaluate | None:
        """Return the server's evaluation function, which evaluates no mean twice.

        ``evaluate`` is that of ``start``; ``merges`` is False if the base strategy
        needs every update.
        """
        if not merges:
            raise FedrotError(
                "guard compares two means, but the base strategy needs every update "
                "(medians, Krum, privacy wrappers) and makes no mean. Omit guard, or "
                "take FedRot, or Aligned with FedAvg, FedAvgM, FedAdam, FedYogi or "
                "FedAdagrad."
            )
        if self.guard.evaluate is not None:
            return evaluate
        if evaluate is None:
            raise FedrotError(
                f"guard compares '{self.guard.metric}' at the server, which has no "
                "evaluation function: write start(grid, arrays, evaluate_fn=...), or "
                "guard=Guard(..., evaluate=...)."
            )
        self._evaluate = evaluate

        def once(number: int, arrays: ArrayRecord) -> StageMetrics:
            known = self._known
            self._known = None
            if known and known[0] == number and known[1] is arrays:
                return known[2]
            metrics = evaluate(number, arrays)
            if number == 0 and metrics is not None:
                self._value(
                    number, metrics
                )  # Raises, before clients train, if the metric is missing.
            return metrics

        return once

    def needed(self, record: RoundRecord) -> bool:
        """Return whether the two means differ; if not, log it."""
        groups = (group for _, report in record.reports for group in report.groups)
        if self._always or any(
            group.moved or group.after != group.before for group in groups
        ):
            return True
        record.guard = {KEPT_ALIGNED: 0}
        log(
            INFO,
            "Round %d: nothing was moved, aligned and plain mean are equal: not "
            "evaluated",
            record.number,
        )
        return False

    def kept(
        self, record: RoundRecord, aligned: ArrayRecord, plain: ArrayRecord
    ) -> ArrayRecord:
        """Evaluate both results of a round, and return the better one."""
        number = record.number
        means = {PLAIN: plain, ALIGNED: aligned}
        if self._evaluate is None:
            raise FedrotError(
                "guard needs evaluate_fn: call this strategy's start with evaluate_fn."
            )
        evaluated = {name: self._evaluate(number, mean) for name, mean in means.items()}
        values = {
            name: self._value(number, metrics) for name, metrics in evaluated.items()
        }
        sign = 1 if self.guard.higher_is_better else -1
        best = max(
            values, key=lambda name: (not math.isnan(values[name]), sign * values[name])
        )
        if self.guard.evaluate is None:
            self._known = number, means[best], evaluated[best]
        figures = {f"fedrot-guard-{name}": value for name, value in values.items()}
        record.guard = {**figures, KEPT_ALIGNED: int(best == ALIGNED)}
        kept = PLAIN if best == PLAIN else self._name
        shown = (
            number,
            self._name,
            f"{values[ALIGNED]:z.4g}",
            f"{values[PLAIN]:z.4g}",
            self.guard.metric,
            kept,
        )
        log(INFO, "Round %d: %s %s, plain %s %s: kept %s", *shown)
        return means[best]

    def _value(self, number: int, metrics: StageMetrics) -> float:
        metrics = metrics or MetricRecord()
        value = metrics.get(self.guard.metric)
        if not isinstance(value, int | float):
            what = "has no" if value is None else "returns a list for"
            raise FedrotError(
                f"The evaluation of round {number} {what} metric "
                f"'{self.guard.metric}', which guard compares; it has: "
                f"{', '.join(metrics) or 'nothing'}. Return this metric as a number in "
                "every round, or name another metric."
            )
        return float(value)
