"""The table of a grid that merges subsets of clients: pairs, and models added one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedrot.simulations.data.domains import UNSEEN, metric_of
from fedrot.simulations.federation.run_folder import CENTRAL
from fedrot.simulations.report.summaries import Row
from fedrot.simulations.report.tables import Table, pipe_table

HEADER = ("setting", "start", "arm", "merged", "subsets", "own F1", "against own", "unseen F1", "grown")
TEXTS = HEADER[:3]
TEXT = (
    "Macro F1 (0 to 1, higher is better) of merged models, means over subsets and ± over seeds: on the "
    "domains of the merged clients; its relative change against each domain's own client; on domains "
    'that nobody trained on; and there, of the clients that are best by themselves ("grown").'
)


class _Place(NamedTuple):
    """A line of the table."""

    setting: str
    start: str
    arm: str
    size: int


class _Cell(NamedTuple):
    setting: str
    start: str
    seed: int


@dataclass(frozen=True)
class SubsetTable:
    """Merged subsets of clients with domains of their own, after the last round; means over seeds ± sd.

    ``lines`` have, by arm and number of merged clients: how many subsets; the mean macro F1 on the
    subset's own domains; the mean relative change against each domain's own client alone (Jin et al.
    2023, Figure 3); the mean macro F1 on unseen domains (Table 7); and that of the subset with the
    clients that are best there by themselves (Figure 6).
    """

    lines: list[list[str]]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return pipe_table(HEADER, self.lines, TEXTS)

    def blocks(self) -> list[Table]:
        """Return a table per setting, start and arm, for pages."""
        found: dict[tuple[str, ...], list[list[str]]] = {}
        for line in self.lines:
            found.setdefault(tuple(line[:3]), []).append([f"{line[3]} ({line[4]} subsets)", *line[5:]])
        header = ("merged", *HEADER[5:])
        return [Table(", ".join(place), header, own, header[:1]) for place, own in found.items()]


def subset_table(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> SubsetTable | None:
    """Return the table of subsets; None if no setting merges subsets of clients with domains."""
    domains = {setting["setting"]: own for setting in settings if (own := _domains(setting))}
    merged, alone = _scores([row for row in rows if row["setting"] in domains])
    found: dict[_Place, dict[int, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for (cell, arm), metrics in merged.items():
        base, sharp, named = arm.partition("#")
        own = domains[cell.setting]
        clients = tuple(map(int, named.split("+"))) if sharp else tuple(range(len(own)))
        if alone[cell].keys() >= set(clients):  # others are not finished
            place = _Place(cell.setting, cell.start, base, len(clients))
            found[place][cell.seed].append(_line(clients, own, metrics, alone[cell]))
    lines = [
        [*place[:3], f"{place.size}", f"{max(map(len, by_seed.values()))}", *_shown(by_seed)]
        for place, by_seed in sorted(found.items())
    ]
    return SubsetTable(lines) if lines else None


def _domains(setting: Mapping[str, Any]) -> list[str]:
    """Return the domain of every client; none if clients are not merged once, by domain and subset."""
    names = sorted(name.strip() for name in str(setting.get("data")).split(","))
    each = setting.get("partition") == "column:domain" and setting.get("clients") == len(names) > 1
    subsets = setting.get("rounds") == 1 and any("#" in arm for arm in setting.get("arms", ()))
    return names if each and subsets else []


def _scores(
    rows: Sequence[Row],
) -> tuple[dict[tuple[_Cell, str], dict[str, float]], dict[_Cell, dict[int, dict[str, float]]]]:
    """Return the metrics of merged models, by cell and arm, and of clients alone, after the round."""
    merged: dict[tuple[_Cell, str], dict[str, float]] = defaultdict(dict)
    alone: dict[_Cell, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if int(row["round"]) != 1:
            continue
        cell = _Cell(str(row["setting"]), str(row["start"]), int(row["seed"]))
        scope, _, client = str(row["scope"]).partition(":")
        if scope == CENTRAL:
            merged[cell, str(row["arm"])][str(row["metric"])] = float(row["value"])
        elif scope == "alone":
            alone[cell][int(client)][str(row["metric"])] = float(row["value"])
    return merged, alone


def _line(
    clients: tuple[int, ...],
    domains: Sequence[str],
    merged: Mapping[str, float],
    alone: Mapping[int, Mapping[str, float]],
) -> np.ndarray:
    """Return own F1, its relative change, unseen F1, and the latter again if the best are merged."""
    names = [metric_of(domains[client]) for client in clients]
    own = np.array([merged.get(name, np.nan) for name in names])
    before = np.array([alone[c].get(name, np.nan) for c, name in zip(clients, names, strict=True)])
    unseen = merged.get(UNSEEN, np.nan)
    order = sorted(alone, key=lambda client: -alone[client].get(UNSEEN, np.nan))
    best = set(order[: len(clients)]) == set(clients)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.where(before > 0, own / before - 1, np.nan)
    return np.array([own.mean(), _mean(change), unseen, unseen if best else np.nan])


def _shown(by_seed: Mapping[int, Sequence[np.ndarray]]) -> list[str]:
    """Return the four numbers as text, with their spread over seeds."""
    of_seeds = np.array([[_mean(column) for column in np.array(lines).T] for lines in by_seed.values()])
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
