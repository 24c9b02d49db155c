"""Shares of the squared distance against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedrot.simulations.report.findings.shares import shares


def row(round: int = 1, part: str = "attention", **more: Any) -> dict[str, Any]:
    nothing = {"after": 2.0, "moved": 0, "found": 0.0}
    return {"round": round, "part": part, "before": 2.0, **nothing, **more}


def summed(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Return the shares as tuples, NaN as None."""
    found = shares(rows, names or ["round"]).astype(object)
    return list(found.where(found.notna(), None).itertuples(index=False, name=None))


def test_shares_weigh_rows_by_their_distance() -> None:
    about = {"arm": "aligned", "start": "same", "part": "ffn", "layer": 0, "found": 0.0, "moved": 0}
    rows = [
        {**about, "before": 3.0, "after": 1.0},
        {**about, "before": 1.0, "after": 1.0},
        {**about, "layer": 1, "before": 0.0, "after": 0.0},
        {"arm": "aligned", "start": "same", "dropped": "not finite"},
    ]
    assert summed(rows, "setting", "arm", "layer") == [
        ("", "aligned", 0, 0.5, None, None),
        ("", "aligned", 1, 0.0, None, None),
    ]
    assert summed(rows[-1:]) == []


def test_what_is_found_counts_whether_or_not_it_was_moved() -> None:
    rows = [row(found=0.5, chance=0.1, after=1.5, moved=4), row(before=6.0, found=0.3, chance=0.3)]
    assert summed(rows) == [(1, pytest.approx(0.1), pytest.approx(0.05), pytest.approx(2))]


@pytest.mark.parametrize("unknown", [{}, {"chance": None}, {"chance": math.nan}])
def test_a_row_without_chance_leaves_what_was_removed(unknown: dict[str, Any]) -> None:
    """Even if it says what was found: parts that depend on each other find the same distance twice."""
    rows = [row(found=1.0, chance=0.1, after=1.5), row(found=1.5, after=1.0, **unknown)]
    assert summed(rows) == [(1, 0.375, None, None)]


@pytest.mark.parametrize(("found", "ratio"), [(0.0, 0.0), (0.2, math.inf)])
def test_where_chance_removes_nothing(found: float, ratio: float) -> None:
    (share,) = shares([row(found=found, chance=0.0)], ["round"]).itertuples()
    assert share.ratio == ratio
