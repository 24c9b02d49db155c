"""The section of a run's page about merged subsets of clients."""

from __future__ import annotations

from fedrot.simulations.folder import Run
from fedrot.simulations.report.pages import SECTIONS, Section
from reproductions.report.subsets import TEXT, subset_table


def subsets(run: Run) -> Section | None:
    """Merged subsets of clients with domains of their own."""
    table = subset_table(run.rows, run.experiments)
    return Section("Subsets of clients", TEXT, table.blocks()) if table else None


SECTIONS.append(subsets)
