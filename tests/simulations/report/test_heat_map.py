"""The heat map: its cells, its colours and its caption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedrot.simulations.report import heat_map


def group(number: int, part: str, layer: int, share: float, **more: Any) -> dict[str, Any]:
    about = {"round": number, "client": 0, "part": part, "layer": layer}
    found = {"found": 2.0 * share, "moved": 0}
    return {**about, "before": 2.0, "after": 2.0 * (1 - share), **found, **more}


def drawn(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> Figure:
    """Return the figure that is drawn for the rows."""
    figures: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path

    monkeypatch.setattr(heat_map, "save_figure", keep)
    heat_map.alignment_plot(Path("unused.png"), rows)
    return figures[0]


def words(labels: list[Any]) -> list[str]:
    return [label.get_text() for label in labels]


def test_a_line_per_part_and_layer_a_column_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        group(1, "residual", -1, -0.02),
        *(group(r, "attention", layer, 0.4 / r + 0.1 * layer) for layer in (1, 0) for r in (1, 2, 3)),
        # Twice the distance counts twice: (0.5 * 2 + 0.2 * 4) / 6 = 0.3.
        group(2, "ffn", 0, 0.5),
        group(2, "ffn", 0, 0.2, client=1, before=4.0, after=3.2),
        {"round": 2, "client": 1, "dropped": "NaN"},
    ]
    (ax,) = drawn(monkeypatch, [row for row in rows if "before" in row]).axes[:1]
    assert words(ax.get_yticklabels()) == ["residual", "attention 0", "attention 1", "ffn 0"]
    assert words(ax.get_xticklabels()) == ["1", "2", "3"]
    assert ax.get_xlabel() == "round"
    (image,) = ax.images
    nan = math.nan
    expected = [[-0.02, nan, nan], [0.4, 0.2, 0.4 / 3], [0.5, 0.3, 0.1 + 0.4 / 3], [nan, 0.3, nan]]
    np.testing.assert_allclose(np.ma.filled(image.get_array(), nan), expected, atol=1e-12)
    assert image.get_clim() == (0, 0.5)
    assert words(list(ax.texts)) == ["-2", "40", "20", "13", "50", "30", "23", "30"]
    loss, nothing = image.to_rgba(np.ma.masked_invalid([[-0.02, nan]]))[0]
    assert loss[0] > loss[2]
    assert nothing[3] == 0


def judged(
    number: int, part: str, layer: int, found: float, chance: float, client: int = 0
) -> dict[str, Any]:
    """Return a row of a group that stays, for which chance is known."""
    about = {"found": 2.0 * found, "chance": 2.0 * chance, "client": client}
    return group(number, part, layer, 0.0, **about)


def test_colours_are_the_ratio_to_chance_and_numbers_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        judged(1, "attention", 0, 0.122, 0.061),
        # Of two clients together: (0.30 + 0.02) / (0.06 + 0.04).
        judged(2, "attention", 0, 0.30, 0.06),
        judged(2, "attention", 0, 0.02, 0.04, client=1),
        judged(1, "ffn", 0, 0.0, 0.0),
        judged(2, "ffn", 0, 0.03, 0.0),
    ]
    axes = drawn(monkeypatch, rows).axes
    (image,) = axes[0].images
    np.testing.assert_allclose(image.get_array(), [[2.0, 3.2], [0.0, 4.0]])
    assert image.get_clim() == (1, 4)
    assert image.get_cmap().name == "cividis"
    assert words(list(axes[0].texts)) == ["12", "16", "0", "3"]
    (bar,) = axes[0].child_axes
    assert (bar.get_ylabel(), words(bar.get_yticklabels())) == ("found / chance", ["1", "2", "3", "4"])


def test_colours_are_absolute_and_below_chance_is_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cell has the same colour beside whatever else is in the picture."""
    colours = []
    for other in (0.01, 0.9):
        found = enumerate((0.09, 0.03, other))
        rows = [judged(1, "attention", layer, share, 0.06) for layer, share in found]
        (image,) = drawn(monkeypatch, rows).axes[0].images
        colours.append(image.to_rgba(image.get_array())[:2, 0])
    np.testing.assert_array_equal(*colours)
    beyond, below = colours[0]
    assert below[0] == below[1] == below[2]
    assert len(set(beyond[:3])) == 3


def test_a_tiny_share_is_grey_however_much_smaller_chance_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [judged(1, "attention", 0, 0.001, 0.00001), judged(1, "attention", 1, 0.01, 0.005)]
    (image,) = drawn(monkeypatch, rows).axes[0].images
    np.testing.assert_allclose(np.ma.filled(image.get_array(), math.nan), [[0.0], [2.0]])


def test_cells_with_and_without_chance_have_a_scale_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell with a reply of which chance is not known shows what was removed."""
    rows = [
        judged(1, "attention", 0, 0.12, 0.06),
        judged(2, "attention", 0, 0.12, 0.06),
        group(2, "attention", 0, 0.5, found=0.2, chance=None),
        group(3, "attention", 0, 0.4, found=0.2, chance=math.nan),
        judged(3, "ffn", 0, 0.01, 0.06),
    ]
    figure = drawn(monkeypatch, rows)
    axes = figure.axes
    ratio, share = (np.ma.filled(image.get_array(), math.nan) for image in axes[0].images)
    nan = math.nan
    np.testing.assert_allclose(ratio, [[2.0, nan, nan], [nan, nan, 1 / 6]])
    np.testing.assert_allclose(share, [[nan, 0.25, 0.4], [nan, nan, nan]])
    assert sorted(words(list(axes[0].texts))) == ["1", "12", "25", "40"]
    assert [bar.get_ylabel() for bar in axes[0].child_axes] == ["found / chance", "removed"]
    figure.canvas.draw()
    left, right = (bar.get_tightbbox() for bar in axes[0].child_axes)
    assert left.x1 < right.x0


def test_the_caption_explains_the_scales_that_are_used() -> None:
    known, unknown = judged(1, "ffn", 0, 0.1, 0.1), group(1, "residual", -1, 0.1)
    for rows, ratio, share in (([known], 1, 0), ([unknown], 0, 1), ([known, unknown], 1, 1)):
        caption = heat_map.caption(rows)
        assert caption.startswith(heat_map.CAPTION)
        assert caption.count(heat_map.RATIO.caption) == ratio
        assert caption.count(heat_map.SHARE.caption) == share
    assert "from 0 to 50 %" in heat_map.SHARE.caption


def test_a_panel_per_arm_and_start_with_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        group(r, "ffn", 0, share, arm=arm, start=start, seed=seed)
        for arm, share in (("aligned", 0.2), ("aligned/regmean", 0.6))
        for start in ("same", "scrambled")
        for seed in (0, 1)
        for r in (1, 2)
    ]
    panels = [ax for ax in drawn(monkeypatch, rows).axes if ax.images]
    assert [ax.get_title(loc="left") for ax in panels] == [
        f"{arm}, start: {start}"
        for arm in ("aligned", "aligned/regmean")
        for start in ("same", "scrambled")
    ]
    assert [ax.images[0].get_clim() for ax in panels] == [(0, 0.5)] * 4
    # The fifth panel is in a row of its own, without empty ones beside it.
    rows += [group(r, "ffn", 0, 0.2, arm="whole", start="same") for r in (1, 2)]
    axes = drawn(monkeypatch, rows).axes
    assert sum(ax.axison for ax in axes) == sum(bool(ax.images) for ax in axes) == 5 < len(axes)


def test_with_one_round_arms_are_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [group(1, "ffn", 0, share, arm=arm, start="same") for arm, share in (("b", 0.1), ("a", 0.3))]
    panels = [ax for ax in drawn(monkeypatch, rows).axes if ax.images]
    assert [words(ax.get_xticklabels()) for ax in panels] == [["b", "a"]]
    assert (panels[0].get_title(loc="left"), panels[0].get_xlabel()) == ("start: same", "")
    # Rows of a strategy name no arm and no start.
    (ax, *_) = drawn(monkeypatch, [group(7, "ffn", 0, 0.1)]).axes
    assert (words(ax.get_xticklabels()), ax.get_title(loc="left")) == (["round 7"], "")


def test_large_reports_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        group(r, part, layer, 0.01 * layer)
        for r in range(1, 201)
        for layer in range(48)
        for part in ("attention", "heads", "ffn")
    ]
    figure = drawn(monkeypatch, rows)
    width, height = figure.get_size_inches()
    assert width < 14
    assert height < 18
    assert not figure.axes[0].texts
    assert len(figure.axes[0].get_xticks()) <= 20
    assert len(figure.axes[0].get_yticks()) <= 90


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("known", [{}, {"found": 0.0, "chance": 0.0}, {"found": 0.5, "chance": 0.0}])
@pytest.mark.parametrize("share", [0.0, -1e-9, 0.3])
def test_a_picture_is_drawn_even_of_nothing(
    share: float, known: dict[str, float], tmp_path: Path
) -> None:
    path = heat_map.alignment_plot(tmp_path / "a.png", [group(1, "ffn", 0, share, **known)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_numbers_are_light_on_dark_cells_and_dark_on_light_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [group(number, "ffn", 0, share) for number, share in enumerate((-0.2, 0.01, 0.25, 0.5), 1)]
    (ax,) = drawn(monkeypatch, rows).axes[:1]
    (image,) = ax.images
    cells = image.to_rgba(image.get_array())[0][:, :3]
    inks = np.array([to_rgb(text.get_color()) for text in ax.texts])

    def luminance(colours: np.ndarray) -> np.ndarray:
        """That of WCAG 2, from 0 of black to 1 of white."""
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        return linear @ (0.2126, 0.7152, 0.0722)

    both = np.sort([luminance(cells), luminance(inks)], axis=0)
    assert ((both[1] + 0.05) / (both[0] + 0.05) > 3).all(), "as WCAG 2 wants of large text"
    assert set(luminance(inks).round(3)) == {0, 1}


def test_a_tiny_loss_has_the_colour_of_a_tiny_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [group(number, "ffn", 0, share) for number, share in enumerate((-0.004, 0.004, -0.02), 1)]
    (ax,) = drawn(monkeypatch, rows).axes[:1]
    loss, gain, large = ax.images[0].to_rgba(ax.images[0].get_array())[0]
    assert loss.tolist() == gain.tolist() != large.tolist()
    assert words(list(ax.texts)) == ["0", "0", "-2"]
