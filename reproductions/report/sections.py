"""The section of a run's page, and of its Markdown, about merged subsets of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrot.simulations.report.page import Section
from fedrot.simulations.report.run_page import MARKDOWN_TABLES, PAGE, Results
from fedrot.simulations.summary import Row
from reproductions.report.subsets import TEXT, subset_table


def _subsets(rows: Sequence[Row], experiments: Sequence[Mapping[str, Any]]) -> str:
    table = subset_table(rows, experiments)
    return table.markdown() if table is not None else ""


MARKDOWN_TABLES.append(_subsets)


@PAGE.section
def subsets(of: Results) -> Section | None:
    """Merged subsets of clients with domains of their own."""
    table = subset_table(of.run.rows, of.run.experiments)
    return Section("Subsets of clients", text=TEXT, tables=table.blocks()) if table else None
