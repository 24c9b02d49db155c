"""Results of an experiment over its seeds, their differences, and the recommended
strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedrot.simulations.run_folder import Run

Row: TypeAlias = Mapping[str, Any]

#: The strategy that others are compared with, where it has results.
REFERENCE = "fedavg"
#: Kinds of strategies that give no model of a federation, and what they give. Plug-ins
#: add theirs.
BOUNDS: dict[str, str] = {}
#: The scope of rows about the global model on the test rows, and the start of that of a
#: client's rows.
CENTRAL, OF_CLIENT = "central", "client:"
LOWER_IS_BETTER = frozenset(
    {"loss", "calibrated_loss", "ece", "perplexity", "pseudo_perplexity"}
)
#: Largest difference of metrics between models that differ only by the order of float32
#: sums.
ROUNDING = 1e-6
#: A model has learned if its accuracy or macro F1 exceeds that of naming one class by
#: more than this.
LEARNED = 0.02


@dataclass(frozen=True)
class Paired:
    """Ours minus theirs over ``n`` seeds: mean and verdict.

    ``smallest`` is half of the two-sided 95 % t interval: the smallest mean difference
    that is outside noise at this spread. The verdict is "better" or "worse", "within
    noise" if the interval contains 0, "same" if no difference is above ``ROUNDING``,
    "not finite", or "no interval" (``smallest`` is NaN) with fewer than two seeds or
    without a spread. ``ours`` and ``theirs`` are means over these seeds.
    """

    mean: float
    smallest: float
    n: int
    verdict: str
    ours: float = math.nan
    theirs: float = math.nan


def paired_difference(
    differences: Sequence[float], *, lower_is_better: bool = False
) -> Paired:
    """Return the mean of differences, t(0.975, n - 1) sd / sqrt(n), and the verdict."""
    from scipy import stats

    n, mean = (
        len(differences),
        float(np.mean(differences)) if len(differences) else math.nan,
    )
    if not np.isfinite(differences).all():
        return Paired(math.nan, math.nan, n, "not finite")
    if n and max(map(abs, differences)) <= ROUNDING:
        return Paired(mean, math.nan, n, "same")
    sd = float(np.std(differences, ddof=1)) if n > 1 else 0.0
    if n < 2 or sd <= ROUNDING * abs(mean):
        return Paired(mean, math.nan, n, "no interval")
    half = float(stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n)
    outside = "better" if (mean < 0) == lower_is_better else "worse"
    return Paired(mean, half, n, "within noise" if abs(mean) <= half else outside)


@dataclass(frozen=True, eq=False)
class Standing:
    """A strategy's results after its last round, compared with the reference.

    Attributes:
        about: the strategy in the configuration: its kind, ``code`` to copy, and what
            it ``says``.
        values: metrics of the global model on the test rows, [seeds, metrics].
        worst: the headline metric of the worst client on its held-out rows, mean over
            seeds.
        traffic, requests: bytes of all messages and their number, mean over seeds. NaN
            if unknown.
        against: metric -> difference from the reference.
        judgement: better, worse, mixed (both, by metric), same, diverged or undecided.
    """

    name: str
    about: Row
    values: DataFrame
    worst: float
    traffic: float
    requests: float
    against: Mapping[str, Paired] = field(default_factory=dict)
    judgement: str = ""

    @property
    def bound(self) -> str:
        """What a strategy gives that gives no model of a federation; empty for
        others.
        """
        return BOUNDS.get(str(self.about.get("kind", self.name)), "")

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over seeds; NaN if the strategy lacks it."""
        return (
            float(self.values[metric].mean(skipna=False))
            if metric in self.values
            else math.nan
        )

    def compared(self, other: Standing, metrics: Iterable[str]) -> Standing:
        """Return these results compared with another strategy's, and judged by some
        metrics.
        """
        against = {metric: self._difference(other, metric) for metric in metrics}
        found = {pair.verdict for pair in against.values()}
        decided = [*found & {"better", "worse"}, "undecided"]
        judged = (
            "mixed" if len(decided) > 2 else "same" if found == {"same"} else decided[0]
        )
        return replace(
            self,
            against=against,
            judgement="diverged" if "not finite" in found else judged,
        )

    def _difference(self, other: Standing, metric: str) -> Paired:
        ours, theirs = (
            own.values.reindex(columns=[metric])[metric] for own in (self, other)
        )
        known = metric in self.values and metric in other.values
        common = ours.index.intersection(theirs.index if known else [])
        ours, theirs = ours[common], theirs[common]
        found = paired_difference(
            [*ours - theirs], lower_is_better=metric in LOWER_IS_BETTER
        )
        return replace(found, ours=float(ours.mean()), theirs=float(theirs.mean()))


@dataclass(frozen=True)
class Verdict:
    """All strategies of an experiment, and the recommended one.

    Attributes:
        metrics: central metrics in the order of the rows, the headline metric first,
            the loss last.
        judged: the metrics that decide: the headline metric, macro F1 beside accuracy,
            the loss. The last one ranks.
        standings: strategies with results, in the experiment's order.
        reference: the strategy that others are compared with.
        recommended: the strategy to use; the reference if no other one is better beyond
            noise.
        most_frequent: share of the largest class of the clients' rows; NaN without
            classes.
        learned: whether a strategy has learned more than to name the most frequent
            class.
    """

    experiment: str
    metrics: Sequence[str]
    judged: Sequence[str]
    standings: Sequence[Standing]
    reference: Standing
    recommended: Standing
    most_frequent: float
    learned: bool

    @property
    def undecided(self) -> bool:
        """Whether nothing is better beyond noise, and no comparison has three seeds."""
        counts = [
            own.against[self.judged[0]].n
            for own in self.standings
            if own is not self.reference
        ]
        return self.recommended is self.reference and bool(counts) and max(counts) < 3

    @property
    def code(self) -> str:
        """The recommended strategy's line of code; empty if nothing was learned or is
        decided.
        """
        known = self.learned and not self.undecided
        return str(self.recommended.about.get("code", "")) if known else ""

    @property
    def seeds(self) -> str:
        """The number of seeds in words: ``5 seeds``, ``3 to 5 seeds``."""
        counts = sorted({len(own.values) for own in self.standings})
        return (
            f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} "
            f"seed{'s' * (counts[-1] > 1)}"
        )


def verdicts_of(run: Run) -> list[Verdict]:
    """Return the verdicts of all experiments with results, in the order of the
    configuration.
    """
    return [
        found for name in run.experiments if (found := verdict(run, name)) is not None
    ]


def verdict(run: Run, name: str) -> Verdict | None:
    """Return the strategies of an experiment, compared, and the recommended one; None
    without results.

    The reference is FedAvg, else the first strategy that gives a model, of those with
    finite values. A strategy is better if one of the judged metrics is better beyond
    noise, and none is worse. Of those, the one with the best mean of the ranking metric
    is recommended. Joint training and strategies that give no model are never
    recommended.
    """
    import pandas

    columns = ["strategy", "seed", "round", "scope", "metric", "value"]
    rows = [row for row in run.rows if row["experiment"] == name]
    frame = pandas.DataFrame(rows, columns=columns).astype({"value": float})
    frame = frame[frame["round"] == frame.groupby("strategy")["round"].transform("max")]
    frame = frame.drop_duplicates(["strategy", "seed", "scope", "metric"], keep="last")
    central = frame[frame["scope"] == CENTRAL]
    if central.empty:
        return None
    metrics = sorted(
        map(str, central["metric"].unique()), key=lambda metric: metric == "loss"
    )
    beside = "macro_f1" if "accuracy" in metrics else "loss"
    judged = [
        metric
        for metric in dict.fromkeys([metrics[0], beside, "loss"])
        if metric in metrics
    ]
    standings = [
        _standing(own, frame[frame["strategy"] == own["name"]], metrics[0])
        for own in run.experiments[name]["strategies"].values()
        if own["name"] in {*central["strategy"]}
    ]
    finite = [
        own for own in standings if math.isfinite(own.mean(judged[-1]))
    ] or standings
    first = min(finite, key=lambda own: (own.name != REFERENCE, bool(own.bound)))
    standings = [own.compared(first, judged) for own in standings]
    reference = next(own for own in standings if own.name == first.name)
    better = [own for own in standings if not own.bound and own.judgement == "better"]
    sign = 1 if judged[-1] in LOWER_IS_BETTER else -1
    recommended = min(
        better, key=lambda own: sign * own.against[judged[-1]].mean, default=reference
    )
    learned = _learned(run.experiments[name], standings)
    return Verdict(name, metrics, judged, standings, reference, recommended, *learned)


def _standing(about: Row, frame: DataFrame, headline: str) -> Standing:
    """Return a strategy's results, not yet compared; ``frame`` has its rows of the last
    round.
    """
    values = frame[frame["scope"] == CENTRAL].pivot(
        index="seed", columns="metric", values="value"
    )
    clients = frame[
        frame["scope"].str.startswith(OF_CLIENT) & (frame["metric"] == headline)
    ]
    worst = clients.groupby("seed")["value"].agg(
        "max" if headline in LOWER_IS_BETTER else "min"
    )
    means = frame[frame["scope"] == "messages"].groupby("metric")["value"].mean()
    sent, received, requests = means.reindex(
        ["bytes-sent", "bytes-received", "requests"]
    )
    return Standing(
        str(about["name"]), about, values, worst.mean(), sent + received, requests
    )


def _learned(experiment: Row, standings: Sequence[Standing]) -> tuple[float, bool]:
    """Return the share of the largest class, and whether a strategy knows more than to
    name it.
    """
    names, seeds = experiment["label_names"], experiment["seeds"].values()
    counts = sum(np.sum(counts, axis=0) for counts in seeds)
    if len(names) < 2 or not np.sum(counts):
        return math.nan, True
    share = float(np.max(counts[: len(names)]) / np.sum(counts))
    # Always naming this class has a macro F1 of 2 share / (1 + share) / classes.
    bars = {"accuracy": share, "macro_f1": 2 * share / (1 + share) / len(names)}
    below = (
        own.mean(metric) <= bar + LEARNED
        for own in standings
        for metric, bar in bars.items()
    )
    return share, not all(below)
