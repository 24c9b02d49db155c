"""Means over seeds and paired differences between arms, from the rows of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedrot.simulations.federation.run_folder import CENTRAL

Row: TypeAlias = Mapping[str, Any]

BASELINE = "plain"
CONFIDENCE = 0.95
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


class Place(NamedTuple):
    """A setting, start, arm and metric."""

    setting: str
    start: str
    arm: str
    metric: str


@dataclass(frozen=True)
class Paired:
    """Arm minus baseline over ``n`` seeds: mean, two-sided 95 % t interval, verdict and p-value.

    The interval is NaN with fewer than two seeds. The verdict is "better" or "worse", "within noise" if
    the interval contains 0, "identical" if all differences are 0, "equal but for rounding" if none is
    above ``ROUNDING``, "not finite", "one seed: no interval", "no spread: no interval" if all seeds
    have the same difference, or "no seed in common". ``p`` is the p-value of the paired t test: 1 if no
    difference is above ``ROUNDING``, NaN without an interval. ``ours`` and ``theirs`` are the means of
    arm and baseline over these seeds, NaN if unknown.
    """

    mean: float
    ci_low: float
    ci_high: float
    n: int
    verdict: str
    p: float = math.nan
    ours: float = math.nan
    theirs: float = math.nan

    @property
    def smallest(self) -> float:
        """The smallest mean difference that is outside noise at this spread; NaN without an interval."""
        return (self.ci_high - self.ci_low) / 2


@dataclass(frozen=True)
class Result:
    """A metric of an arm at the final round, over ``n`` seeds; ``sd`` (n - 1) is NaN if undefined.

    ``difference`` is arm minus baseline; None for the baseline itself, and without a baseline.
    """

    place: Place
    n: int
    mean: float
    sd: float
    difference: Paired | None = None


def setting_of(row: Row) -> str:
    """Return the setting of a row; empty if the row has none."""
    return str(row.get("setting", ""))


def by_setting(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows by setting, in the order of the settings' first rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(setting_of(row), []).append(row)
    return found


def final_values(rows: Iterable[Row]) -> dict[Place, dict[int, float]]:
    """Return the central values at the final round, by place and seed.

    The final round is the last round of any arm of the setting. Seeds without this round are left out.
    If a row is repeated, the last one is used. Keys are in the order of the rows.
    """
    import pandas

    columns = [*Place._fields, "scope", "round", "seed", "value"]
    frame = pandas.DataFrame([{"setting": "", **row} for row in rows], columns=columns)
    central = frame[frame["scope"] == CENTRAL]
    last = central.groupby("setting")["round"].transform("max")
    places = central[central["round"] == last].groupby([*Place._fields], sort=False)
    return {Place(*place): own.set_index("seed")["value"].to_dict() for place, own in places}


def metrics_in(rows: Iterable[Row]) -> list[str]:
    """Return the central metrics in the order of the rows: the headline first, ``loss`` last."""
    found = dict.fromkeys(str(row["metric"]) for row in rows if row["scope"] == CENTRAL)
    return sorted(found, key=lambda metric: metric == "loss")


def headline(rows: Sequence[Row]) -> list[str]:
    """Return the headline metrics of all settings, and the loss."""
    first = [metric for own in by_setting(rows).values() for metric in metrics_in(own)[:1]]
    return list(dict.fromkeys([*first, *metrics_in(rows)[-1:]]))


def described(metric: str) -> str:
    """Return a metric's name with unit and direction: ``loss (nats, lower is better)``."""
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    return f"{metric} ({UNITS.get(metric, '0 to 1')}, {better} is better)"


def results(rows: Iterable[Row]) -> list[Result]:
    """Return every arm's metrics at the final round.

    Args:
        rows: dictionaries with arm, start, seed, round, metric, value, scope and optionally setting.
    """
    values, found = final_values(rows), []
    for place, own in values.items():
        score = Result(place, len(own), *_mean_and_sd(list(own.values())))
        theirs = values.get(place._replace(arm=BASELINE))
        if place.arm != BASELINE and theirs is not None:
            score = replace(score, difference=compare_seeds(own, theirs, place.metric))
        found.append(score)
    return found


def compare_seeds(ours: Mapping[int, float], theirs: Mapping[int, float], metric: str) -> Paired:
    """Return the difference ``ours`` minus ``theirs`` over common seeds; values are by seed."""
    common = [seed for seed in ours if seed in theirs]
    differences = [ours[seed] - theirs[seed] for seed in common]
    found = paired_difference(differences, lower_is_better=metric in LOWER_IS_BETTER)
    if not common:
        return found
    means = (float(np.mean([values[seed] for seed in common])) for values in (ours, theirs))
    return replace(found, ours=next(means), theirs=next(means))


def paired_difference(differences: Sequence[float], *, lower_is_better: bool = False) -> Paired:
    """Return the mean of differences, the interval mean ± t(0.975, n - 1) sd / sqrt(n), and verdict."""
    from scipy import stats

    n = len(differences)
    if n == 0:
        return Paired(math.nan, math.nan, math.nan, 0, "no seed in common")
    if not np.isfinite(differences).all():
        return Paired(math.nan, math.nan, math.nan, n, "not finite")
    if not any(differences):
        return Paired(0.0, 0.0, 0.0, n, "identical", 1.0)
    mean, sd = _mean_and_sd(differences)
    if max(map(abs, differences)) <= ROUNDING:
        return Paired(mean, math.nan, math.nan, n, "equal but for rounding", 1.0)
    if n == 1:
        return Paired(mean, math.nan, math.nan, 1, "one seed: no interval")
    if sd <= ROUNDING * abs(mean):
        return Paired(mean, math.nan, math.nan, n, "no spread: no interval")
    test = stats.ttest_1samp(differences, 0.0)
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    if low <= 0 <= high:
        return Paired(mean, low, high, n, "within noise", float(test.pvalue))
    improved = (mean < 0) if lower_is_better else (mean > 0)
    return Paired(mean, low, high, n, "better" if improved else "worse", float(test.pvalue))


def _mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    array = np.asarray(values, dtype=np.float64)
    defined = len(array) > 1 and np.isfinite(array).all()
    return float(array.mean()), float(array.std(ddof=1)) if defined else math.nan
