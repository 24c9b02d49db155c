"""The page of a strategy's own rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.report.pages import write_strategy_report
from fedrot.strategies import FedRot
from fedrot.strategies.settings import Reporting
from tests.models import near
from tests.simulations.report.runs import group
from tests.simulations.report.test_pages import Outline, has_in_order
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import ArrayRecord, FakeGrid, reply

BEYOND = {"found": 1.0, "chance": 0.1, "moved": 4}
METRICS = [
    {"round": r, "stage": stage, "metrics": metrics}
    for r in (2, 1, 3)
    for stage, metrics in (
        ("train", {"loss": 1.0 / r if r != 2 else None, "rate": 0.1, "per_class": [0.5, r]}),
        ("evaluate", {"per_class": [0.5, 0.25 * r]}),
        ("server", {"accuracy": 0.1 * r, "fedrot-seconds": r}),
    )
]
ROWS: list[dict[str, Any]] = [
    group(1, "attention", 0, 0.5, **BEYOND),
    group(2, "attention", 0, 0.0, found=0.1, chance=0.1, moved=0),
    group(3, "residual", -1, 0.5, found=1.0, chance=None, moved=1),
    *({"round": n, "said": f"verdict {n}"} for n in (1, 2, 4)),
    *({"round": n, "client": 7, "dropped": "<NaN> in 'a'"} for n in (1, 3)),
    {"round": 2, "client": 3, "failed": "No answer before the timeout."},
    *({"round": 2, "lost": "0 good replies, 1 needed."}, {"round": 2, "tensor": "w", "note": "a note"}),
    *METRICS,
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_page_stands_beside_its_file(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "report.jsonl", ROWS)
    page = write_strategy_report(file).read_text(encoding="utf-8")
    assert page == (tmp_path / "report.html").read_text(encoding="utf-8")
    parts = [
        *("fedrot: report", "4 rounds reported; alignment moved groups in 2 of 3."),
        "Round 1: the clients are in different coordinates.",
        "Round 3: replies were in another basis, and were matched as whole models.",
        *("Round 1: verdict 1.", "Round 4: verdict 4."),
        "evaluate/per_class/1: 0.250 in round 1 → 0.750 in round 3.",
        "server/accuracy: 0.100 in round 1 → 0.300 in round 3.",
        *(">attention, layer 0</th>", ">residual</th>", ">7<", ">1 to 3<", "<NaN> in 'a'<", ">failed<"),
        *("Round 2: 0 good replies, 1 needed.", "train/loss: 1.000 to 0.333; train/rate: 0.100 to"),
    ]
    has_in_order(page, parts)
    assert len(Outline(page).links) == 1
    assert ("verdict 2" in page, "seconds: 1.000 in" in page) == (False, False)
    with file.open("a") as unfinished:
        unfinished.write('{"round": 4, "cli')
    assert write_strategy_report(file).read_text(encoding="utf-8") == page


def test_without_alignment_and_losses_the_page_says_so(tmp_path: Path) -> None:
    page = write_strategy_report(write_lines(tmp_path / "a.jsonl", [{"round": 1}])).read_text("utf-8")
    has_in_order(page, ["1 rounds reported; none was aligned.", "Lost replies", "None."])
    assert (Outline(page).links, "Rounds without" in page, "Metrics by" in page) == ([], False, False)


@pytest.mark.parametrize(
    "content",
    [
        *("", "no json\n", '{"client": 1}\n', "[1, 2]\n", '{"round": 1, "stage": "train"}\n'),
        *('{"round": 1, "metrics": {}}\n', '{"round": 1, "before": 1}\n'),
    ],
)
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text(content)
    with pytest.raises((ValueError, FedrotError), match=r"report\.jsonl"):
        write_strategy_report(tmp_path / "report.jsonl")
    assert not list(tmp_path.glob("*.html"))


def test_what_a_strategy_writes_can_be_shown(tmp_path: Path) -> None:
    """The rows of a real run of two rounds, one client of which sends NaN."""

    def client(index: int) -> Any:
        update = near(state(), 0.05, index)
        sent = update if index < 2 else {name: tensor * math.nan for name, tensor in update.items()}
        return lambda message: reply(message, sent, 10, index, loss=0.5)

    rows = Reporting(tmp_path / "report.jsonl")
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=rows)
    strategy.start(FakeGrid({100 + i: client(i) for i in range(3)}), ArrayRecord(state()), 2)
    page = write_strategy_report(tmp_path / "report.jsonl").read_text()
    words = ["moved groups in 0 of 2", "Round 2: alignment found nothing beyond chance.", "loss: 0.500"]
    has_in_order(page, words)
    assert page.count("holds NaN or Inf") == 1
