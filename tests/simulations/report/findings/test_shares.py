"""Shares of the squared distance, and their tables, against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedrot.simulations.report.findings.shares import HEADER, cells, share_tables, shares


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
        ("", "aligned", 0, 0.5, None, None, 0, 2),
        ("", "aligned", 1, 0.0, None, None, 0, 1),
    ]
    assert summed(rows[-1:]) == []


def test_what_is_found_counts_whether_or_not_it_was_moved() -> None:
    rows = [row(found=0.5, chance=0.1, after=1.5, moved=4), row(before=6.0, found=0.3, chance=0.3)]
    assert summed(rows) == [(1, pytest.approx(0.1), pytest.approx(0.05), pytest.approx(2), 1, 2)]
    (share,) = shares(rows, ["round"]).itertuples()
    assert cells(share) == ["10.0 %", "5.0 %", "2.0", "1 of 2"]


@pytest.mark.parametrize("unknown", [{}, {"chance": None}, {"chance": math.nan}])
def test_a_row_without_chance_leaves_what_was_removed(unknown: dict[str, Any]) -> None:
    """Even if it says what was found: parts that depend on each other find the same distance twice."""
    rows = [row(found=1.0, chance=0.1, after=1.5), row(found=1.5, after=1.0, **unknown)]
    assert summed(rows) == [(1, 0.375, None, None, 0, 2)]
    (share,) = shares(rows, ["round"]).itertuples()
    assert cells(share) == ["37.5 %", "-", "-", "0 of 2"]


@pytest.mark.parametrize(("found", "ratio", "cell"), [(0.0, 0.0, "-"), (0.2, math.inf, "-")])
def test_where_chance_removes_nothing(found: float, ratio: float, cell: str) -> None:
    (share,) = shares([row(found=found, chance=0.0)], ["round"]).itertuples()
    assert share.ratio == ratio
    assert cells(share)[1:3] == ["0.0 %", cell]


ROWS = [
    row(number, part, setting="s", arm=arm, found=found / number, chance=0.2, moved=int(number < 3))
    for arm, found in (("aligned", 0.8), ("whole", 0.4))
    for part in ("attention", "ffn")
    for number in (1, 2, 4)
]


def test_the_table_has_the_first_round_the_last_and_all() -> None:
    (table,) = share_tables(ROWS)
    assert (table.title, table.header) == ("What alignment found: s", HEADER)
    assert table.lines[:3] == [
        ["aligned, attention, round 1", "40.0 %", "10.0 %", "4.0", "1 of 1"],
        ["aligned, attention, round 4", "10.0 %", "10.0 %", "1.0", "0 of 1"],
        ["aligned, attention, rounds 1 to 4", "23.3 %", "10.0 %", "2.3", "2 of 3"],
    ]
    assert [line[0].rpartition(", ")[0] for line in table.lines[::3]] == [
        *("aligned, attention", "aligned, ffn", "whole, attention", "whole, ffn")
    ]


def test_one_round_is_one_line_and_a_part_that_comes_late_has_no_first_round() -> None:
    (table,) = share_tables([row(found=0.8, chance=0.2)])
    assert table.title == "What alignment found"
    assert table.lines == [["attention, round 1", "40.0 %", "10.0 %", "4.0", "0 of 1"]]
    (late,) = share_tables([row(found=0.8, chance=0.2), row(2, "heads")])
    assert [line[0] for line in late.lines] == [
        *("attention, round 1", "attention, rounds 1 to 2", "heads, round 2", "heads, rounds 1 to 2")
    ]
    assert late.lines[-1][1:] == ["0.0 %", "-", "-", "0 of 1"]


@pytest.mark.parametrize("rows", [[], [row()], [row(chance=None)], [{"round": 1, "dropped": "NaN"}]])
def test_without_chance_there_is_no_table(rows: list[dict[str, Any]]) -> None:
    assert share_tables(rows) == []


def test_every_setting_and_start_has_a_table_with_rounds_of_its_own() -> None:
    rows = [
        row(number, setting=setting, start="same", found=0.2 * number, chance=0.2)
        for setting, rounds in (("short", (1,)), ("long", (1, 2, 10)))
        for number in rounds
    ]
    short, long = share_tables(rows)
    assert (short.title, long.title) == (
        "What alignment found: short, start same",
        "What alignment found: long, start same",
    )
    assert [line[:2] for line in (*short.lines, *long.lines)] == [
        ["attention, round 1", "10.0 %"],
        ["attention, round 1", "10.0 %"],
        ["attention, round 10", "100.0 %"],
        ["attention, rounds 1 to 10", f"{100 * 2.6 / 6:.1f} %"],
    ]
