"""The map of a grid: which cells it has, their verdicts, and its picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from reproductions.report.regimes import holm, markdown, regime_plot, regimes, summary

#: Loss of aligned minus plain, by seed.
DIFFERENCES = {
    ("iid", 1.0, "same"): (0.0, 0.0, 0.0),
    ("iid", 4.0, "same"): (-0.50, -0.51, -0.505),
    ("iid", 1.0, "different"): (0.30, 0.31, 0.305),
    ("iid", 4.0, "different"): (-0.10, -0.01, -0.05),
}
VERDICTS = ["plain averaging", "better", "worse", "within noise"]


def name(partition: str, epochs: float) -> str:
    return f"encoder, local epochs {epochs:g}, partition {partition}"


SETTINGS = [
    {"setting": name(partition, epochs), "partition": partition, "local_epochs": epochs}
    for partition, epochs in dict.fromkeys(place[:2] for place in DIFFERENCES)
]


def rows(server_round: int = 2) -> list[dict[str, Any]]:
    common = {"scope": "central", "metric": "loss", "round": server_round}
    return [
        {
            **common,
            "setting": name(partition, epochs),
            "start": start,
            "seed": seed,
            "arm": arm,
            "value": 1 + seed + (difference if arm == "aligned" else 0),
        }
        for (partition, epochs, start), by_seed in DIFFERENCES.items()
        for seed, difference in enumerate(by_seed)
        for arm in ("plain", "aligned")
    ]


def test_holm_by_its_definition() -> None:
    """The k-th smallest of n p-values is multiplied by n - k + 1; none is below a smaller one's."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    found = holm([0.02, math.nan, 0.01])
    assert found[::2] == pytest.approx([0.02, 0.02])
    assert math.isnan(found[1])
    assert holm([]) == []


def test_every_cell_has_its_verdict_corrected_for_all_of_them() -> None:
    found = regimes(rows(), SETTINGS)
    assert [(r.partition, r.local_epochs, r.start) for r in found] == list(DIFFERENCES)
    assert {regime.model for regime in found} == {"encoder"}
    assert [regime.verdict for regime in found] == VERDICTS
    raw = [1.0, *(stats.ttest_1samp(d, 0).pvalue for d in list(DIFFERENCES.values())[1:])]
    assert [regime.p for regime in found] == pytest.approx(holm(raw))
    assert "Of 4 cells: 1 better, 1 worse, 1 within noise, 1 plain averaging." in summary(found)


def test_cells_without_a_test_are_not_known() -> None:
    one_seed = regimes([row for row in rows() if row["seed"] == 0], SETTINGS)
    assert [regime.verdict for regime in one_seed[1:]] == ["not known"] * 3
    broken = [{**row, "value": math.nan} if row["arm"] == "aligned" else row for row in rows()]
    assert {regime.verdict for regime in regimes(broken, SETTINGS)} == {"not known"}
    assert "| nan | nan | not known |" in markdown(regimes(broken, SETTINGS))


def test_the_order_of_the_matrix_and_other_keys_do_not_matter() -> None:
    def renamed(old: str) -> str:
        stem, epochs, partition = old.split(", ")
        return f"{stem}, {partition}, {epochs}.0, clients 4"

    settings = [{**s, "setting": renamed(s["setting"])} for s in SETTINGS]
    found = regimes([{**row, "setting": renamed(row["setting"])} for row in rows()], settings)
    assert [regime.verdict for regime in found] == VERDICTS
    assert {regime.model for regime in found} == {"encoder, clients 4"}


def test_the_map_of_an_earlier_round_ignores_later_ones() -> None:
    worse = [{**row, "value": row["value"] + 9 * (row["arm"] == "aligned")} for row in rows(3)]
    both = [*rows(2), *worse]
    assert regimes(both, SETTINGS, server_round=2) == regimes(rows(2), SETTINGS)
    assert regimes(both, SETTINGS) == regimes(worse, SETTINGS)


def test_a_grid_without_a_matrix_has_no_map() -> None:
    settings = [{**setting, "setting": "plain name"} for setting in SETTINGS]
    assert regimes([{**row, "setting": "plain name"} for row in rows()], settings) == []


def test_the_table_and_the_picture_show_every_cell(tmp_path: Path) -> None:
    found = regimes(rows(), SETTINGS)
    lines = markdown(found).splitlines()
    assert len(lines) == 2 + len(found)
    assert lines[3].startswith("| encoder | same | iid | 4 | -0.505 |")
    assert regime_plot(tmp_path / "map.png", found).read_bytes().startswith(b"\x89PNG")
