"""The page of a strategy's own report, and the heat map that it shares with run folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT
from fedrot.simulations.report import heat_map
from fedrot.simulations.report.strategy_page import write_strategy_report
from tests.simulations.report.test_run_page import Outline, write_lines


def group(number: int, part: str, layer: int, share: float, **more: Any) -> dict[str, Any]:
    about = {"round": number, "client": 0, "part": part, "layer": layer}
    return {**about, "before": 2.0, "after": 2.0 * (1 - share), **more}


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
    (image,) = ax.images
    nan = math.nan
    expected = [[-0.02, nan, nan], [0.4, 0.2, 0.4 / 3], [0.5, 0.3, 0.1 + 0.4 / 3], [nan, 0.3, nan]]
    np.testing.assert_allclose(np.ma.filled(image.get_array(), nan), expected, atol=1e-12)
    assert image.get_clim() == (0, pytest.approx(0.5))
    assert image.get_cmap().name == "cividis"
    assert words(list(ax.texts)) == ["-2", "40", "20", "13", "50", "30", "23", "30"]
    loss, nothing = image.to_rgba(np.ma.masked_invalid([[-0.02, nan]]))[0]
    assert loss[0] > loss[2]
    assert nothing[0] == nothing[1] == nothing[2]


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
    assert [ax.images[0].get_clim() for ax in panels] == [(0, pytest.approx(0.6))] * 4


def test_with_one_round_arms_are_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [group(1, "ffn", 0, share, arm=arm, start="same") for arm, share in (("b", 0.1), ("a", 0.3))]
    panels = [ax for ax in drawn(monkeypatch, rows).axes if ax.images]
    assert [words(ax.get_xticklabels()) for ax in panels] == [["b", "a"]]
    assert panels[0].get_title(loc="left") == "start: same"


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
@pytest.mark.parametrize("share", [0.0, -1e-9, 0.3])
def test_a_picture_is_drawn_even_of_nothing(share: float, tmp_path: Path) -> None:
    path = heat_map.alignment_plot(tmp_path / "a.png", [group(1, "ffn", 0, share)])
    assert path.read_bytes().startswith(b"\x89PNG")


# --- the page ----------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Path) -> Path:
    rows = [
        group(1, "attention", 0, 0.4),
        {"round": 1, "client": 7, "dropped": "<NaN> in 'a'"},
        {"round": 3, "client": 7, "dropped": "<NaN> in 'a'"},
        {"round": 2, "client": 3, "failed": "No answer came in time."},
        {"round": 2, "lost": "0 good replies, 1 needed."},
        {"round": 2, "tensor": "w", "note": "a note"},
        group(3, "attention", 0, 0.2),
    ]
    write_lines(tmp_path / "report.jsonl", rows)
    return tmp_path / "report.jsonl"


METRICS = [
    {"round": r, "stage": stage, "seconds": 1.0, "metrics": metrics}
    for r in (1, 2, 3)
    for stage, metrics in (
        ("train", {"loss": 1.0 / r if r != 2 else None, "rate": 0.1, "per_class": [0.5, r]}),
        ("server", {"accuracy": 0.1 * r}),
    )
]


def test_the_page_shows_the_heat_map_and_who_lost_what(report: Path) -> None:
    path = write_strategy_report(report)
    page = path.read_text(encoding="utf-8")
    assert path == report.with_suffix(".html")
    outline = Outline(page)
    assert [link[:30] for link in outline.links] == ["data:image/png;base64,iVBORw0K"]
    assert "3 rounds reported" in page
    lines = [line.split("<td") for line in page.replace("\n", "").split("<tr>")[2:]]
    cells = [[cell.split(">", 1)[1].split("<")[0] for cell in line[1:]] for line in lines]
    reasons = ["&lt;NaN&gt; in &#39;a&#39;", "No answer came in time."]
    assert cells == [
        ["7", "dropped", "2", "1 to 3", reasons[0]],
        ["3", "failed", "1", "2", reasons[1]],
    ]
    assert "Round 2: 0 good replies, 1 needed." in page
    assert "Metrics by round" not in page


def test_metrics_beside_the_report_or_given_are_drawn(report: Path, tmp_path: Path) -> None:
    write_lines(report.with_name("metrics.jsonl"), METRICS)
    page = write_strategy_report(report).read_text(encoding="utf-8")
    assert len(Outline(page).links) == 2
    assert "The same in all rounds: train/rate = 0.1, train/per_class/0 = 0.5." in page
    other = report.with_name("other.jsonl")
    report.with_name("metrics.jsonl").rename(other)
    out = tmp_path / "page.html"
    assert len(Outline(write_strategy_report(report, out, other).read_text()).links) == 2
    assert len(Outline(write_strategy_report(report, out).read_text()).links) == 1


def test_the_report_of_an_earlier_run_has_that_run_s_metrics(report: Path) -> None:
    """They were moved aside together, and what lies beside them is of a later run."""
    write_lines(report.with_name("metrics.jsonl"), METRICS)
    earlier = report.rename(report.with_name("alignment.2.jsonl"))
    assert len(Outline(write_strategy_report(earlier).read_text(encoding="utf-8")).links) == 1
    write_lines(report.with_name("metrics.2.jsonl"), METRICS)
    assert len(Outline(write_strategy_report(earlier).read_text(encoding="utf-8")).links) == 2


def test_the_other_file_is_told_apart(report: Path) -> None:
    metrics = report.with_name("metrics.jsonl")
    write_lines(metrics, METRICS)
    with pytest.raises(ValueError, match=r"give the file of Reporting\(rows"):
        write_strategy_report(metrics)


def test_a_report_without_alignment_or_losses(tmp_path: Path) -> None:
    write_lines(tmp_path / "r.jsonl", [{"round": 1, "tensor": "w", "note": "a note"}])
    page = write_strategy_report(tmp_path / "r.jsonl").read_text()
    assert "No aligned replies are reported." in page
    assert "None." in page


def test_the_command_takes_a_file(report: Path, tmp_path: Path) -> None:
    with report.open("a") as file:
        file.write('{"round": 4, "cli')
    result = CliRunner().invoke(app, ["report", str(report), "--out", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert "p.html" in result.output
    assert "3 rounds reported" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("content", "options", "problem"),
    [
        ("", [], "is not what a strategy writes"),
        ("no json\n", [], "is not what a strategy writes"),
        ('{"client": 1}\n', [], "is not what a strategy writes"),
        ("[1, 2]\n", [], "has a line that is not a row: [1, 2]"),
        ('{"round": 1}\n', ["--metrics", "report.jsonl"], "round, stage, metrics in each"),
        ('{"round": 1}\n', ["--metrics", "nowhere.jsonl"], "No such file"),
        ('{"round": 1}\n', ["--markdown", "x.md"], "--markdown has an effect only for a run folder"),
        (None, ["--out", "x.html"], "--out has an effect only for a strategy's file"),
    ],
)
def test_what_cannot_be_shown_is_said(
    content: str | None,
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("report.jsonl").write_text(content)
    target = "report.jsonl" if content is not None else "."
    result = CliRunner().invoke(app, ["report", target, *options])
    assert result.exit_code == BAD_INPUT
    assert problem in " ".join(result.output.split())
    assert not list(tmp_path.glob("*.html"))


def test_what_a_strategy_writes_can_be_shown(tmp_path: Path) -> None:
    """The two files of a real run of two rounds, one client of which sends NaN."""
    from fedrot.strategies import FedRot
    from fedrot.strategies.settings import Reporting
    from tests.models import near
    from tests.strategies.classifier import SYMMETRY, state
    from tests.strategies.fakes import ArrayRecord, FakeGrid, Message, reply

    def client(index: int) -> Any:
        def train(message: Message) -> Message:
            factor = math.nan if index == 2 else 1.0
            update = {n: t * factor for n, t in near(state(), 0.05, index).items()}
            return reply(message, update, 10, index, loss=0.5)

        return train

    files = Reporting(tmp_path / "report.jsonl", tmp_path / "metrics.jsonl")
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=files)
    strategy.start(FakeGrid({100 + i: client(i) for i in range(3)}), ArrayRecord(state()), 2)
    page = write_strategy_report(tmp_path / "report.jsonl").read_text()
    assert len(Outline(page).links) == 2
    assert page.count("holds NaN or Inf") == 1
    assert "train/loss = 0.5" in page
