"""What pictures and heat maps show, against numbers computed by hand."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from fedrot.simulations.report import plots
from fedrot.simulations.report.heat_map import heat_maps
from fedrot.simulations.report.page import Cell
from fedrot.simulations.summary import verdict
from tests.simulations.report.runs import HOSTILE, group, levels, row, run_of


def words(labels: list[Any]) -> list[str]:
    return [label.get_text() for label in labels]


def test_differences_have_a_dot_and_an_interval_per_metric_and_a_panel_per_unit() -> None:
    values = {"accuracy": [0.5, 0.6], "macro_f1": [0.3, 0.4], "loss": [2.0, 2.2]}
    gains = {"accuracy": [0.6, 0.8], "macro_f1": [0.3, 0.4], "loss": [1.0, math.nan]}
    found = verdict(run_of([*levels("fedavg", values), *levels("b", gains)]), "main")
    assert found is not None
    shares, loss = plots.differences_plot(found).axes
    accuracy, f1 = shares.containers
    np.testing.assert_allclose(np.asarray(accuracy.lines[0].get_xdata(), float), [0, 0.15])
    np.testing.assert_allclose(np.asarray(f1.lines[0].get_xdata(), float), [0, 0])
    ((low, high),) = (segment[:, 0] for segment in accuracy.lines[2][0].get_segments()[1:])
    assert (low, high) == pytest.approx((0.15 - 0.63531, 0.15 + 0.63531), abs=1e-4)
    assert accuracy.lines[0].get_marker() != f1.lines[0].get_marker()
    assert words(shares.get_yticklabels()) == ["fedavg   0.550", "b   0.700"]
    assert [label.get_fontweight() for label in shares.get_yticklabels()] == ["bold", "normal"]
    assert ("right is better" in shares.get_xlabel(), "left is better" in loss.get_xlabel()) == (
        True,
        True,
    )
    assert np.isnan(np.asarray(loss.containers[0].lines[0].get_xdata(), float)).tolist() == [False, True]


def test_lines_are_means_over_seeds_with_a_band_of_the_interval() -> None:
    rows = [
        *(row("fedavg", seed, value, round=2) for seed, value in enumerate((0.45, 0.65, 0.45, 0.45))),
        row("fedavg", 0, 0.1, round=0),
        row("aligned", 0, 0.9, round=0),
        row("aligned", 0, 0.8, round=2),
        row("head_only", 0, 0.7),
        row("aligned", 0, None, round=1),
        row("fedavg", 0, 99, round=2, scope="client:0"),
        row("fedavg", 0, 99, round=3, metric="loss"),
    ]
    (ax,) = plots.curves_plot(rows, "accuracy", ["aligned", "fedavg", "head_only"]).axes
    lines = {
        str(line.get_label()): line for line in ax.lines if not str(line.get_label()).startswith("_")
    }
    np.testing.assert_allclose(np.transpose(lines["fedavg"].get_data()), [(0, 0.1), (2, 0.5)])
    aligned = np.transpose(lines["aligned"].get_data())
    np.testing.assert_array_equal(aligned, [[0, 0.9], [1, math.nan], [2, 0.8]])
    # Of four seeds: sd 0.1, t(0.975, 3) = 3.182446.
    corners = ax.collections[1].get_paths()[0].vertices
    heights = corners[corners[:, 0] == 2][:, 1]
    half = 3.182446 * 0.1 / 2
    assert (heights.min(), heights.max()) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    # One round is a level line.
    level = [line for line in ax.lines if str(line.get_label()).startswith("_")]
    assert [[*line.get_ydata()] for line in level] == [[0.7, 0.7]]
    assert ax.get_ylim() == pytest.approx((0.1 - 0.24, 0.9 + 0.24))
    assert all(float(place).is_integer() for place in ax.get_xticks())


def test_no_two_of_many_strategies_look_alike_without_colour_or_with_it() -> None:
    names = [f"s{number}" for number in range(20)]
    rows = [row(name, 0, 0.5, round=number) for name in names for number in (1, 2)]
    (ax,) = plots.curves_plot(rows, "accuracy", names).axes
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in ax.lines]
    assert len(set(looks)) == len(names)
    assert len({look[1:] for look in looks[:8]}) == 8


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [
        ("perplexity", (900.0, 30.0, 3.0), "log"),
        ("perplexity", (math.nan,) * 3, "linear"),
        ("accuracy", (0.1, 0.2, 0.3), "linear"),
        ("accuracy", (0.2, 0.2, 0.2), "linear"),
    ],
)
def test_perplexities_have_a_logarithmic_axis(
    metric: str, values: tuple[float, ...], scale: str
) -> None:
    rows = [row("fedavg", 0, value, metric=metric, round=n) for n, value in enumerate(values)]
    (ax,) = plots.curves_plot(rows, metric, ["fedavg"]).axes
    assert ax.get_yscale() == scale


def test_metrics_of_a_strategy_have_a_panel_each_by_ascending_rounds() -> None:
    series = {"loss": {3: 0.3, 1: 0.1, 2: 0.2}, "rate": {1: 5.0}}
    axes = plots.rounds_plot(series).axes
    assert [ax.get_title(loc="left") for ax in axes] == list(series)
    assert np.transpose(axes[0].lines[0].get_data()).tolist() == [[1, 0.1], [2, 0.2], [3, 0.3]]


def test_the_heat_map_has_a_line_per_part_and_layer_and_a_column_per_round() -> None:
    rows = [
        group(1, "residual", -1, -0.02),
        *(group(r, "attention", layer, 0.4 / r + 0.1 * layer) for layer in (1, 0) for r in (1, 2, 3)),
        # Twice the distance counts twice: (0.5 * 2 + 0.2 * 4) / 6 = 0.3.
        group(2, "ffn", 0, 0.5),
        group(2, "ffn", 0, 0.2, client=1, before=4.0, after=3.2),
        # No more than chance; and a share that is too small to name.
        group(3, "ffn", 0, 0.05, chance=0.1),
        group(1, "ffn", 0, 0.004),
        group(1, "ffn", 0, 0.9, strategy="other"),
    ]
    ours, other = heat_maps(rows)
    assert (ours.title, ours.below, ours.columns) == ("aligned", "round", ["1", "2", "3"])
    assert {name: [cell.text for cell in cells] for name, cells in ours.lines.items()} == {
        "residual": ["-2", "", ""],
        "attention, layer 0": ["40", "20", "13"],
        "attention, layer 1": ["50", "30", "23"],
        "ffn, layer 0": ["0", "30", "5"],
    }
    assert [cell.kind for cell in ours.lines["ffn, layer 0"]] == ["chance", "found", "chance"]
    assert ours.lines["residual"][0].kind == "grew"
    assert [cell.strength for cell in ours.lines["attention, layer 0"]][:2] == pytest.approx([0.8, 0.4])
    assert other.lines == {"ffn, layer 0": [Cell("90", 1.0)]}


def test_names_are_text_and_not_too_long() -> None:
    assert plots.as_label("cost $x$ of a_b\0") == r"cost \$x\$ of a_b "
    assert plots.as_label("x" * 32) == "x" * 32
    assert plots.as_label("x" * 33) == "x" * 31 + "…"


def test_a_picture_is_a_file_that_repeats_with_text_in_any_script() -> None:
    def drawn() -> str:
        return plots.data_uri(plots.rounds_plot({"喜び": {1: 0.5}, HOSTILE: {1: 0.2}}))

    head, _, data = drawn().partition(",")
    assert head == "data:image/svg+xml;base64"
    text = base64.b64decode(data).decode()
    assert "喜び" in text
    assert "<script" not in text
    assert drawn() == drawn()
