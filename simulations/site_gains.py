"""What strategies give the sites on their own test rows, beside each site alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedrot.simulations.paired import LOWER_IS_BETTER, Paired, paired_difference
from fedrot.simulations.run_folder import Row

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: The starts of the scopes of rows about a site's own test rows: by its own model, by
#: the global model, and by alone (head).
OWN, GLOBAL, ALONE = "own:", "own-global:", "own-alone:"
#: The metric of how many test rows a site has.
TEST_ROWS = "test-rows"
#: Figures of sites with fewer test rows are marked.
FEW_ROWS = 20
#: Headline metrics that a site's own model does not change; the loss replaces them.
_CORRELATIONS = {"pearson", "spearman"}
#: The two ways to be alone: a fitted head, and training.
_HEAD, _TRAINED = "alone (head)", "alone (trained)"


@dataclass(frozen=True, eq=False)
class SiteGain:
    """What one strategy, or alone, is worth at the sites.

    Attributes:
        values: the metric of each site's own model, by site, mean over seeds.
        everywhere: the same of the global model, mean over sites; NaN without one.
        worst: the site with the worst value.
        differences: from alone, by site.
        against: their mean over sites, paired over seeds; of one seed, over sites.
        better, worse: numbers of sites that are better, or worse, than alone.
    """

    values: Series[float]
    everywhere: float
    worst: str
    differences: Series[float]
    against: Paired
    better: int
    worse: int


@dataclass(frozen=True)
class SiteGains:
    """What strategies give the sites, in a metric.

    Attributes:
        sign: -1 if lower values are better, else 1.
        alone: the stronger of alone (head) and alone (trained), by the mean over sites.
        gains: by name, first of the two, as far as there are.
        rows: test rows by site.
        over: what the intervals are over: ``3 seeds``, ``5 sites``.
    """

    metric: str
    sign: int
    alone: str
    gains: Mapping[str, SiteGain]
    rows: Series[float]
    over: str

    def mean(self, name: str) -> float:
        """Return a strategy's mean over sites; higher is better."""
        return self.sign * float(self.gains[name].values.mean())

    def pairs(self, name: str) -> dict[str, tuple[float, float]]:
        """Return by site the values of alone and of a strategy."""
        before, after = self.gains[self.alone].values, self.gains[name].values
        return {str(site): (before[site], after[site]) for site in after.index}


def gains_of(frame: DataFrame, experiment: Row, headline: str) -> SiteGains | None:
    """Return what strategies give the sites; None if alone is unknown.

    Sites of a division that is drawn are others for each seed.

    Args:
        frame: rows of the last rounds, each once.
        experiment: as in ``config.json``.
        headline: the headline metric.
    """
    metric = "loss" if headline in _CORRELATIONS else headline
    sign = -1 if metric in LOWER_IS_BETTER else 1
    table = frame.join(frame["scope"].str.extract("^(?P<of>own.*?:)(?P<site>(?s:.*))"))
    table = table.dropna(subset="of")
    seeds = table["seed"].nunique()
    if seeds > 1 and not experiment.get("partition", "").startswith("column"):
        table["site"] += " (seed " + table["seed"].astype(str) + ")"
    for about in experiment["strategies"].values():
        if about.get("kind") == "alone":
            table = table.replace({"strategy": {about["name"]: _TRAINED}})
    table.loc[table["of"] == ALONE, "strategy"] = _HEAD
    rows = table[table["metric"] == TEST_ROWS].groupby("site")["value"].min()
    table = table[table["metric"] == metric].drop_duplicates(
        ["of", "strategy", "seed", "site"]
    )
    everywhere = table[table["of"] == GLOBAL].groupby("strategy")["value"].mean()
    grid = table[table["of"] != GLOBAL].pivot(
        index=["seed", "site"], columns="strategy", values="value"
    )
    ways = [name for name in (_HEAD, _TRAINED) if name in grid]
    if not ways:
        return None
    alone = max(ways, key=lambda name: sign * grid[name].mean())
    differences = grid.sub(grid[alone], axis="index")
    units = differences.groupby("seed" if seeds > 1 else "site").mean()
    differences = differences.groupby("site").mean()
    grid = grid.groupby("site").mean()
    gains = {}
    for name in filter(grid.__contains__, [*ways, *experiment["strategies"]]):
        signed = sign * differences[name]
        gains[name] = SiteGain(
            values=grid[name],
            everywhere=everywhere.get(name, float("nan")),
            worst=str((sign * grid[name]).fillna(float("-inf")).idxmin()),
            differences=differences[name],
            against=paired_difference(
                [*units[name].dropna()], lower_is_better=sign < 0
            ),
            better=int((signed > 0).sum()),
            worse=int((signed < 0).sum()),
        )
    over = f"{seeds} seeds" if seeds > 1 else f"{len(rows)} sites"
    return SiteGains(metric, sign, alone, gains, rows, over)
