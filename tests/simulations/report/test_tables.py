"""Tables and numbers as text."""

from __future__ import annotations

import math
from io import StringIO

import pytest
from rich.console import Console

from fedrot.simulations.report.tables import (
    Table,
    compact_table,
    format_difference,
    format_interval,
    lost_table,
    metric_table,
    number,
    number_style,
    pipe_table,
)
from fedrot.simulations.summary import Paired, paired_difference, verdict
from tests.simulations.report.runs import HOSTILE, levels, run_of


def printed(table: Table, width: int) -> list[str]:
    text = StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue().splitlines()


def test_cells_of_markdown_are_text_in_one_line() -> None:
    rows = [["a|b", "<b> & c"], ["two\nlines", "2"]]
    assert pipe_table(["name", "n"], rows, ("name",)).splitlines() == [
        "| name | n |",
        "| --- | ---: |",
        "| a\\|b | &lt;b> &amp; c |",
        "| two lines | 2 |",
    ]


@pytest.mark.parametrize(
    ("value", "interval", "shown"),
    [
        (Paired(0.412, 0.301, 0.523, 3, "better"), True, "0.412 [0.301, 0.523]"),
        (Paired(0.412, 0.301, 0.523, 3, "better"), False, "0.412"),
        (Paired(0.412, math.nan, math.nan, 1, "no interval"), True, "0.412"),
        # The end that is closer to 0 does not look like it; the mean alone needs no more decimals.
        (Paired(0.3, 0.0001, 0.6, 3, "better"), True, "0.30000 [0.00010, 0.60000]"),
        (Paired(0.3, 0.0001, 0.6, 3, "better"), False, "0.300"),
        (Paired(-0.3, -0.6, -0.0001, 3, "worse"), True, "-0.30000 [-0.60000, -0.00010]"),
        (Paired(0.1, -0.0001, 0.2, 3, "within noise"), True, "0.100 [0.000, 0.200]"),
    ],
)
def test_an_interval_stands_behind_its_mean(value: Paired, interval: bool, shown: str) -> None:
    assert format_interval(value, interval=interval) == shown


def test_a_difference_without_a_number_is_its_verdict() -> None:
    assert format_difference(paired_difference([])) == "no seed in common"
    assert format_difference(paired_difference([0.0, 0.0])) == "same"
    assert format_difference(paired_difference([1e-9, 2e-9])) == "same"
    assert format_difference(paired_difference([math.nan])) == "not finite"
    assert format_difference(paired_difference([0.1])) == "+0.100"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.7, "0.700"),
        (-31.25, "-31.25"),
        (-1e-9, "0.000"),
        (312.34, "312.3"),
        (6012.3, "6012"),
        (999_999.4, "999999"),
        (2.5e6, "2.5e+06"),
        (math.nan, "-"),
        (math.inf, "inf"),
    ],
)
def test_large_numbers_have_fewer_decimals(value: float, shown: str) -> None:
    assert number(value) == shown
    assert number_style() == number_style(-0.5, math.inf) == ".3f"


def test_the_terminal_breaks_headers_before_it_breaks_intervals() -> None:
    header = ["strategy", "accuracy", "macro F1", "loss", "against fedavg", "worst client", "MB"]
    line = ["fit_head", "0.670", "0.620", "0.995", "+0.050 [+0.048, +0.052]", "0.530", "220.5"]
    lines = printed(Table("t", header, [line], header[:1]), 80)
    assert all(any(cell in own for own in lines) for cell in line)
    assert max(map(len, lines)) <= 80
    hostile = printed(Table("[bold]", ["n", "v"], [[HOSTILE, "1"]], ["n"]), 80)
    assert "".join("".join(own.split()[:-1] or own.split()) for own in hostile).count("y") > 200
    assert "[bold]" in "".join(hostile)


SKEWED = {"accuracy": [0.5, 0.6], "macro_f1": [0.2, 0.3], "loss": [1.0, 1.2]}
RIVAL = {"accuracy": [0.6, 0.8], "macro_f1": [0.2, 0.3], "loss": [1.0, math.nan]}


def test_every_strategy_has_a_line_and_unknown_columns_are_left_out() -> None:
    found = verdict(run_of([*levels("fedavg", SKEWED), *levels("b", RIVAL)]), "main")
    assert found is not None
    table = compact_table(found)
    assert tuple(table.header) == ("strategy", "accuracy", "macro F1", "loss", "against fedavg")
    # Differences 0.1 and 0.2: half of the interval is 12.7062 * 0.0707107 / sqrt(2).
    assert [*map(tuple, table.lines)] == [
        ("fedavg", "0.550", "0.250", "1.100", "-"),
        ("b", "0.700", "0.250", "-", "+0.150 [-0.485, +0.785]"),
    ]
    accuracy = metric_table(found, "accuracy")
    assert accuracy.title == "accuracy (0 to 1, higher is better)"
    assert accuracy.lines == [
        ("fedavg", "0.550 ± 0.071", "-"),
        ("b", "0.700 ± 0.141", "+0.150 [-0.485, +0.785]"),
    ]
    assert metric_table(found, "macro_f1").lines[1] == ("b", "0.250 ± 0.071", "same")
    assert metric_table(found, "loss").lines[1][2:] == ("not finite",)
    assert metric_table(found, "absent").lines == []


def test_lost_replies_come_by_their_number() -> None:
    rows = [
        *({"round": n, "client": 12, "dropped": "NaN"} for n in (4, 2)),
        *({"round": n, "client": 10, "failed": "no answer"} for n in (3, 1, 2)),
        {"round": 1, "client": 9, "dropped": "NaN"},
        *({"round": n, "client": 3, "dropped": "NaN"} for n in (5, 5)),
        {"round": 1, "lost": "nobody"},
    ]
    (table,) = lost_table(rows)
    assert table.header == ("client", "what", "times", "rounds", "reason")
    assert table.lines == [
        ("10", "failed", "3", "1 to 3", "no answer"),
        ("12", "dropped", "2", "2 to 4", "NaN"),
        ("3", "dropped", "2", "5", "NaN"),
        ("9", "dropped", "1", "1", "NaN"),
    ]
    (named,) = lost_table([{**row, "strategy": "aligned"} for row in rows])
    assert (named.header[0], named.lines[0][:2]) == ("strategy", ("aligned", "10"))
    assert lost_table(rows[-1:]) == []
