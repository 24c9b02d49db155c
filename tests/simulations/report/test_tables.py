"""Tables, grids and numbers as text."""

from __future__ import annotations

import math
from io import StringIO

import pytest
from rich.console import Console

from fedrot.simulations.comparison.paired import Paired, paired_difference
from fedrot.simulations.report.tables import (
    Table,
    TableCell,
    clients_grid,
    format_difference,
    format_interval,
    heat_map,
    lost_table,
    number,
)
from tests.simulations.report.runs import group


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.7, "0.700"),
        (-31.25, "-31.250"),
        (0.00123, "0.001"),
        (-0.000123, "-0.000123"),
        (-4e-7, "0.000"),
        (-0.0, "0.000"),
        (4e-7, "0.000"),
        (312.34, "312"),
        (6012.3, "6012"),
        (2.5e6, "2.5e+06"),
        (math.nan, "-"),
        (math.inf, "inf"),
    ],
)
def test_numbers_never_look_like_zero_unless_they_are(value, shown):
    assert number(value) == shown
    signed = value > 0 and shown != "0.000"
    assert number(value, "+") == ("+" * signed) + shown


def test_an_interval_stands_behind_its_mean():
    assert format_interval(Paired(0.412, 0.111, 3, "better")) == "0.412 [0.301, 0.523]"
    assert format_interval(Paired(0.412, math.nan, 1, "no interval")) == "0.412"
    assert (
        format_difference(Paired(0.3, 0.2999, 3, "better"))
        == "+0.300 [+0.0001, +0.600]"
    )
    shown = [
        format_difference(paired_difference(own))
        for own in ([], [0.0, 1e-9], [math.nan], [0.1], [0.1, -0.1])
    ]
    none = "no difference"
    zero = f"{none} [-1.271, +1.271]"
    assert shown == ["no interval", none, "not finite", "+0.100", zero]


def test_the_terminal_breaks_headers_before_it_breaks_intervals():
    header = [
        "strategy",
        "accuracy",
        "macro F1",
        "loss",
        "against fedavg",
        "worst client",
        "MB",
    ]
    line = [
        "[bold]",
        "0.670",
        "0.620",
        "0.995",
        "+0.050 [+0.048, +0.052]",
        "0.530",
        "220.5",
    ]
    text = StringIO()
    Console(file=text, width=80).print(Table("t", header, [line], header[:1]))
    lines = text.getvalue().splitlines()
    assert all(any(cell in own for own in lines) for cell in line)
    assert max(map(len, lines)) <= 80


def test_lost_replies_come_by_their_number():
    rows = [
        *({"round": n, "client": 12, "dropped": "NaN"} for n in (4, 2)),
        *({"round": n, "client": 10, "failed": "no answer"} for n in (3, 1, 2)),
        {"round": 1, "client": 9, "dropped": "NaN"},
        {"round": 1, "lost": "nobody"},
    ]
    table = lost_table(rows)
    named = lost_table({**row, "strategy": "aligned"} for row in rows)
    assert table is not None
    assert named is not None
    assert tuple(table.header) == ("client", "what", "times", "rounds", "reason")
    assert table.lines == [
        ("10", "failed", "3", "1 to 3", "no answer"),
        ("12", "dropped", "2", "2 to 4", "NaN"),
        ("9", "dropped", "1", "1", "NaN"),
    ]
    assert named.lines[0][:2] == ("aligned", "10")
    assert lost_table(rows[-1:]) is None


def test_classes_by_client():
    columns, lines = clients_grid([[1, 2, 4], [8, 16, 32]], ["sad", "glad"])
    assert columns == ["0 (7)", "1 (56)"]
    assert {name: [*map(tuple, cells)] for name, cells in lines.items()} == {
        "sad": [("1", 1 / 32, ""), ("8", 0.25, "")],
        "glad": [("2", 2 / 32, ""), ("16", 0.5, "")],
        "no class": [("4", 0.125, ""), ("32", 1.0, "")],
    }
    assert clients_grid([[5], [6]], [])[1].keys() == {"rows"}
    assert clients_grid([[0], [0]], ["a"])[1]["a"][0] == ("0", 0.0, "")


def test_the_heat_map_has_a_line_per_part_and_layer_and_a_column_per_round():
    rows = [
        group(1, "residual", -1, -0.02),
        *(
            group(r, "attention", layer, 0.4 / r + 0.1 * layer)
            for layer in (1, 0)
            for r in (1, 2, 3)
        ),
        # Twice the distance counts twice: (0.5 * 2 + 0.2 * 4) / 6 = 0.3.
        group(2, "ffn", 0, 0.5),
        group(2, "ffn", 0, 0.2, client=1, before=4.0, after=3.2),
        # No more than chance; and a share that is too small to name.
        group(3, "ffn", 0, 0.05, chance=0.1),
        group(1, "ffn", 0, 0.004),
        {"round": 2, "client": 1, "dropped": "NaN"},
    ]
    columns, lines = heat_map(rows)
    assert columns == [1, 2, 3]
    texts = {
        name: [cell and cell.text for cell in cells] for name, cells in lines.items()
    }
    assert [*texts.items()] == [
        ("residual", ["-2", None, None]),
        ("attention, layer 0", ["40", "20", "13"]),
        ("attention, layer 1", ["50", "30", "23"]),
        ("ffn, layer 0", ["0", "30", "5"]),
    ]
    assert lines["residual"][0] == TableCell("-2", pytest.approx(0.04), "grew")
    kinds = [cell.kind for cell in lines["ffn, layer 0"] if cell]
    assert kinds == ["chance", "found", "chance"]
    strengths = [cell.strength for cell in lines["attention, layer 1"] if cell]
    assert strengths == pytest.approx([1.0, 0.6, 0.7 / 3 * 2], abs=0.01)
