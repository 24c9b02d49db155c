"""``Guard``: a round keeps the plain mean where its own result is no better."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from logging import INFO

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log

from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.strategies.reporting.rows import Evaluate
from fedrot.strategies.reporting.verdict import KEPT_ALIGNED
from fedrot.strategies.round.record import RoundRecord

#: Words in the names of metrics that say which values are better.
LOWER = frozenset(("loss", "perplexity", "error", "mse", "rmse", "mae", "nll", "brier", "wer", "cer"))
HIGHER = frozenset(
    ("accuracy", "acc", "precision", "recall", "f1", "auc", "matthews", "pearson", "spearman", "r2")
)

#: Names of the two results in metrics; of equal values the first is kept.
PLAIN, ALIGNED = "plain", "aligned"
#: Name, in the log, of the result of an aggregation.
MERGED = "merged"


@dataclass(frozen=True)
class Guard:
    """Keeps the plain mean of a round where it is better than what the round makes of the updates.

    A round averages the updates as they were received, beside what it makes of the aligned ones: their
    mean, or the result of ``FedRot``'s ``aggregation``. At its end the server evaluates both and keeps
    the better one; of equal ones, and of two means of updates that were not moved, the plain one. This
    takes the host memory of one more model, and up to two evaluations a round.

    Server optimisers (FedAvgM, FedAdam, ...) receive the mean that was kept. What is evaluated are the
    means, not the optimiser's steps from them.

    Example: ``FedRot(config, guard="accuracy")``, or ``FedRot(config, guard=Guard("points", True))``.

    Attributes:
        metric: name of a number that the evaluation returns.
        higher_is_better: None reads it from the words of the metric's name: ``eval-loss`` is better if
            lower, ``macro_f1`` if higher, see ``LOWER`` and ``HIGHER``.
        evaluate: takes the place of ``evaluate_fn``, which ``start`` is given, and returns the metric in
            every round. Give it other data than ``evaluate_fn``: on data that chose the model, the model
            looks better than it is. None takes ``evaluate_fn``.

    Raises:
        FedrotError: the metric's name does not say which values are better, or something is of
            another type.
    """

    metric: str
    higher_is_better: bool | None = None
    evaluate: Evaluate | None = None

    def __post_init__(self) -> None:
        given: dict[str, object] = {"metric": self.metric, "evaluate": self.evaluate}
        if not isinstance(given["metric"], str) or not self.metric:
            raise FedrotError(f"Guard needs the name of a metric, 'accuracy', say, not {self.metric!r}.")
        if not (self.evaluate is None or callable(given["evaluate"])):
            kind = type(self.evaluate).__name__
            raise FedrotError(f"Guard's evaluate is a {kind}; give a function like evaluate_fn.")
        if self.higher_is_better is None:
            words = set(re.split(r"[^a-z0-9]+", self.metric.lower()))
            if bool(words & HIGHER) == bool(words & LOWER):
                raise FedrotError(
                    f"The name '{self.metric}' does not say whether higher or lower values are better: "
                    f"write guard=Guard('{self.metric}', higher_is_better=True), or False."
                )
            object.__setattr__(self, "higher_is_better", bool(words & HIGHER))


class Comparison:
    """The settings ``Guard`` at work: evaluates the plain mean and the other result, keeps the better.

    Args:
        guard: the settings.
        name: of the other result, in the log.
        always: whether means are evaluated in rounds in which no group was moved, too.
    """

    def __init__(self, guard: Guard, name: str = ALIGNED, always: bool = False) -> None:
        self.guard, self._name, self._always = guard, name, always
        self._evaluate = guard.evaluate
        self._known: tuple[int, ArrayRecord, MetricRecord] | None = None

    def evaluating(self, evaluate: Evaluate | None, merges: bool) -> Evaluate | None:
        """Return the server's evaluation function, which evaluates a mean that was kept only once.

        Args:
            evaluate: the function that ``start`` was given.
            merges: whether updates are merged here; False if the strategy behind looks at each of them.

        Raises:
            FedrotError: there is nothing to compare, or nothing to compare it with; later, if the
                evaluation of the initial model lacks the metric.
        """
        if not merges:
            raise FedrotError(
                "guard compares two means, but the strategy behind looks at every update (medians, "
                "Krum, privacy wrappers) and makes no mean. Leave guard out, or take FedRot, or Aligned "
                "in front of FedAvg, FedAvgM, FedAdam, FedYogi or FedAdagrad."
            )
        if self.guard.evaluate is not None:
            return evaluate
        if evaluate is None:
            raise FedrotError(
                f"guard compares '{self.guard.metric}' at the server, which has no function to evaluate "
                "with: write start(grid, arrays, evaluate_fn=...), or guard=Guard(..., evaluate=...)."
            )
        self._evaluate = evaluate

        def once(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            known, self._known = self._known, None
            if known is not None and known[0] == number and known[1] is arrays:
                return known[2]
            found = evaluate(number, arrays)
            if number == 0 and found is not None:
                self._value(number, found)  # A metric that is missing is an error before clients train.
            return found

        return once

    def needed(self, record: RoundRecord) -> bool:
        """Return whether the two means differ; if not, say so."""
        groups = (group for _, report in record.reports for group in report.groups)
        if self._always or any(group.moved or group.after != group.before for group in groups):
            return True
        message = "Round %d: nothing was moved, aligned and plain mean are one: not evaluated"
        self._note(record, PLAIN, {}, message, record.number)
        return False

    def kept(self, record: RoundRecord, aligned: ArrayRecord, plain: ArrayRecord) -> ArrayRecord:
        """Evaluate both results of a round, and return the better one.

        Raises:
            FedrotError: the evaluation gives no number for the metric.
        """
        number, means = record.number, {PLAIN: plain, ALIGNED: aligned}
        found = {name: self._evaluated(number, mean) for name, mean in means.items()}
        values = {name: self._value(number, metrics) for name, metrics in found.items()}
        best = max(values, key=lambda name: self._goodness(values[name]))
        if self.guard.evaluate is None:
            self._known = number, means[best], found[best]
        kept = PLAIN if best == PLAIN else self._name
        shown = (number, self._name, values[ALIGNED], values[PLAIN], self.guard.metric, kept)
        message = "Round %d: %s %.4g, plain %.4g %s: kept %s"
        self._note(record, best, values, message, *shown)
        return means[best]

    def _note(
        self, record: RoundRecord, best: str, values: dict[str, float], message: str, *args: object
    ) -> None:
        figures = {f"fedrot-guard-{name}": value for name, value in values.items()}
        record.guard = {**figures, KEPT_ALIGNED: int(best == ALIGNED)}
        log(INFO, message, *args)

    def _evaluated(self, number: int, mean: ArrayRecord) -> MetricRecord:
        if self._evaluate is None:
            raise FedrotError("guard needs the evaluate_fn of this strategy's own 'start': call that.")
        found = self._evaluate(number, mean)
        if found is None:
            raise FedrotError(
                f"The evaluation returned nothing in round {number}, so that guard cannot choose a "
                f"mean. Return a MetricRecord with '{self.guard.metric}' in every round."
            )
        return found

    def _value(self, number: int, metrics: MetricRecord) -> float:
        value = metrics.get(self.guard.metric)
        if not isinstance(value, (int, float)):
            what = "has no" if value is None else "gives a list for"
            raise FedrotError(
                f"The evaluation of round {number} {what} metric '{self.guard.metric}', which guard "
                f"compares; it has: {', '.join(metrics) or 'nothing'}. Return it as a number, or name "
                "another one."
            )
        return float(value)

    def _goodness(self, value: float) -> float:
        if math.isnan(value):
            return -math.inf
        return value if self.guard.higher_is_better else -value


def comparison_of(
    given: object,
    alignment: AlignmentOptions | None,
    other_basis: AlignmentOptions | None,
    *,
    aggregates: bool,
) -> Comparison:
    """Return the comparison that a strategy's argument ``guard`` asks for.

    Args:
        given: a metric's name, or the settings.
        alignment: of the strategy.
        other_basis: what replies in another basis are aligned with; None if they are not told apart.
        aggregates: whether the strategy has an aggregation of its own.

    Raises:
        FedrotError: it is something else, there is only the plain mean, or see ``Guard``.
    """
    guard = Guard(given) if isinstance(given, str) else given
    if not isinstance(guard, Guard):
        kind = type(given).__name__
        raise FedrotError(f"guard is a {kind}; give a metric's name, guard='accuracy', or a Guard.")
    if alignment is None and not aggregates:
        raise FedrotError(
            "guard compares the aligned mean with the plain one; with alignment=None there is only the "
            "plain one. Leave one of the two arguments out."
        )
    # Canonical tensors differ even where no group is moved.
    canonical = any(o is not None and o.may_be_canonical for o in (alignment, other_basis))
    return Comparison(guard, MERGED if aggregates else ALIGNED, canonical)
