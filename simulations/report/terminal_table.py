"""Tables of the terminal in one style, for the commands that report on saved models."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, columns: Iterable[str], numbers: Collection[str] = ()) -> Table:
    """Return an empty table; columns of numbers are aligned to the right, long cells are folded."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table
