"""Tables of results as text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from fedrot.simulations.report.tables import (
    markdown_table,
    partition_table,
    pipe_table,
    result_lines,
    summary_tables,
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


def test_a_line_has_the_seeds_of_its_fullest_metric_and_a_table_their_range() -> None:
    rows = [row("plain", seed, 0.5, metric=m) for seed in range(4) for m in ("accuracy", "loss")]
    # Of one arm a metric lacks the last seed, which was interrupted.
    rows += [row("ffn", seed, 0.5 + seed / 10) for seed in range(3)]
    rows += [row("ffn", seed, 0.5, metric="loss") for seed in range(2)]
    assert [line.seeds for line in result_lines(rows, ["accuracy", "loss"])] == [4, 3]
    (table,) = summary_tables(rows)
    assert table.title == "one: final round, mean ± sd, 3 to 4 seed(s)"
    assert markdown_table(rows).splitlines()[3].split(" | ")[-1] == "identical (2 seeds) |"
    (table,) = summary_tables([row for row in rows if row["arm"] == "plain"])
    assert table.title == "one: final round, mean ± sd, 4 seed(s)"
    assert [str(column.header) for column in table.columns] == [
        *("arm", "accuracy", "loss", "accuracy - plain")
    ]


def test_of_many_classes_the_most_frequent_have_a_column_each() -> None:
    names = [f"c{number}" for number in range(11)]
    # Of the second client the classes are rare where those of the first are frequent, but fewer.
    counts = [[5, 90, 1, 80, 70, 60, 2, 50, 40, 30, 20], [5, 0, 0, 1, 2, 3, 3, 4, 5, 6, 7]]
    text = StringIO()
    Console(file=text, width=200).print(partition_table(counts, names, "mine", 3))
    title, _, header, _, *lines, _ = text.getvalue().splitlines()
    assert title.strip() == "Rows per client: mine, seed 3"
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines]
    kept = ("c1", "c3", "c4", "c5", "c7", "c8", "c9", "c10")
    assert [cell.strip() for cell in header.strip("┃").split("┃")] == [
        "client",
        "rows",
        *kept,
        "3 others",
    ]
    assert cells == [
        ["0", "448", "90", "80", "70", "60", "50", "40", "30", "20", "8"],
        ["1", "36", "0", "1", "2", "3", "4", "5", "6", "7", "8"],
    ]
    nine = partition_table([row[:9] for row in counts], names[:9], "mine", 3)
    assert [str(column.header) for column in nine.columns] == ["client", "rows", *names[:9]]
