"""The table of merged subsets of clients."""

from __future__ import annotations

import pytest

from fedrot.simulations.run_folder import Run
from reproductions.report.subsets import HEADER, subset_table

EXPERIMENT = {
    "name": "s",
    "partition": "column:domain",
    "clients": 3,
    "rounds": 1,
    "data": "talk, books,news",
    "strategies": {
        name: {
            "name": name,
            "aggregation": "mean",
            "clients": [int(n) for n in name if n.isdigit()],
        }
        for name in ("plain", "on 01", "on 02", "on 12", "on 0", "on 1", "on 2")
    },
}
#: F1 on (books, news, talk), the clients' order, and on unseen domains.
ALONE = {0: (0.8, 0.1, 0.1, 0.2), 1: (0.1, 0.5, 0.1, 0.4), 2: (0.1, 0.1, 0.4, 0.3)}
MERGED = {
    "plain": (0.4, 0.4, 0.4, 0.35),
    "on 01": (0.6, 0.5, 0.0, 0.30),
    "on 02": (0.4, 0.0, 0.2, 0.10),
    "on 12": (0.0, 0.4, 0.4, 0.45),
}
NAMES = ("f1_books", "f1_news", "f1_talk", "unseen_macro_f1")


def rows(seed, shift=0.0):
    common = {"experiment": "s", "seed": seed, "scope": "central"}
    return [
        {
            **common,
            "round": number,
            "strategy": strategy,
            "metric": name,
            "value": value + shift,
        }
        for number in (0, 1)
        for strategy, values in [
            *MERGED.items(),
            *((f"on {one}", own) for one, own in ALONE.items()),
        ]
        for name, value in zip(NAMES, values, strict=True)
    ]


def table_of(rows, **changes):
    return subset_table(Run(rows=rows, experiments={"s": {**EXPERIMENT, **changes}}))


def test_pairs_and_all_clients_by_hand():
    table = table_of(rows(0))
    assert table is not None
    pairs, whole = (dict(zip(HEADER, line, strict=True)) for line in table.lines)
    assert (pairs["merged"], pairs["subsets"], whole["merged"], whole["subsets"]) == (
        "2",
        "3",
        "3",
        "1",
    )
    # Own domains of the three pairs: (0.6, 0.5), (0.4, 0.2), (0.4, 0.4).
    assert float(pairs["own F1"]) == pytest.approx((0.55 + 0.3 + 0.4) / 3, abs=1e-3)
    # (0.6 / 0.8, 0.5 / 0.5), (0.4 / 0.8, 0.2 / 0.4), (0.4 / 0.5, 0.4 / 0.4), less one
    # each
    assert pairs["against own"] == f"{(-0.125 - 0.5 - 0.1) / 3:+.1%}"
    assert float(pairs["unseen F1"]) == pytest.approx(
        (0.30 + 0.10 + 0.45) / 3, abs=1e-3
    )
    # Clients 1 and 2 are the best on unseen domains by themselves.
    assert (pairs["grown"], whole["grown"]) == ("0.450", "0.350")
    assert whole["unseen F1"] == "0.350"


def test_the_spread_is_over_seeds():
    table = table_of([*rows(0), *rows(1, shift=0.1)])
    assert table is not None
    pairs, whole = (dict(zip(HEADER, line, strict=True)) for line in table.lines)
    assert whole["own F1"] == "0.450 ± 0.071"
    assert (pairs["subsets"], whole["subsets"]) == ("3", "1")
    assert "0.450 ± 0.071" in [line[1] for own in table.blocks() for line in own.lines]


def test_runs_without_subsets_of_domains_have_no_table():
    alone = {"plain": {"name": "plain"}}
    for other in (
        {"strategies": alone},
        {"partition": "iid"},
        {"clients": 2},
        {"rounds": 2},
    ):
        assert table_of(rows(0), **other) is None


def test_unfinished_cells_and_missing_scores_are_left_out():
    joined = [
        {**row, "strategy": "joined"} for row in rows(0) if row["scope"] == "central"
    ]
    assert table_of(joined) is None
    table = table_of([row for row in rows(0) if row["metric"] != "f1_talk"])
    assert table is not None
    assert table.lines[1][4] == "-"
