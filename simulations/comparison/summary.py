"""Results of an experiment over its seeds, and the recommended strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.simulations.comparison.paired import (
    LOWER_IS_BETTER,
    Paired,
    paired_difference,
)
from fedrot.simulations.comparison.site_gains import SiteGains, gains_of
from fedrot.simulations.run_folder import FIELDS, Row, Run
from fedrot.strategies.reporting.verdict import HEAD_FAILED

if TYPE_CHECKING:
    from pandas import DataFrame

#: The strategy that others are compared with, where it has results.
REFERENCE = "fedavg"
#: Kinds of strategies that give no model of a federation, and what they give instead.
#: Plug-ins add theirs.
BOUNDS: dict[str, str] = {}
#: The scope of rows about the global model on the test rows.
CENTRAL = "central"
#: The start of the scope of rows about a client.
OF_CLIENT = "client:"
#: A model has learned if its accuracy or macro F1 exceeds that of naming one class by
#: more than this.
LEARNED = 0.02
#: Verdicts on differences that decide nothing, with an interval or without need of one.
NOISE = {"same", "within noise"}
#: Fewer seeds do not show what is noise.
ENOUGH_SEEDS = 3
#: A strategy is cheaper if another one's messages have so many times its bytes.
CHEAPER = 1.1
#: The largest usual learning rate where AdamW trains all layers of a pretrained model.
USUAL_RATE = 1e-4


def span(values: Collection[Any], as_text: Callable[[Any], str] = str) -> str:
    """Return the smallest and largest value: ``3 to 5``, ``3`` if they are equal."""
    ends = (min(values), max(values))
    return " to ".join(dict.fromkeys(map(as_text, ends)))


@dataclass(frozen=True, eq=False)
class Standing:
    """A strategy's results after its last round, compared with the reference.

    Attributes:
        about: the strategy in the configuration: its kind, ``code`` to copy, and what
            it ``says``.
        values: metrics of the global model on the test rows, [seeds, metrics].
        megabytes, requests: size of all messages and their number, mean over seeds. NaN
            if unknown.
        against: metric -> difference from the reference.
        unfitted: number of seeds in which the last task head could not be fitted.
    """

    name: str
    about: Row
    values: DataFrame
    megabytes: float
    requests: float
    against: dict[str, Paired] = field(default_factory=dict)
    unfitted: int = 0

    @property
    def bound(self) -> str:
        """What a strategy without a model of a federation gives; empty for others."""
        return BOUNDS.get(str(self.about.get("kind", self.name)), "")

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over seeds; NaN if the strategy lacks it."""
        if metric not in self.values:
            return nan
        return self.values[metric].mean(skipna=False)

    @property
    def judgement(self) -> str:
        """better, worse, mixed (both, by metric), same, diverged or undecided."""
        verdicts = {pair.verdict for pair in self.against.values()}
        decided = verdicts & {"better", "worse"}
        if "not finite" in verdicts:
            return "diverged"
        if len(decided) == 2:
            return "mixed"
        if decided:
            return decided.pop()
        if verdicts == {"same"}:
            return "same"
        return "undecided"

    @property
    def clear(self) -> list[str]:
        """The judged metrics that differ from the reference's beyond noise."""
        return [
            metric
            for metric, pair in self.against.items()
            if pair.verdict in ("better", "worse")
        ]

    def difference(self, other: Standing, metric: str) -> Paired:
        """Return the difference from another strategy in a metric."""
        # Only seeds that both have are paired.
        ours, others = self.values.align(other.values, join="inner")
        differences = [*(ours - others).get(metric, ())]
        return paired_difference(differences, lower_is_better=metric in LOWER_IS_BETTER)


@dataclass(frozen=True)
class Verdict:
    """All strategies of an experiment, and the recommended one.

    Attributes:
        metrics: central metrics in the order of the rows, the headline metric first,
            the loss last.
        judged: the metrics that decide: the headline metric, macro F1 beside accuracy,
            the loss. The last one ranks.
        standings: strategies with results, in the experiment's order.
        models: those that give a model of a federation.
        reference: the strategy that others are compared with.
        best: the strategy with the best mean of those that are better than the
            reference; the reference if no other one is better beyond noise.
        recommended: the strategy to use: the cheapest one within noise of ``best``.
        scored: which classes have no test row, if any.
        notes: see ``notes_of``.
        most_frequent: share of the largest class of the clients' rows; NaN without
            classes.
        learned: whether a strategy has learned more than to name the most frequent
            class.
        sites: what strategies give the sites on their own test rows; None if unknown.
    """

    experiment: str
    metrics: Sequence[str]
    judged: Sequence[str]
    standings: Sequence[Standing]
    models: Sequence[Standing]
    reference: Standing
    best: Standing
    recommended: Standing
    scored: str
    notes: Sequence[str]
    most_frequent: float
    learned: bool
    sites: SiteGains | None

    @property
    def undecided(self) -> bool:
        """Whether nothing is better beyond noise, and no comparison has three seeds."""
        if self.recommended is not self.reference or len(self.standings) < 2:
            return False
        return all(
            standing.against[self.judged[0]].n < ENOUGH_SEEDS
            for standing in self.standings
            if standing is not self.reference
        )

    @property
    def for_sites(self) -> Standing | None:
        """The strategy whose gain for the sites is told; None if that is unknown.

        It is the recommended one. As long as nothing is decided, it is the best one on
        the sites' own rows.
        """
        sites = self.sites
        if sites is None or not sites.alone:
            return None
        choice = self.standings if self.undecided else [self.recommended]
        known = [standing for standing in choice if standing.name in sites.gains]
        worth = sites.gains.mean()
        return max(known, key=lambda standing: worth[standing.name], default=None)

    @property
    def code(self) -> str:
        """The recommended strategy's line of code.

        It is empty if nothing was learned or is decided.
        """
        if self.undecided or not self.learned:
            return ""
        return self.recommended.about.get("code", "")

    @property
    def seeds(self) -> str:
        """The number of seeds in words: ``5 seeds``, ``3 to 5 seeds``."""
        counts = [len(standing.values) for standing in self.standings]
        noun = "seeds" if max(counts) > 1 else "seed"
        return f"{span(counts)} {noun}"


def verdicts_of(run: Run) -> list[Verdict]:
    """Return the verdicts of all experiments with results, in their order."""
    return [*filter(None, (verdict(run, name) for name in run.experiments))]


def verdict(run: Run, name: str) -> Verdict | None:
    """Return the strategies of an experiment, compared; None without results.

    The reference is FedAvg, else the first strategy that gives a model, of those with
    finite values. A strategy is better if one of the judged metrics is better beyond
    noise, and none is worse. Of those, one has the best mean of the ranking metric. The
    cheapest strategy within noise of it is recommended, which is also better than the
    reference, if this one is. Joint training and strategies that give no model are
    never recommended.
    """
    frame = _last_rounds([row for row in run.rows if row["experiment"] == name])
    central = frame[frame["scope"] == CENTRAL]
    if central.empty:
        return None
    metrics = sorted(central["metric"].unique(), key=lambda metric: metric == "loss")
    headline = metrics[0]
    beside = "macro_f1" if "accuracy" in metrics else "loss"
    judged = [metric for metric in metrics if metric in (headline, beside, "loss")]
    ranking = judged[-1]
    experiment = run.experiments[name]
    standings = []
    for about in experiment["strategies"].values():
        rows = frame[frame["strategy"] == about["name"]]
        if CENTRAL in {*rows["scope"]}:
            standings.append(_standing(about, rows))
    finite = [standing for standing in standings if isfinite(standing.mean(ranking))]
    reference = min(
        finite or standings,
        key=lambda standing: (standing.name != REFERENCE, bool(standing.bound)),
    )
    for standing in standings:
        for metric in judged:
            standing.against[metric] = standing.difference(reference, metric)
    models = [standing for standing in standings if not standing.bound]
    better = [standing for standing in models if standing.judgement == "better"]
    sign = 1 if ranking in LOWER_IS_BETTER else -1
    best = min(
        better,
        key=lambda standing: sign * standing.against[ranking].mean,
        default=reference,
    )
    cheaper = [
        standing
        for standing in better or models
        if standing.megabytes * CHEAPER <= best.megabytes
        and len(standing.values) >= ENOUGH_SEEDS
        and {standing.difference(best, metric).verdict for metric in judged} <= NOISE
    ]
    recommended = min(cheaper, key=lambda standing: standing.megabytes, default=best)
    most_frequent, learned = _learned(experiment, standings)
    return Verdict(
        experiment=name,
        metrics=metrics,
        judged=judged,
        standings=standings,
        models=models,
        reference=reference,
        best=best,
        recommended=recommended,
        scored=experiment.get("scored", ""),
        notes=[*notes_of(experiment)],
        most_frequent=most_frequent,
        learned=learned,
        sites=gains_of(frame, experiment),
    )


def _last_rounds(rows: Sequence[Row]) -> DataFrame:
    """Return the rows of each strategy's last round; a repeated row replaces others."""
    import pandas

    frame = pandas.DataFrame(rows, columns=FIELDS).astype({"value": float})
    last = frame.groupby("strategy")["round"].transform("max")
    frame = frame[frame["round"] == last]
    return frame.drop_duplicates(["strategy", "seed", "scope", "metric"], keep="last")


def _standing(about: Row, frame: DataFrame) -> Standing:
    """Return a strategy's results, not yet compared.

    ``frame`` has its rows of the last round.
    """
    table = frame.pivot(index="seed", columns=["scope", "metric"], values="value")
    names = ("bytes-sent", "bytes-received", "requests")
    columns = [("messages", name) for name in names]
    sent, received, requests = table.reindex(columns=columns).mean()
    return Standing(
        name=about["name"],
        about=about,
        values=table[CENTRAL],
        megabytes=(sent + received) / 1e6,
        requests=requests,
        unfitted=int(table.sum().get(("round", HEAD_FAILED), 0)),
    )


def notes_of(experiment: Row) -> Iterator[str]:
    """Yield what to know of an experiment, as in ``config.json``, without a full stop.

    A learning rate above ``USUAL_RATE`` is for small new models, and for adapters.
    """
    if experiment.get("model") and not experiment["lora"]:
        strategies = experiment["strategies"].values()
        rate = max(table["learning_rate"] or experiment["lr"] for table in strategies)
        if rate > USUAL_RATE:
            yield (
                f"Learning rate {rate:g} is high for a pretrained model: where AdamW "
                "trains all layers, 2e-5 to 1e-4 are usual. The default, 1e-3, fits "
                "small models from scratch, and is the same with a pretrained one. Try "
                "--set lr=5e-5"
            )


def _learned(experiment: Row, standings: Sequence[Standing]) -> tuple[float, bool]:
    """Return the share of the largest class, and whether a strategy knows more.

    To know more is to be better than to name this class always.
    """
    classes = len(experiment["label_names"])
    counts = sum(np.sum(counts, axis=0) for counts in experiment["seeds"].values())
    if classes < 2 or not np.sum(counts):
        return nan, True
    share = np.max(counts[:classes]) / np.sum(counts)
    # Always naming this class has a macro F1 of 2 share / (1 + share) / classes.
    bars = {"accuracy": share, "macro_f1": 2 * share / (1 + share) / classes}
    # An unknown mean is NaN, and NaN is not below.
    below = all(
        standing.mean(metric) <= bar + LEARNED
        for standing in standings
        for metric, bar in bars.items()
    )
    return share, not below
