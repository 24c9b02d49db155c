"""Shares of the squared distance, and their tables, against numbers computed by hand."""

from __future__ import annotations

import math
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fedrot.report import Shares, shares_by
from fedrot.simulations.report.findings.shares import (
    CELLS,
    Layer,
    cells,
    share_table,
    shares_by_layer,
)


def row(round: int = 1, part: str = "attention", **more: Any) -> dict[str, Any]:
    return {"round": round, "part": part, "before": 2.0, "after": 2.0, "moved": 0, **more}


def test_shares_weigh_rows_by_their_distance() -> None:
    about = {"arm": "aligned", "start": "same", "part": "ffn", "layer": 0}
    rows = [
        {**about, "before": 3.0, "after": 1.0},
        {**about, "before": 1.0, "after": 1.0},
        {**about, "layer": 1, "before": 0.0, "after": 0.0},
        {"arm": "aligned", "start": "same", "dropped": "not finite"},
    ]
    assert shares_by_layer(rows) == {
        Layer("", "same", "aligned", "ffn", 0): Shares(before=4.0, removed=2.0, groups=2),
        Layer("", "same", "aligned", "ffn", 1): Shares(groups=1),
    }


def test_what_is_found_counts_whether_or_not_it_was_moved() -> None:
    rows = [row(found=0.5, chance=0.1, after=1.5, moved=4), row(before=6.0, found=0.3, chance=0.3)]
    (share,) = shares_by(rows, lambda row: 0).values()
    assert (share.share, share.chance_share) == (pytest.approx(0.1), pytest.approx(0.05))
    assert share.ratio == pytest.approx(2)
    assert cells(share) == ["10.0 %", "5.0 %", "2.0", "1 of 2"]


@pytest.mark.parametrize("unknown", [{}, {"chance": None}, {"chance": math.nan}])
def test_a_row_without_chance_leaves_what_was_removed(unknown: dict[str, Any]) -> None:
    """Even if it says what was found: parts that depend on each other find the same distance twice."""
    rows = [row(found=1.0, chance=0.1, after=1.5), row(found=1.5, after=1.0, **unknown)]
    (share,) = shares_by(rows, lambda row: 0).values()
    assert (share.share, share.chance_share) == (0.375, None)
    assert math.isnan(share.ratio)
    assert cells(share) == ["37.5 %", "-", "-", "0 of 2"]


@pytest.mark.parametrize(("found", "ratio", "cell"), [(0.0, 0.0, "0.0"), (0.2, math.inf, "-")])
def test_where_chance_removes_nothing(found: float, ratio: float, cell: str) -> None:
    share = Shares(1.0, 0.0, found, 0.0)
    assert share.ratio == ratio
    assert cells(share)[1:3] == ["0.0 %", cell]


ROWS = [
    row(number, part, setting="s", arm=arm, found=found / number, chance=0.2, moved=int(number < 3))
    for arm, found in (("aligned", 0.8), ("whole", 0.4))
    for part in ("attention", "ffn")
    for number in (1, 2, 4)
]


def test_the_table_has_the_first_round_the_last_and_all() -> None:
    table = share_table(ROWS)
    assert table is not None
    assert table.header == ["arm", "part", "rounds", *CELLS]
    assert table.lines[:3] == [
        ["aligned", "attention", "1", "40.0 %", "10.0 %", "4.0", "1 of 1"],
        ["aligned", "attention", "4", "10.0 %", "10.0 %", "1.0", "0 of 1"],
        ["aligned", "attention", "1 to 4", "23.3 %", "10.0 %", "2.3", "2 of 3"],
    ]
    assert [line[:2] for line in table.lines[::3]] == [
        ["aligned", "attention"],
        ["aligned", "ffn"],
        ["whole", "attention"],
        ["whole", "ffn"],
    ]


def test_one_round_is_one_line_and_a_part_that_comes_late_has_no_first_round() -> None:
    table = share_table([row(found=0.8, chance=0.2)])
    assert table is not None
    assert table.lines == [["attention", "1", "40.0 %", "10.0 %", "4.0", "0 of 1"]]
    late = share_table([row(found=0.8, chance=0.2), row(2, "heads")])
    assert late is not None
    assert [line[:2] for line in late.lines] == [
        ["attention", "1"],
        ["attention", "1 to 2"],
        ["heads", "2"],
        ["heads", "1 to 2"],
    ]
    assert late.lines[-1][2:] == ["0.0 %", "-", "-", "0 of 1"]


@pytest.mark.parametrize("rows", [[], [row()], [row(chance=None)], [{"round": 1, "dropped": "NaN"}]])
def test_without_chance_there_is_no_table(rows: list[dict[str, Any]]) -> None:
    assert share_table(rows) is None


def test_the_table_as_text() -> None:
    table = share_table(ROWS)
    assert table is not None
    lines = table.markdown().splitlines()
    assert lines[0] == "| arm | part | rounds | found | chance | found / chance | groups moved |"
    assert lines[1] == "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    assert lines[2] == "| aligned | attention | 1 | 40.0 % | 10.0 % | 4.0 | 1 of 1 |"
    text = StringIO()
    Console(file=text, width=120).print(table.terminal())
    assert "23.3 %" in text.getvalue()


def test_a_row_that_does_not_say_what_was_found_leaves_what_was_removed() -> None:
    (share,) = shares_by([row(chance=0.1, after=1.5)], lambda row: 0).values()
    assert (share.share, share.chance_share) == (0.25, None)


def test_layers_ascend_and_parts_keep_their_order() -> None:
    about = {"arm": "aligned", "start": "same"}
    rows = [row(part=part, layer=layer, **about) for part, layer in (("ffn", 10), ("attention", 2))]
    rows += [row(part=part, layer=layer, **about) for part, layer in (("ffn", 2), ("residual", -1))]
    found = [(of.part, of.layer) for of in shares_by_layer(rows)]
    assert found == [("residual", -1), ("attention", 2), ("ffn", 2), ("ffn", 10)]


def test_every_setting_has_rounds_of_its_own() -> None:
    rows = [
        row(number, setting=setting, found=0.2 * number, chance=0.2)
        for setting, rounds in (("short", (1,)), ("long", (1, 2, 10)))
        for number in rounds
    ]
    table = share_table(rows)
    assert table is not None
    assert [line[:4] for line in table.lines] == [
        ["short", "attention", "1", "10.0 %"],
        ["long", "attention", "1", "10.0 %"],
        ["long", "attention", "10", "100.0 %"],
        ["long", "attention", "1 to 10", f"{100 * 2.6 / 6:.1f} %"],
    ]
