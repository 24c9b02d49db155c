"""The page of a strategy's own report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT
from fedrot.simulations.report.strategy_page import (
    StrategyResults,
    _changes,
    lost,
    metrics,
    verdict,
    write_strategy_report,
)
from tests.simulations.report.test_heat_map import group
from tests.simulations.report.test_run_page import Outline, write_lines


@pytest.fixture
def report(tmp_path: Path) -> Path:
    rows = [
        group(1, "attention", 0, 0.4),
        {"round": 1, "client": 7, "dropped": "<NaN> in 'a'"},
        {"round": 3, "client": 7, "dropped": "<NaN> in 'a'"},
        {"round": 2, "client": 3, "failed": "No answer before the timeout."},
        {"round": 2, "lost": "0 good replies, 1 needed."},
        {"round": 2, "tensor": "w", "note": "a note"},
        group(3, "attention", 0, 0.2),
    ]
    write_lines(tmp_path / "report.jsonl", rows)
    return tmp_path / "report.jsonl"


METRICS = [
    {"round": r, "stage": stage, "metrics": metrics}
    for r in (1, 2, 3)
    for stage, metrics in (
        ("train", {"loss": 1.0 / r if r != 2 else None, "rate": 0.1, "per_class": [0.5, r]}),
        ("server", {"accuracy": 0.1 * r}),
    )
]


def test_the_page_shows_the_heat_map_and_who_lost_what(report: Path) -> None:
    path = write_strategy_report(report)
    page = path.read_text(encoding="utf-8").replace("<wbr>", "")
    assert path == report.with_suffix(".html")
    assert "<title>fedrot: report</title>" in page
    outline = Outline(page)
    assert [link[:30] for link in outline.links] == ["data:image/png;base64,iVBORw0K"]
    assert "3 rounds reported" in page
    text = page.replace("\n", "").replace("<wbr>", "")
    lines = [line.split("<td") for line in text.split("<tr>")[2:]]
    cells = [[cell.split(">", 1)[1].split("<")[0] for cell in line[1:]] for line in lines]
    reasons = ["&lt;NaN&gt; in &#39;a&#39;", "No answer before the timeout."]
    assert cells == [
        ["7", "dropped", "2", "1 to 3", reasons[0]],
        ["3", "failed", "1", "2", reasons[1]],
    ]
    assert "Round 2: 0 good replies, 1 needed." in page
    assert "Metrics by round" not in page


def add_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_metrics_among_the_rows_are_drawn(report: Path) -> None:
    assert len(Outline(write_strategy_report(report).read_text()).links) == 1
    add_lines(report, METRICS)
    page = write_strategy_report(report).read_text(encoding="utf-8").replace("<wbr>", "")
    assert len(Outline(page).links) == 2
    assert "The same in all rounds: train/rate = 0.1, train/per_class/0 = 0.5." in page
    assert "3 rounds reported" in page


def test_scores_and_the_guard_stand_in_the_verdict(report: Path) -> None:
    guard = [{"fedrot-guard-aligned": 0.7, "fedrot-guard-plain": 0.65}, {"fedrot-guard-kept-aligned": 0}]
    kept = [{"round": r, "stage": "train", "metrics": m} for r, m in enumerate(guard, start=1)]
    add_lines(report, [*METRICS, *kept])
    page = write_strategy_report(report).read_text(encoding="utf-8").replace("<wbr>", "")
    assert page.index("What happened") < page.index("What alignment found, by layer")
    assert "accuracy (at the server): 0.100 in round 1 → 0.300 in round 3." in page
    assert "Round 1: the guard measured 0.700 for the aligned mean and 0.650 for the plain mean." in page
    assert "fedrot-guard-plain = " not in page  # It is not known of all rounds.


def test_a_report_without_alignment_or_losses(tmp_path: Path) -> None:
    write_lines(tmp_path / "r.jsonl", [{"round": 1, "tensor": "w", "note": "a note"}])
    page = write_strategy_report(tmp_path / "r.jsonl").read_text().replace("<wbr>", "")
    assert "No aligned replies are reported." in page
    assert "None." in page


def test_the_command_takes_a_file(report: Path, tmp_path: Path) -> None:
    with report.open("a") as file:
        file.write('{"round": 4, "cli')
    result = CliRunner().invoke(app, ["report", str(report), "--out", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert "p.html" in result.output
    assert "3 rounds reported" in (tmp_path / "p.html").read_text().replace("<wbr>", "")


@pytest.mark.parametrize(
    ("content", "options", "problem"),
    [
        ("", [], "is no file of Reporting(rows=...)"),
        ("no json\n", [], "is no file of Reporting(rows=...)"),
        ('{"client": 1}\n', [], "is no file of Reporting(rows=...)"),
        ("[1, 2]\n", [], "row is [1, 2] in line 1"),
        ('{"round": 1, "stage": "train"}\n', [], "is no file of Reporting(rows=...)"),
        ('{"round": 1, "metrics": {}}\n', [], "is no file of Reporting(rows=...)"),
        ('{"round": 1, "before": 1}\n', [], "is no file of Reporting(rows=...)"),
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
    """The rows of a real run of two rounds, one client of which sends NaN."""
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

    rows = Reporting(tmp_path / "report.jsonl")
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=rows)
    strategy.start(FakeGrid({100 + i: client(i) for i in range(3)}), ArrayRecord(state()), 2)
    page = write_strategy_report(tmp_path / "report.jsonl").read_text().replace("<wbr>", "")
    assert len(Outline(page).links) == 2
    assert page.count("holds NaN or Inf") == 1
    assert "train/loss = 0.5" in page
    assert "Alignment moved groups in 0 of 2 rounds." in page
    assert "Round 2: alignment found nothing beyond chance." in page


def test_lost_replies_come_by_their_number_and_then_by_client() -> None:
    rows = [
        *({"round": n, "client": 12, "dropped": "NaN"} for n in (4, 2)),
        *({"round": n, "client": 10, "failed": "no answer"} for n in (3, 1, 2)),
        {"round": 1, "client": 9, "dropped": "NaN"},
        *({"round": n, "client": 3, "dropped": "NaN"} for n in (5, 5)),
        {"round": 1, "client": 3, "dropped": "too large"},
        {"round": 1, "lost": "nobody"},
    ]
    section = lost(StrategyResults(rows, []))
    assert section is not None
    (table,) = section.tables
    assert table.lines == [
        ["10", "failed", "3", "1 to 3", "no answer"],
        ["3", "dropped", "2", "5", "NaN"],
        ["12", "dropped", "2", "2 to 4", "NaN"],
        ["3", "dropped", "1", "1", "too large"],
        ["9", "dropped", "1", "1", "NaN"],
    ]


def test_the_verdict_says_what_was_found_in_the_first_and_the_last_round() -> None:
    beyond, chance = {"found": 1.0, "chance": 0.1, "moved": 4}, {"found": 0.1, "chance": 0.1, "moved": 0}
    rows = [
        group(1, "attention", 0, 0.5, **beyond),
        group(1, "attention", 1, 0.0, **chance),
        group(2, "attention", 0, 0.0, **chance),
        group(2, "attention", 1, 0.0, **chance),
        group(3, "residual", -1, 0.5, found=1.0, chance=None, moved=1),
        *({"round": n, "said": f"verdict {n}"} for n in (1, 2, 4)),
    ]
    section = verdict(StrategyResults(rows, []))
    assert section is not None
    assert section.text == "4 rounds reported."
    assert section.sentences == [
        "Alignment moved groups in 2 of 3 rounds.",
        "Round 1: the clients are in different coordinates.",
        "Round 3: replies were in another basis, and were matched as whole models.",
        "Round 1: verdict 1.",
        "Round 4: verdict 4.",
    ]


def test_scores_of_clients_and_guards_are_told_by_their_first_and_last_round() -> None:
    stages = [
        {"round": n, "stage": "evaluate", "metrics": {"f1": 0.1 * n, "per_class": [0.5, 0.25 * n]}}
        for n in (2, 3, 1)
    ]
    guards = [
        {"round": n, "stage": "train", "metrics": {f"fedrot-guard-{m}": v * n for m, v in both}}
        for n in (2, 4, 3)
        for both in [(("aligned", 0.125), ("plain", 0.0625))]
    ]
    assert _changes([*stages, *guards]) == [
        "Round 2: the guard measured 0.250 for the aligned mean and 0.125 for the plain mean.",
        "Round 4: the guard measured 0.500 for the aligned mean and 0.250 for the plain mean.",
        "f1 (at the clients): 0.100 in round 1 → 0.300 in round 3.",
        "per_class/0 (at the clients): 0.500 in round 1 → 0.500 in round 3.",
        "per_class/1 (at the clients): 0.250 in round 1 → 0.750 in round 3.",
    ]


def test_there_are_no_curves_of_metrics_that_stay() -> None:
    assert metrics(StrategyResults([], [])) is None
    alike = [{"round": n, "stage": "train", "metrics": {"rate": 0.1}} for n in (1, 2)]
    assert metrics(StrategyResults([], alike)) is None


def test_what_a_strategy_measures_of_itself_is_no_score(report: Path) -> None:
    own = [
        {
            "round": r,
            "stage": "server",
            "metrics": {"fedrot-seconds": r, "f1": 0.1 * r if r > 1 else None},
        }
        for r in (1, 2, 3)
    ]
    write_lines(report, [*map(json.loads, report.read_text().splitlines()), *own])
    page = write_strategy_report(report).read_text(encoding="utf-8").replace("<wbr>", "")
    assert "f1 (at the server): nan in round 1 → 0.300 in round 3." in page
    assert "seconds (at the server)" not in page
    assert _changes(own[:1]) == []
