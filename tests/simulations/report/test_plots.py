"""What plots draw: bars, lines and bands against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from fedrot.simulations.report import plots

Draw = Callable[..., Figure]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Return a function that draws a plot and returns its figure."""
    figures: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path

    def draw(plot: Callable[..., Path], *arguments: Any) -> Figure:
        assert plot(Path("unused.png"), *arguments) == Path("unused.png")
        return figures.pop()

    monkeypatch.setattr(plots, "save_figure", keep)
    return draw


def row(
    value: float, server_round: int, seed: int = 0, arm: str = "plain", **more: Any
) -> dict[str, Any]:
    about = {"start": "same", "arm": arm, "seed": seed, "round": server_round}
    return {**about, "scope": "central", "metric": "accuracy", "value": value, **more}


#: Of the last round: mean 0.5, sd (n - 1) 0.1; the median is 0.45.
LAST = (0.45, 0.65, 0.45, 0.45)
ROWS = [
    *(row(value, 2, seed) for seed, value in enumerate(LAST)),
    row(0.1, 0),
    row(0.2, 1),
    row(0.4, 1, seed=1),
    row(0.9, 0, arm="aligned"),
    row(0.8, 2, arm="aligned"),
    row(99, 2, scope="client:0"),
    row(99, 3, metric="loss"),
    row(0.3, 1, start="scrambled"),
]
ARMS = ["aligned", "plain"]


def test_bars_of_classes_stand_on_each_other(drawn: Draw) -> None:
    counts = [[1, 2, 4], [8, 16, 32]]
    (ax,) = drawn(plots.partition_plot, counts, ["sad", "glad"]).axes
    bars = [[(bar.get_y(), bar.get_height()) for bar in group] for group in ax.containers]
    assert bars == [[(0, 1), (0, 8)], [(1, 2), (8, 16)], [(3, 4), (24, 32)]]
    legend = ax.get_legend()
    assert legend is not None
    # The last class is on top. Rows of no class have no name.
    assert [text.get_text() for text in legend.get_texts()] == ["none", "glad", "sad"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1"]
    assert len({group[0].get_facecolor() for group in ax.containers}) == 3
    many = drawn(plots.partition_plot, [[1] * 12] * 25, [f"c{i}" for i in range(12)]).axes[0]
    assert len({group[0].get_facecolor() for group in many.containers}) == 12
    assert len(many.get_xticklabels()) < 25


def test_lines_are_means_over_seeds_with_a_band_of_their_spread(drawn: Draw) -> None:
    figure = drawn(plots.metric_plot, ROWS, "accuracy", ARMS)
    same, scrambled = figure.axes
    assert [ax.get_title(loc="left") for ax in (same, scrambled)] == ["start: same", "start: scrambled"]
    lines = {str(line.get_label()): line for line in same.lines}
    assert lines.keys() == {"plain", "aligned"}
    np.testing.assert_allclose(np.transpose(lines["plain"].get_data()), [(0, 0.1), (1, 0.3), (2, 0.5)])
    np.testing.assert_allclose(np.transpose(lines["aligned"].get_data()), [(0, 0.9), (2, 0.8)])
    band = next(
        b
        for b in same.collections
        if to_hex(b.get_facecolor()) == to_hex(lines["plain"].get_color())  # type: ignore[arg-type]
    )
    corners = band.get_paths()[0].vertices
    spread = math.sqrt(2 * 0.1**2)
    for place, low, high in ((0, 0.1, 0.1), (1, 0.3 - spread, 0.3 + spread), (2, 0.4, 0.6)):
        heights = corners[corners[:, 0] == place][:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))
    # The colour is that of the arm's place among all arms, in every picture.
    assert [lines[arm].get_color() for arm in ARMS] == list(plots.PALETTE[:2])
    assert scrambled.lines[0].get_color() == plots.PALETTE[1]
    assert same.get_ylabel() == "accuracy"
    assert same.get_xlabel() == "round"
    assert all(float(place).is_integer() for place in same.get_xticks())
    # One legend names every arm once.
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "aligned"]


def test_one_round_is_a_point_per_arm_with_its_seeds_beside(drawn: Draw) -> None:
    rows = [{**r, "round": r["round"] - 1} for r in ROWS if r["round"] and r["start"] == "same"]
    (ax,) = drawn(plots.metric_plot, rows, "accuracy", ARMS).axes
    marks = {
        (line.get_marker(), y): np.asarray(line.get_xdata()).tolist()
        for line in ax.lines
        for y in {float(y) for y in np.asarray(line.get_ydata())}
    }
    assert marks == {
        ("|", 0): [0.8],
        ("o", 0): [0.8],
        ("|", -1): list(LAST),
        ("o", -1): [pytest.approx(0.5)],
    }
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ARMS
    assert ax.get_xlabel() == "accuracy after round 1 (bars: seeds, dot: mean)"


def test_an_arm_that_has_not_ended_has_no_point(drawn: Draw) -> None:
    rows = [row(0.4, 0), row(0.5, 1), row(0.3, 0, arm="aligned")]
    (ax,) = drawn(plots.metric_plot, rows, "accuracy", ARMS).axes
    marks = [np.asarray(line.get_xdata()).tolist() for line in ax.lines]
    assert [mark for mark in marks if mark] == [[0.5], [0.5]]


def test_no_two_of_many_arms_look_alike(drawn: Draw) -> None:
    arms = [f"arm {number}" for number in range(20)]
    rows = [row(0.5, number, arm=arm) for arm in arms for number in (1, 2)]
    (ax,) = drawn(plots.metric_plot, rows, "accuracy", arms).axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in ax.lines}
    assert len(looks) == len(arms)
    assert len({look[:2] for look in looks}) == len({look[0] for look in looks}) == 8


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [
        ("perplexity", (900.0, 30.0, 3.0), "log"),
        ("pseudo_perplexity", (900.0, 30.0, 3.0), "log"),
        ("perplexity", (math.nan,) * 3, "linear"),
        ("accuracy", (0.1, 0.2, 0.3), "linear"),
    ],
)
def test_perplexities_have_a_logarithmic_axis(
    metric: str, values: tuple[float, ...], scale: str, drawn: Draw
) -> None:
    rows = [row(value, number, metric=metric) for number, value in enumerate(values)]
    (ax,) = drawn(plots.metric_plot, rows, metric, ["plain"]).axes
    assert ax.get_yscale() == scale
    assert ax.get_ylabel() == metric.replace("_", " ")


def test_metrics_of_a_strategy_have_a_panel_each_by_ascending_rounds(drawn: Draw) -> None:
    series = {"loss": {3: 0.3, 1: 0.1, 2: 0.2}, "rate": {1: 5.0}, "c": {1: 1.0}, "d": {1: 2.0}}
    axes = drawn(plots.rounds_plot, series).axes
    shown = [ax for ax in axes if ax.axison]
    assert [ax.get_title(loc="left") for ax in shown] == list(series)
    assert np.transpose(shown[0].lines[0].get_data()).tolist() == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert (len(axes), len(shown)) == (6, 4)


def test_names_are_text_and_not_too_long() -> None:
    assert plots.as_label("cost $x$ of a_b") == r"cost \$x\$ of a_b"
    assert plots.as_label("a\nb\tc") == "a b c"
    assert plots.as_label("x" * 80) == "x" * 80
    assert plots.as_label("x" * 81) == "x" * 79 + "…"
