"""The table of a grid that merges subsets of clients: pairs, and models added one by
one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedrot.simulations.data.texts import UNSEEN, metric_of
from fedrot.simulations.report.tables import Table
from fedrot.simulations.run_folder import Row, Run
from fedrot.simulations.summary import CENTRAL

HEADER = (
    "experiment",
    "strategy",
    "merged",
    "subsets",
    "own F1",
    "against own",
    "unseen F1",
    "grown",
)
#: Fields in which strategies for different subsets differ.
OF_SUBSET = frozenset({"name", "clients", "code", "says"})
TEXT = (
    "Macro F1 (0 to 1, higher is better) of merged models, means over subsets and ± "
    "over seeds: on the domains of the merged clients; its relative change against "
    "each domain's own client; on domains that nobody trained on; and there, of the "
    'clients that are best by themselves ("grown").'
)


class _Place(NamedTuple):
    """A line of the table."""

    experiment: str
    strategy: str
    size: int


@dataclass(frozen=True)
class SubsetTable:
    """Merged subsets of clients with domains of their own, after the last round; means
    over seeds ± sd.

    ``lines`` have, by strategy and number of merged clients: how many subsets; the mean
    macro F1 on the subset's own domains; the mean relative change against each domain's
    own client alone (Jin et al. 2023, Figure 3); the mean macro F1 on unseen domains
    (Table 7); and that of the subset with the clients that are best there by themselves
    (Figure 6). Strategies of one client are the clients alone.
    """

    lines: list[list[str]]

    def blocks(self) -> list[Table]:
        """Return a table per experiment and strategy."""
        found: dict[tuple[str, ...], list[list[str]]] = {}
        for line in self.lines:
            found.setdefault(tuple(line[:2]), []).append(
                [f"{line[2]} ({line[3]} subsets)", *line[4:]]
            )
        header = ("merged", *HEADER[4:])
        return [
            Table(", ".join(place), header, own, header[:1])
            for place, own in found.items()
        ]


def subset_table(run: Run) -> SubsetTable | None:
    """Return the table of subsets; None if no experiment merges subsets of clients with
    domains.
    """
    found: dict[_Place, dict[int, list[np.ndarray]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for name, experiment in run.experiments.items():
        domains, strategies = _domains(experiment), experiment["strategies"].values()
        merged = _scores(
            [row for row in run.rows if row["experiment"] == name] if domains else []
        )
        alone: dict[int, dict[int, _Metrics]] = defaultdict(dict)
        for strategy in strategies:
            for seed, metrics in merged[str(strategy["name"])].items():
                if len(strategy.get("clients", ())) == 1:
                    alone[seed][int(strategy["clients"][0])] = metrics
        labels: dict[str, str] = {}
        for strategy in strategies:
            method = json.dumps(
                {k: v for k, v in strategy.items() if k not in OF_SUBSET},
                sort_keys=True,
            )
            label = labels.setdefault(method, str(strategy["name"]))
            clients = tuple(strategy.get("clients") or range(len(domains)))
            for seed, metrics in merged[str(strategy["name"])].items():
                if len(clients) > 1 and alone[seed].keys() >= set(
                    clients
                ):  # others are not finished
                    place = _Place(name, label, len(clients))
                    found[place][seed].append(
                        _line(clients, domains, metrics, alone[seed])
                    )
    lines = [
        [
            *place[:2],
            f"{place.size}",
            f"{max(map(len, by_seed.values()))}",
            *_shown(by_seed),
        ]
        for place, by_seed in sorted(found.items())
    ]
    return SubsetTable(lines) if lines else None


def _domains(experiment: Mapping[str, Any]) -> list[str]:
    """Return the domain of every client; none if clients are not merged once, by domain
    and subset.
    """
    names = sorted(name.strip() for name in str(experiment.get("data")).split(","))
    each = (
        experiment.get("partition") == "column:domain"
        and experiment.get("clients") == len(names) > 1
    )
    subsets = any(
        strategy.get("clients") for strategy in experiment["strategies"].values()
    )
    return names if each and subsets and experiment.get("rounds") == 1 else []


_Metrics: TypeAlias = dict[str, float]


def _scores(rows: Sequence[Row]) -> dict[str, dict[int, _Metrics]]:
    """Return the metrics of the models after the round: strategy -> seed -> metric."""
    merged: dict[str, dict[int, _Metrics]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if int(row["round"]) == 1 and row["scope"] == CENTRAL:
            merged[str(row["strategy"])][int(row["seed"])][str(row["metric"])] = float(
                row["value"]
            )
    return merged


def _line(
    clients: tuple[int, ...],
    domains: Sequence[str],
    merged: Mapping[str, float],
    alone: Mapping[int, Mapping[str, float]],
) -> np.ndarray:
    """Return own F1, its relative change, unseen F1, and the latter again if the best
    are merged.
    """
    names = [metric_of(domains[client]) for client in clients]
    own = np.array([merged.get(name, np.nan) for name in names])
    before = np.array(
        [alone[c].get(name, np.nan) for c, name in zip(clients, names, strict=True)]
    )
    unseen = merged.get(UNSEEN, np.nan)
    order = sorted(alone, key=lambda client: -alone[client].get(UNSEEN, np.nan))
    best = set(order[: len(clients)]) == set(clients)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.where(before > 0, own / before - 1, np.nan)
    return np.array([own.mean(), _mean(change), unseen, unseen if best else np.nan])


def _shown(by_seed: Mapping[int, Sequence[np.ndarray]]) -> list[str]:
    """Return the four numbers as text, with their spread over seeds."""
    of_seeds = np.array(
        [[_mean(column) for column in np.array(lines).T] for lines in by_seed.values()]
    )
    shown = []
    for column, style in zip(of_seeds.T, (".3f", "+.1%", ".3f", ".3f"), strict=True):
        known = column[~np.isnan(column)]
        spread = f" ± {known.std(ddof=1):{style.lstrip('+')}}" if len(known) > 1 else ""
        shown.append(f"{known.mean():{style}}{spread}" if len(known) else "-")
    return shown


def _mean(values: np.ndarray) -> float:
    """Return the mean of the known values; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan
