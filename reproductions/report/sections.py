"""Sections of a run's page and of its Markdown: where alignment pays, and merged subsets of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrot.simulations.report.html_page import Section, data_uri
from fedrot.simulations.report.run_page import MARKDOWN_TABLES, PAGE, RunResults
from fedrot.simulations.report.summaries import BASELINE, Row
from reproductions.report import regimes
from reproductions.report.subsets import TEXT, subset_table


def _map(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> str:
    found = regimes.regimes(rows, settings)
    return f"{regimes.summary(found)}\n\n{regimes.markdown(found)}" if found else ""


def _subsets(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> str:
    table = subset_table(rows, settings)
    return table.markdown() if table is not None else ""


MARKDOWN_TABLES.extend((_map, _subsets))


@PAGE.section
def regime_map(run: RunResults) -> Section | None:
    """Where alignment pays, after the first and the last round; left out if the grid has no matrix."""
    settings = run.settings
    last = regimes.regimes(run.rows, settings)
    if not last:
        return None
    (run.folder / "plots").mkdir(exist_ok=True)
    maps = {"after round 1": regimes.regimes(run.rows, settings, server_round=1), "at the end": last}
    if maps["after round 1"] == last:
        maps.pop("after round 1")
    text = (
        f'Loss of aligned minus {BASELINE} averaging, below 0 is better; "=" is the same model but for '
        "rounding."
    )
    pictures = {}
    for when, found in maps.items():
        drawn = regimes.regime_plot(run.folder / "plots" / f"map-{when.replace(' ', '-')}.png", found)
        pictures[f"{when.capitalize()}. {regimes.summary(found)}"] = data_uri(drawn)
    return Section("Where alignment pays", text, pictures=pictures)


@PAGE.section
def subsets(run: RunResults) -> Section | None:
    """Merged subsets of clients with domains of their own."""
    table = subset_table(run.rows, run.settings)
    return Section("Subsets of clients", TEXT, tables=table.blocks()) if table else None
