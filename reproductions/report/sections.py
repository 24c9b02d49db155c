"""The section of a run's page about merged subsets of clients."""

from __future__ import annotations

from fedrot.simulations.report.page import Section
from fedrot.simulations.report.run_page import PAGE, Results
from reproductions.report.subsets import TEXT, subset_table


@PAGE.section
def subsets(of: Results) -> Section | None:
    """Merged subsets of clients with domains of their own."""
    table = subset_table(of.run.rows, of.run.experiments)
    return Section("Subsets of clients", text=TEXT, tables=table.blocks()) if table else None
