"""``SiteGains``: values of the sites' own models, and how much better than alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nan
from typing import TYPE_CHECKING

from fedrot.simulations.comparison.paired import ROUNDING, Paired, paired_difference
from fedrot.simulations.run_folder import Row
from fedrot.strategies.fitting.sites import HEADS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: The start of the scope of rows about a site's own test rows.
OF_SITE = "site:"
#: The starts of metrics there, heads of ``report_sites``: alone (head), that of the
#: global model, and the site's own.
ALONE, GLOBAL, OWN = HEADS
#: The metric of how many test rows a site has.
TEST_ROWS = "test-rows"
#: Figures of sites with fewer test rows are marked.
FEW_ROWS = 20
#: The two ways to be alone: a fitted head, and training.
_HEAD, _TRAINED = "alone (head)", "alone (trained)"


@dataclass(frozen=True, eq=False)
class SiteGains:
    """What strategies, and alone, are worth at the sites, in a metric.

    Attributes:
        sign: -1 if lower values are better, else 1.
        alone: the stronger of alone (head) and alone (trained), by the mean over sites;
            empty if both are unknown.
        values: of each site's own model, [sites, names], mean over seeds. First of the
            names are the two ways alone, as far as there are.
        gains: how much better than alone that is, [sites, names]; negative is worse.
        of_all: values of global models, by name, mean over sites.
        against: differences from alone, by name, paired over seeds; of one seed, over
            sites.
        over: what the intervals are over: ``3 seeds``, ``5 sites``.
        rows: test rows by site.
    """

    metric: str
    sign: int
    alone: str
    values: DataFrame
    gains: DataFrame
    of_all: Series[float]
    against: Mapping[str, Paired]
    over: str
    rows: Series[float]

    def worst(self, name: str) -> str:
        """Return the site with the worst value."""
        return str((self.sign * self.values[name]).fillna(-inf).idxmin())

    def better(self, name: str) -> str:
        """Return how many sites are better than alone: ``3 of 5``."""
        gains = self.gains[name]
        return f"{(gains > ROUNDING).sum()} of {len(gains)}"

    def pairs(self, name: str) -> dict[str, list[float]]:
        """Return by site the values of alone and of a strategy."""
        return self.values[[self.alone, name]].T.to_dict("list")


def gains_of(frame: DataFrame, experiment: Row) -> SiteGains | None:
    """Return what strategies give the sites; None without rows of sites.

    Sites of a division that is drawn are others for each seed.

    Args:
        frame: rows of the last rounds, each once.
        experiment: as in ``config.json``.
    """
    frame = frame[frame["scope"].str.startswith(OF_SITE)]
    sites = frame["scope"].str.removeprefix(OF_SITE)
    seeds = frame["seed"].nunique()
    if seeds > 1 and not experiment.get("partition", "").startswith("column"):
        sites += " (seed " + frame["seed"].astype(str) + ")"
    table = frame.assign(site=sites).pivot(
        index=["seed", "site"], columns=["metric", "strategy"], values="value"
    )
    if TEST_ROWS not in table:
        return None
    sign, metric = (1, "accuracy") if f"{OWN}-accuracy" in table else (-1, "loss")
    strategies = experiment["strategies"]
    trained = [name for name in strategies if strategies[name].get("kind") == "alone"]
    of_sites = table[f"{OWN}-{metric}"].rename(
        columns=dict.fromkeys(trained[:1], _TRAINED)
    )
    if f"{ALONE}-{metric}" in table:
        # One strategy has measured it for all.
        of_sites[_HEAD] = table[f"{ALONE}-{metric}"].mean(axis=1)
    of_sites = of_sites[
        [name for name in (_HEAD, _TRAINED, *strategies) if name in of_sites]
    ]
    ways = of_sites.columns.intersection([_HEAD, _TRAINED])
    alone = max(ways, key=lambda name: sign * of_sites[name].mean(), default="")
    differences = of_sites.sub(of_sites.get(alone, nan), axis="index")
    units = differences.groupby("seed" if seeds > 1 else "site").mean()
    values = of_sites.groupby("site").mean()
    against = {
        name: paired_difference([*units[name].dropna()], lower_is_better=sign < 0)
        for name in of_sites
    }
    gains = sign * differences.groupby("site").mean()
    of_all = table[f"{GLOBAL}-{metric}"].mean()
    over = f"{seeds} seeds" if seeds > 1 else f"{len(values)} sites"
    rows = table[TEST_ROWS].min(axis=1).groupby("site").min()
    return SiteGains(metric, sign, alone, values, gains, of_all, against, over, rows)
