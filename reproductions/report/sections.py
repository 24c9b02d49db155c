"""The section of a run's page, and of its Markdown, about merged subsets of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrot.simulations.report.html_page import Section
from fedrot.simulations.report.run_page import MARKDOWN_TABLES, PAGE, RunResults
from fedrot.simulations.report.summaries import Row
from reproductions.report.subsets import TEXT, subset_table


def _subsets(rows: Sequence[Row], settings: Sequence[Mapping[str, Any]]) -> str:
    table = subset_table(rows, settings)
    return table.markdown() if table is not None else ""


MARKDOWN_TABLES.append(_subsets)


@PAGE.section
def subsets(run: RunResults) -> Section | None:
    """Merged subsets of clients with domains of their own."""
    table = subset_table(run.rows, run.settings)
    return Section("Subsets of clients", TEXT, tables=table.blocks()) if table else None
