"""Tables of results as text."""

from __future__ import annotations

import math
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fedrot.simulations.report.summaries import Paired, paired_difference
from fedrot.simulations.report.tables import (
    Table,
    format_difference,
    format_interval,
    number_style,
    partition_table,
    pieces,
    pipe_table,
    result_tables,
)


def row(arm: str, seed: int, value: float, **more: Any) -> dict[str, Any]:
    about = {"setting": "one", "start": "same", "arm": arm, "seed": seed, "round": 1}
    return {**about, "scope": "central", "metric": "accuracy", "value": value, **more}


def test_cells_of_markdown_are_text_in_one_line() -> None:
    rows = [["a|b", "<b> & c"], ["two\nlines", "2"]]
    assert pipe_table(["name", "n"], rows, ("name",)).splitlines() == [
        "| name | n |",
        "| --- | ---: |",
        "| a\\|b | &lt;b> &amp; c |",
        "| two lines | 2 |",
    ]


def test_title_and_caption_of_markdown_are_there_unless_they_are_empty() -> None:
    table = "| n |\n| ---: |\n| 1 |\n"
    assert Table("", ["n"], [["1"]]).markdown() == table
    assert Table("a|b <c>", ["n"], [["1"]], caption="of\n<d>").markdown() == (
        f"**a\\|b &lt;c>**\n\n{table}\nof &lt;d>\n"
    )


@pytest.mark.parametrize(
    ("value", "interval", "shown"),
    [
        (Paired(0.412, 0.301, 0.523, 3, "better"), True, "0.412 [0.301, 0.523]"),
        (Paired(0.412, 0.301, 0.523, 3, "better"), False, "0.412"),
        (Paired(0.412, math.nan, math.nan, 1, "one seed: no interval"), True, "0.412"),
        # The end that is closer to 0 does not look like it; the mean alone needs no more decimals.
        (Paired(0.3, 0.0001, 0.6, 3, "better"), True, "0.30000 [0.00010, 0.60000]"),
        (Paired(0.3, 0.0001, 0.6, 3, "better"), False, "0.300"),
        (Paired(-0.3, -0.6, -0.0001, 3, "worse"), True, "-0.30000 [-0.60000, -0.00010]"),
        (Paired(math.nan, math.nan, math.nan, 2, "not finite"), True, "nan"),
    ],
)
def test_an_interval_stands_behind_its_mean(value: Paired, interval: bool, shown: str) -> None:
    assert format_interval(value, interval=interval) == shown


def test_a_difference_without_a_number_is_its_verdict() -> None:
    assert format_difference(paired_difference([])) == "no seed in common"
    assert format_difference(paired_difference([0.0, 0.0])) == "identical"
    assert format_difference(paired_difference([1e-9, 2e-9])) == "equal but for rounding"
    assert number_style() == number_style(math.nan) == number_style(-0.5, math.inf) == ".3f"
    assert number_style(-31.25) == ".2f"


def test_differences_without_a_number_have_a_dash_and_no_setting_no_name() -> None:
    rows = [row("plain", seed, 0.5, setting="") for seed in (0, 1)]
    rows += [row("apart", seed, 0.5, setting="") for seed in (5, 6)]
    rows += [row("lost", seed, math.nan, setting="") for seed in (0, 1)]
    assert result_tables(rows, ["absent"]) == []
    (table,) = result_tables(rows)
    assert table.title == "accuracy (0 to 1, higher is better), final round, 2 seed(s)"
    assert [line[2:] for line in table.lines[1:]] == [["-", "no seed in common"], ["-", "not finite"]]


def test_names_are_on_the_left_and_numbers_on_the_right() -> None:
    table = Table("t", ["name", "n"], [["a", "1"], ["bcd", "22222"]], ["name"], "below")
    lines = printed(table, 80)
    assert "│ a    │     1 │" in lines
    assert (lines[0].strip(), lines[-1].strip()) == ("t", "below")
    assert pipe_table(["name", "n"], [], ("n",)).splitlines()[1] == "| ---: | --- |"


def test_a_table_has_its_largest_number_of_seeds_and_lines_say_if_theirs_is_smaller() -> None:
    rows = [row("plain", seed, 0.5, metric=m) for seed in range(4) for m in ("accuracy", "loss")]
    # Of one arm a metric lacks the last seed, which was interrupted.
    rows += [row("ffn", seed, 0.5 + seed / 10) for seed in range(3)]
    rows += [row("ffn", seed, 0.5, metric="loss") for seed in range(2)]
    accuracy, loss = result_tables(rows)
    assert accuracy.title == "one: accuracy (0 to 1, higher is better), final round, 4 seed(s)"
    assert accuracy.lines[1][1] == "0.600 ± 0.100 (3 seeds)"
    assert loss.lines == [
        ["plain", "0.500 ± 0.000", "-", "-"],
        ["ffn", "0.500 ± 0.000 (2 seeds)", "-", "identical (2 seeds)"],
    ]


def test_no_difference_stands_beside_the_smallest_that_would_have_shown() -> None:
    rows = [row("plain", seed, 0.5) for seed in range(3)]
    rows += [row("ffn", seed, 0.5 + change) for seed, change in enumerate((0.1, -0.11, 0.12))]
    (table,) = result_tables(rows)
    # Mean 0.0367, sd 0.1274; t(0.975, 2) = 4.302653: half of the interval is 0.3165.
    assert table.lines[1][2:] == ["+0.037 [-0.280, +0.353]", "within noise of 0.317"]
    assert "these seeds can show only a difference above x" in table.caption


def printed(table: Table, width: int) -> list[str]:
    text = StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue().splitlines()


def test_a_table_fits_into_80_columns_and_cuts_no_word() -> None:
    rows = [
        row(arm, seed, 0.5 + change * seed, start=start)
        for start in ("same", "scrambled")
        for arm, change in (("plain", 0.0), ("attention+ffn@running*1.25", 0.1))
        for seed in range(3)
    ]
    (table,) = result_tables(rows)
    assert len(table.header) == 5
    lines = printed(table, 80)
    assert max(map(len, lines)) <= 80
    words = {word for line in lines[1:-1] for word in line.replace("│", " ").replace("┃", " ").split()}
    assert {"scrambled", "attention+ffn@running*1.25", "[-0.148,", "+0.348]"} <= words
    assert any("attention+ffn@running*1.25" in line for line in printed(table, 140))


def test_names_are_broken_after_signs_and_only_then_within_words() -> None:
    assert pieces("attention+ffn@running/regmean") == ["attention+", "ffn@", "running/", "regmean"]
    assert pieces("[+0.061,") == ["[+0.061,"]
    assert pieces("abcd+efghi") == ["abcd+efghi"]
    assert pieces("abcde+fghij") == ["abcde+", "fghij"]
    assert pieces("x" * 26) == ["x" * 26]
    assert pieces("y" * 27) == ["y" * 10, "y" * 10, "y" * 7]
    hostile = Table("[red]", ["name"], [["[bold]" + "y" * 300]], ["name"])
    assert max(map(len, printed(hostile, 80))) <= 80
    assert "[bold]" in "".join(printed(hostile, 80))


def test_classes_of_a_client_come_by_their_rows_and_the_last_ones_together() -> None:
    names = [f"c{number}" for number in range(10)]
    counts = [[5, 90, 1, 80, 70, 60, 2, 50, 40, 30, 20], [0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 3]]
    table = partition_table(counts, names, "mine", 3)
    assert table.title == "Rows per client: mine, seed 3"
    # Rows of no class have no name.
    assert table.lines == [
        ["0", "448", "c1 90, c3 80, c4 70, c5 60, c7 50, c8 40, c9 30, none 20, 3 others 8"],
        ["1", "6", "none 3, c4 2, c3 1"],
    ]
    every = partition_table(counts, names, "mine", 3, most=None)
    assert every.lines[0][2].endswith("none 20, c0 5, c6 2, c2 1")
