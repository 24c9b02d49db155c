"""What pictures show, against numbers computed by hand."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest

from fedrot.simulations.comparison.summary import verdicts_of
from fedrot.simulations.report import plots
from tests.simulations.report.runs import HOSTILE, levels, row, run_of


def words(labels):
    return [label.get_text() for label in labels]


def test_differences_have_a_dot_and_an_interval_and_a_panel_per_metric():
    values = {"accuracy": [0.5, 0.6], "macro_f1": [0.3, 0.4], "loss": [2.0, 2.2]}
    gains = {"accuracy": [0.6, 0.8], "macro_f1": [0.3, 0.4], "loss": [1.0, math.nan]}
    run = run_of([*levels("fedavg", values), *levels("b", gains)])
    (found,) = verdicts_of(run)
    panels = plots.differences_plot(found).axes
    dots = [np.asarray(ax.containers[0].lines[0].get_xdata(), float) for ax in panels]
    np.testing.assert_allclose(dots, [[0, 0.15], [0, 0], [0, math.nan]])
    ((low, high),) = (
        own[:, 0] for own in panels[0].containers[0].lines[2][0].get_segments()[1:]
    )
    assert (low, high) == pytest.approx((0.15 - 0.63531, 0.15 + 0.63531), abs=1e-4)
    labels = [ax.get_yticklabels() for ax in panels]
    assert words(labels[0]) == ["fedavg   0.550", "b   0.700"]
    assert words(labels[2]) == ["fedavg   2.100", "b   -"]
    assert [label.get_fontweight() for label in labels[0]] == ["bold", "normal"]
    sides = [ax.get_xlabel().split("(")[1].split()[0] for ax in panels]
    assert sides == ["right", "right", "left"]


def test_lines_are_means_over_seeds_with_a_band_of_the_interval():
    rows = [
        *(
            row("fedavg", seed, value, round=2)
            for seed, value in enumerate((0.45, 0.65, 0.45, 0.45))
        ),
        row("fedavg", 0, 0.1, round=0),
        row("aligned", 0, 0.9, round=0),
        row("aligned", 0, 0.8, round=2),
        row("head_only", 0, 0.7),
        row("aligned", 0, math.nan, round=1),
        row("fedavg", 0, 99, round=2, scope="client:0"),
        row("fedavg", 0, 99, round=3, metric="loss"),
    ]
    (ax,) = plots.curves_plot(rows, "accuracy", ["aligned", "fedavg", "head_only"]).axes
    *drawn, level = sorted(
        ax.lines, key=lambda line: str(line.get_label()).startswith("_")
    )
    lines = {str(line.get_label()): line for line in drawn}
    np.testing.assert_allclose(
        np.transpose(lines["fedavg"].get_data()), [(0, 0.1), (2, 0.5)]
    )
    aligned = np.transpose(lines["aligned"].get_data())
    np.testing.assert_array_equal(aligned, [[0, 0.9], [1, math.nan], [2, 0.8]])
    # Of four seeds: sd 0.1, t(0.975, 3) = 3.182446.
    corners = ax.collections[1].get_paths()[0].vertices
    heights = corners[corners[:, 0] == 2][:, 1]
    half = 3.182446 * 0.1 / 2
    assert (heights.min(), heights.max()) == pytest.approx(
        (0.5 - half, 0.5 + half), abs=1e-6
    )
    assert [*level.get_ydata()] == [0.7, 0.7], "one round is a level line"
    assert ax.get_ylim() == pytest.approx((0.1 - 0.24, 0.9 + 0.24))
    assert all(float(place).is_integer() for place in ax.get_xticks())


@pytest.mark.parametrize(
    ("values", "scale"), [((900.0, 3.0), "log"), ((math.nan,) * 2, "linear")]
)
def test_perplexities_have_a_logarithmic_axis(values, scale):
    rows = levels("fedavg", {"perplexity": values})
    assert (
        plots.curves_plot(rows, "perplexity", ["fedavg"]).axes[0].get_yscale() == scale
    )


def test_a_picture_is_a_file_that_repeats_with_text_in_any_script():
    series = {"喜び": [(1, 0.1)], HOSTILE: [(1, 0.1)]}
    drawn = [plots.data_uri(plots.rounds_plot(series)) for _ in range(2)]
    head, _, data = drawn[0].partition(",")
    text = base64.b64decode(data).decode()
    assert (head, drawn[1]) == ("data:image/svg+xml;base64", drawn[0])
    assert ("喜び" in text, "<script" in text) == (True, False)
