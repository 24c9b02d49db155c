"""Means over seeds and paired differences between arms, from the rows of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

Row: TypeAlias = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)
Verdict: TypeAlias = Literal[
    "better",
    "worse",
    "within noise",
    "identical",
    "one seed: no interval",
    "no seed in common",
    "not finite",
]

CENTRAL = "central"
CONFIDENCE = 0.95
LOWER_IS_BETTER = frozenset({"loss", "perplexity", "pseudo_perplexity"})


@dataclass(frozen=True)
class Summary:
    """A metric of one arm at the final round, over ``n`` seeds; ``sd`` (n - 1) is NaN if undefined."""

    setting: str
    start: str
    arm: str
    metric: str
    n: int
    mean: float
    sd: float


@dataclass(frozen=True)
class Paired:
    """Arm minus baseline over ``n`` seeds: mean, two-sided 95 % t interval, verdict in words.

    The interval is NaN with fewer than two seeds. The verdict knows of which metrics lower is better;
    it is "within noise" if the interval contains 0, "identical" if every difference is exactly 0.
    """

    mean: float
    ci_low: float
    ci_high: float
    n: int
    verdict: Verdict


def setting_of(row: Row) -> str:
    """The setting of a row, empty if it names none."""
    return str(row.get("setting", ""))


def by_setting(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of every setting, settings in the order in which they come first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(setting_of(row), []).append(row)
    return found


def final_values(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], dict[int, float]]:
    """Central values at the final round: (setting, start, arm, metric) -> seed -> value.

    The final round is the last one any arm of the setting reached, so that an unfinished run never
    compares different rounds: seeds that are not there yet are left out. Of repeated rows the last
    counts. Keys come in the order of the rows.
    """
    central = [row for row in rows if row["scope"] == CENTRAL]
    final: dict[str, int] = defaultdict(int)
    for row in central:
        final[setting_of(row)] = max(final[setting_of(row)], int(row["round"]))
    values: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for row in central:
        if int(row["round"]) == final[setting_of(row)]:
            key = (setting_of(row), str(row["start"]), str(row["arm"]), str(row["metric"]))
            values.setdefault(key, {})[int(row["seed"])] = float(row["value"])
    return values


def metrics_in(rows: Iterable[Row]) -> list[str]:
    """Central metrics in the order of the rows, the headline first and ``loss`` last."""
    found = dict.fromkeys(str(row["metric"]) for row in rows if row["scope"] == CENTRAL)
    return sorted(found, key=lambda metric: metric == "loss")


def summarise(rows: Iterable[Row], metrics: Sequence[str] | None = None) -> list[Summary]:
    """Mean and spread over seeds at the final round, per setting, start, arm and metric.

    Args:
        rows: dictionaries with arm, start, seed, round, metric, value, scope and perhaps setting.
        metrics: which metrics; all if not given.
    """
    return [
        Summary(*key, len(by_seed), *_mean_and_sd(list(by_seed.values())))
        for key, by_seed in final_values(rows).items()
        if metrics is None or key[3] in metrics
    ]


def paired(
    rows: Iterable[Row],
    arm: str,
    baseline: str,
    metric: str,
    start: str,
    setting: str | None = None,
) -> Paired:
    """Difference ``arm`` minus ``baseline`` at the final round, over the seeds that both have.

    Args:
        setting: needed only if the rows hold more than one.

    Raises:
        ValueError: if ``setting`` is needed and not given.
    """
    values = final_values(rows)
    settings = {key[0] for key in values}
    if setting is None and len(settings) > 1:
        raise ValueError(f"the rows hold several settings, name one of {sorted(settings)}")
    where = setting if setting is not None else next(iter(settings), "")
    ours = values.get((where, start, arm, metric), {})
    return compare_seeds(ours, values.get((where, start, baseline, metric), {}), metric)


def compare_seeds(ours: Mapping[int, float], theirs: Mapping[int, float], metric: str) -> Paired:
    """Difference over the seeds that both have, given each one's values by seed."""
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return paired_difference(differences, lower_is_better=metric in LOWER_IS_BETTER)


def paired_difference(differences: Sequence[float], *, lower_is_better: bool = False) -> Paired:
    """Mean of paired differences, its interval mean ± t(0.975, n - 1) sd / sqrt(n), and verdict."""
    n = len(differences)
    if n == 0:
        return Paired(math.nan, math.nan, math.nan, 0, "no seed in common")
    if not all(map(math.isfinite, differences)):
        return Paired(math.nan, math.nan, math.nan, n, "not finite")
    if not any(differences):
        return Paired(0.0, 0.0, 0.0, n, "identical")
    mean, sd = _mean_and_sd(differences)
    if n == 1:
        return Paired(mean, math.nan, math.nan, 1, "one seed: no interval")
    from scipy import stats

    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * sd / math.sqrt(n)
    low, high = mean - half, mean + half
    if low <= 0 <= high:
        return Paired(mean, low, high, n, "within noise")
    improved = (mean < 0) if lower_is_better else (mean > 0)
    return Paired(mean, low, high, n, "better" if improved else "worse")


def removed_by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, float]:
    """Share of the squared distance to the anchor that alignment removed: 1 - after / before.

    Distances are summed over the rows with the same key first. Rows without distances (replies dropped
    ) do not count.
    """
    sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        if "before" in row:
            total = sums[key(row)]
            total[0] += float(row["before"])
            total[1] += float(row["after"])
    return {own: 1 - after / before if before > 0 else 0.0 for own, (before, after) in sums.items()}


def removed_shares(rows: Iterable[Row]) -> dict[tuple[str, str, str, str, int], float]:
    """``removed_by`` (setting, start, arm, part, layer), layers ascending."""

    def key(row: Row) -> tuple[str, str, str, str, int]:
        names = (str(row["start"]), str(row["arm"]), str(row["part"]), int(row["layer"]))
        return (setting_of(row), *names)

    return dict(sorted(removed_by(rows, key).items(), key=lambda item: item[0][-1]))


def _mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    array = np.asarray(values, dtype=np.float64)
    defined = len(array) > 1 and np.isfinite(array).all()
    return float(array.mean()), float(array.std(ddof=1)) if defined else math.nan
