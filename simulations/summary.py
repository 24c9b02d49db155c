"""Results of an experiment over its seeds, their differences, and the recommended strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedrot.simulations.folder import Run

Row: TypeAlias = Mapping[str, Any]

#: The strategy that others are compared with, where it has results.
REFERENCE = "fedavg"
#: Kinds of strategies that give no model of a federation, and what they give. Plug-ins add theirs.
BOUNDS: dict[str, str] = {}
#: The scope of rows about the global model on the test rows, and the start of that of a client's rows.
CENTRAL, OF_CLIENT = "central", "client:"
#: Largest number of seeds that is worth naming.
MOST_SEEDS = 100
LOWER_IS_BETTER = frozenset({"loss", "calibrated_loss", "ece", "perplexity", "pseudo_perplexity"})
#: Units of metrics. Other metrics are shares from 0 to 1.
UNITS = {
    "loss": "nats",
    "calibrated_loss": "nats",
    "ece": "expected calibration error, 0 to 1",
    "perplexity": "from 1 up",
    "pseudo_perplexity": "from 1 up",
    "matthews": "-1 to 1",
    "pearson": "-1 to 1",
    "spearman": "-1 to 1",
}
#: Largest difference of metrics between models that differ only by the order of float32 sums.
ROUNDING = 1e-6
#: A model has learned if its accuracy or macro F1 exceeds that of naming one class by more than this.
LEARNED = 0.02
#: A strategy is cheaper if it sends at most this share of the other's bytes.
CHEAPER = 0.99


@dataclass(frozen=True)
class Paired:
    """Ours minus theirs over ``n`` seeds: mean, two-sided 95 % t interval and verdict.

    The interval is NaN with fewer than two seeds. The verdict is "better" or "worse", "within noise" if
    the interval contains 0, "same" if no difference is above ``ROUNDING``, "not finite", "no interval"
    with one seed or if all seeds have the same difference, or "no seed in common". ``ours`` and
    ``theirs`` are the means over these seeds, NaN if unknown.
    """

    mean: float
    ci_low: float
    ci_high: float
    n: int
    verdict: str
    ours: float = math.nan
    theirs: float = math.nan

    @property
    def smallest(self) -> float:
        """The smallest mean difference that is outside noise at this spread; NaN without an interval."""
        return (self.ci_high - self.ci_low) / 2

    @property
    def seeds_needed(self) -> int | None:
        """The smallest number of seeds whose interval excludes 0, for this mean and spread.

        None if it is above ``MOST_SEEDS``, or unknown without an interval.
        """
        from scipy import stats

        if math.isnan(self.smallest):
            return None
        counts = np.arange(2, MOST_SEEDS + 1)
        ours, theirs = (stats.t.ppf(0.975, n - 1) / np.sqrt(n) for n in (self.n, counts))
        enough = counts[theirs / ours * self.smallest < abs(self.mean)]
        return int(enough[0]) if len(enough) else None


def paired_difference(differences: Sequence[float], *, lower_is_better: bool = False) -> Paired:
    """Return the mean of differences, the interval mean ± t(0.975, n - 1) sd / sqrt(n), and verdict."""
    from scipy import stats

    n = len(differences)
    if n == 0:
        return Paired(math.nan, math.nan, math.nan, 0, "no seed in common")
    if not np.isfinite(differences).all():
        return Paired(math.nan, math.nan, math.nan, n, "not finite")
    mean = float(np.mean(differences))
    if max(map(abs, differences)) <= ROUNDING:
        return Paired(mean, math.nan, math.nan, n, "same")
    if n == 1 or np.std(differences, ddof=1) <= ROUNDING * abs(mean):
        return Paired(mean, math.nan, math.nan, n, "no interval")
    low, high = map(float, stats.ttest_1samp(differences, 0.0).confidence_interval(0.95))
    verdict = "better" if (mean < 0) == lower_is_better else "worse"
    return Paired(mean, low, high, n, "within noise" if low <= 0 <= high else verdict)


def compare_seeds(ours: Mapping[int, float], theirs: Mapping[int, float], metric: str) -> Paired:
    """Return the difference ``ours`` minus ``theirs`` over common seeds; values are by seed."""
    common = [seed for seed in ours if seed in theirs]
    differences = [ours[seed] - theirs[seed] for seed in common]
    found = paired_difference(differences, lower_is_better=metric in LOWER_IS_BETTER)
    if not common:
        return found
    means = (float(np.mean([values[seed] for seed in common])) for values in (ours, theirs))
    return replace(found, ours=next(means), theirs=next(means))


def described(metric: str) -> str:
    """Return a metric's name with unit and direction: ``loss (nats, lower is better)``."""
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    return f"{metric} ({UNITS.get(metric, '0 to 1')}, {better} is better)"


@dataclass(frozen=True)
class Standing:
    """A strategy's results after its last round, compared with the reference.

    Attributes:
        about: the strategy in the configuration: its kind, ``code`` to copy, and what it ``says``.
        values: metric -> seed -> value of the global model on the test rows.
        worst: the headline metric of the worst client on its held-out rows, mean over seeds.
        traffic, requests: bytes of all messages and their number, mean over seeds. NaN if unknown.
        against: metric -> difference from the reference.
        judgement: of the differences in the judged metrics, see ``judgement``.
    """

    name: str
    about: Row
    values: Mapping[str, Mapping[int, float]]
    worst: float
    traffic: float
    requests: float
    against: Mapping[str, Paired] = field(default_factory=dict)
    judgement: str = ""

    @property
    def bound(self) -> str:
        """What a strategy gives that gives no model of a federation; empty for others."""
        return BOUNDS.get(str(self.about.get("kind", self.name)), "")

    @property
    def seeds(self) -> int:
        """The number of seeds with results."""
        return max(map(len, self.values.values()))

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over seeds; NaN if the strategy lacks it."""
        return float(np.mean([*self.values.get(metric, {0: math.nan}).values()]))

    def compared(self, other: Standing, judged: Sequence[str]) -> Standing:
        """Return these results compared with another strategy's."""
        against = {m: compare_seeds(own, other.values.get(m, {}), m) for m, own in self.values.items()}
        none = paired_difference([])
        verdict = judgement(against.get(metric, none) for metric in judged)
        return replace(self, against=dict.fromkeys(judged, none) | against, judgement=verdict)


@dataclass(frozen=True)
class Verdict:
    """All strategies of an experiment, and the recommended one.

    Attributes:
        metrics: central metrics in the order of the rows, the headline metric first, the loss last.
        judged: the metrics that decide: the headline metric, macro F1 beside accuracy, the loss. The
            last one ranks.
        standings: strategies with results, in the experiment's order.
        reference: the strategy that others are compared with.
        recommended: the strategy to use; the reference if no other one is better beyond noise.
        best: the best strategy. The recommended one is another if that is cheaper, and within noise.
        most_frequent: share of the largest class of the clients' rows; NaN without classes.
        learned: whether a strategy has learned more than to name the most frequent class.
    """

    experiment: str
    metrics: Sequence[str]
    judged: Sequence[str]
    standings: Sequence[Standing]
    reference: Standing
    recommended: Standing
    best: Standing
    most_frequent: float
    learned: bool


def judgement(differences: Iterable[Paired]) -> str:
    """Return better, worse, mixed (both, by metric), same, diverged or undecided."""
    found = {difference.verdict for difference in differences}
    if "not finite" in found:
        return "diverged"
    if found <= {"same"}:
        return "same"
    decided = found & {"better", "worse"}
    return "mixed" if len(decided) == 2 else (*decided, "undecided")[0]


def verdicts_of(run: Run) -> list[Verdict]:
    """Return the verdicts of all experiments with results, in the order of the configuration."""
    known = (str(experiment.get("name", "")) for experiment in run.experiments)
    names = dict.fromkeys([*known, *(str(row["experiment"]) for row in run.rows)])
    return [found for name in names if (found := verdict(run, name)) is not None]


def verdict(run: Run, experiment: str) -> Verdict | None:
    """Return the strategies of an experiment, compared, and the recommended one; None without results.

    The reference is FedAvg, else the first strategy that gives a model, of those with finite values. A
    strategy is better if one of the judged metrics is better beyond noise, and none is worse. Of those,
    the one with the best mean of the ranking metric is recommended, or the cheapest one that is within
    noise of it. Joint training and strategies that give no model are never recommended.
    """
    import pandas

    columns = ["strategy", "seed", "round", "scope", "metric", "value"]
    rows = [row for row in run.rows if row["experiment"] == experiment]
    frame = pandas.DataFrame(rows, columns=columns).astype({"value": float})
    frame = frame[frame["round"] == frame.groupby("strategy")["round"].transform("max")]
    central = frame[frame["scope"] == CENTRAL]
    if central.empty:
        return None
    metrics = sorted(map(str, central["metric"].unique()), key=lambda metric: metric == "loss")
    beside = "macro_f1" if "accuracy" in metrics else "loss"
    judged = [metric for metric in dict.fromkeys([metrics[0], beside, "loss"]) if metric in metrics]
    own = [e for e in run.experiments if e.get("name") == experiment]
    about = {str(strategy["name"]): strategy for e in own for strategy in e.get("strategies", ())}
    known = dict.fromkeys(map(str, central["strategy"]))
    standings = [
        _standing(name, about.get(name, {}), frame[frame["strategy"] == name], metrics)
        for name in dict.fromkeys([*about, *known])
        if name in known
    ]
    finite = [own for own in standings if math.isfinite(own.mean(judged[-1]))] or standings
    first = min(finite, key=lambda own: (own.name != REFERENCE, bool(own.bound)))
    standings = [own.compared(first, judged) for own in standings]
    reference = next(own for own in standings if own.name == first.name)
    better = [own for own in standings if not own.bound and own.judgement == "better"]
    sign = 1 if judged[-1] in LOWER_IS_BETTER else -1
    best = min(better, key=lambda own: sign * own.against[judged[-1]].mean, default=reference)
    cheaper = [own for own in better if own.traffic < CHEAPER * best.traffic]
    ties = [own for own in cheaper if own.compared(best, judged).judgement in ("same", "undecided")]
    recommended = min(ties, key=lambda own: own.traffic, default=best)
    share, learned = _learned(run.partitions.get(experiment, {}), standings)
    return Verdict(experiment, metrics, judged, standings, reference, recommended, best, share, learned)


def _standing(name: str, about: Row, frame: DataFrame, metrics: Sequence[str]) -> Standing:
    """Return a strategy's results, not yet compared; ``frame`` has its rows of the last round."""

    def by_seed(scope: str, metric: str) -> dict[int, float]:
        own = frame[(frame["scope"] == scope) & (frame["metric"] == metric)]
        return {int(seed): float(value) for seed, value in zip(own["seed"], own["value"], strict=True)}

    def messages(metric: str) -> float:
        return float(np.mean([*by_seed("messages", metric).values()] or [math.nan]))

    values = {metric: found for metric in metrics if (found := by_seed(CENTRAL, metric))}
    clients = frame[frame["scope"].str.startswith(OF_CLIENT) & (frame["metric"] == metrics[0])]
    worst = clients.groupby("seed")["value"].agg("max" if metrics[0] in LOWER_IS_BETTER else "min")
    traffic = messages("bytes-sent") + messages("bytes-received")
    return Standing(name, about, values, float(worst.mean()), traffic, messages("requests"))


def _learned(partition: Mapping[str, Any], standings: Sequence[Standing]) -> tuple[float, bool]:
    """Return the share of the largest class, and whether a strategy knows more than to name it."""
    names, seeds = partition.get("label_names", ()), partition.get("seeds", {}).values()
    counts = sum(np.sum(seed["counts"], axis=0) for seed in seeds)
    if len(names) < 2 or not np.sum(counts):
        return math.nan, True
    share = float(np.max(counts[: len(names)]) / np.sum(counts))
    # Always naming this class has a macro F1 of 2 share / (1 + share) / classes.
    bars = {"accuracy": share, "macro_f1": 2 * share / (1 + share) / len(names)}
    below = (own.mean(metric) <= bar + LEARNED for own in standings for metric, bar in bars.items())
    return share, not all(below)
