"""Shares of the squared distance that alignment found, and that chance removes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedrot.report import shares_by
from fedrot.simulations.report.summaries import Row

if TYPE_CHECKING:
    from pandas import DataFrame


def shares(rows: Iterable[Row], names: Sequence[str]) -> DataFrame:
    """Return the shares of the squared distance that alignment found, grouped by the columns ``names``.

    Distances are summed over rows before they are divided. Rows of dropped replies are left out.

    Returns:
        The columns ``names``; ``found``, the share that the best elements remove, applied or not (for
        rows of coupled parts, whose share of chance is unknown, the share that was removed);
        ``chance``, the share that chance removes, NaN if unknown; and their ``ratio``, 0 if both are 0.
    """
    import pandas

    found = shares_by(rows, lambda row: tuple(row.get(name, "") for name in names))
    lines = [
        (*key, share.share, math.nan if share.chance_share is None else share.chance_share, share.ratio)
        for key, share in found.items()
    ]
    return pandas.DataFrame(lines, columns=[*names, "found", "chance", "ratio"])
