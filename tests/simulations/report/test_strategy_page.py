"""The page of a strategy's own rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.report.strategy_page import PAGE, write_strategy_report
from tests.simulations.report.runs import group
from tests.simulations.report.test_run_page import Outline, pictures_in, text_of

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
GUARDS = [
    {"round": n, "stage": "train", "metrics": {"fedrot-guard-aligned": v, "fedrot-guard-plain": v / 2}}
    for n, v in ((2, 0.25), (4, 0.5), (3, 0.375))
]
ROWS: list[dict[str, Any]] = [
    group(1, "attention", 0, 0.5, **BEYOND),
    group(2, "attention", 0, 0.0, found=0.1, chance=0.1, moved=0),
    group(3, "residual", -1, 0.5, found=1.0, chance=None, moved=1),
    *({"round": n, "said": f"verdict {n}"} for n in (1, 2, 4)),
    *({"round": n, "client": 7, "dropped": "<NaN> in 'a'"} for n in (1, 3)),
    {"round": 2, "client": 3, "failed": "No answer before the timeout."},
    {"round": 2, "lost": "0 good replies, 1 needed."},
    {"round": 2, "tensor": "w", "note": "a note"},
    *METRICS,
    *GUARDS,
]
for own in ROWS:
    own.pop("strategy", None)

#: What every section says of these rows, and of rows without alignment or losses.
SAYS = {
    "verdict": (
        [
            "4 rounds reported; alignment moved groups in 2 of 3.",
            "Round 1: the clients are in different coordinates.\n",
            "Round 3: replies were in another basis, and were matched as whole models.\nRound 1: ver",
            "Round 4: verdict 4.\nRound 2: the guard measured 0.250 for the aligned mean and 0.125 for",
            "Round 4: the guard measured 0.500 for the aligned mean and 0.250 for the plain mean.",
            "per_class/1 (at the clients): 0.250 in round 1 → 0.750 in round 3.",
            "accuracy (at the server): 0.100 in round 1 → 0.300 in round 3.",
        ],
        "1 rounds reported; none was aligned.",
    ),
    "removed": (["attention, layer 0 ['50', '5', '']"], "No aligned replies are reported."),
    "lost": (["| 7 | dropped | 2 | 1 to 3 | &lt;NaN> in 'a' |", "| 3 | failed | 1 | 2 |"], "None."),
    "failed": (["Round 2: 0 good replies, 1 needed."], ""),
    "metrics": (["train/loss: 1 to 0.333", "train/per_class/1: 1 to 3"], ""),
}


@pytest.mark.parametrize("name", PAGE.sections)
def test_every_section_says_its_part(name: str) -> None:
    said, nothing = SAYS[name]
    section = PAGE.sections[name](ROWS)
    text = text_of(section)
    assert [words for words in said if words not in text] == []
    assert pictures_in(section) == (name == "metrics")
    bare = PAGE.sections[name]([{"round": 1, "tensor": "w", "note": "a note"}])
    assert nothing in text_of(bare)
    assert (bare is None) == (nothing == "")
    assert "seconds (at the server)" not in text


def test_constant_metrics_are_no_curves() -> None:
    section = PAGE.sections["metrics"](METRICS)
    assert section is not None
    constant = "train/rate = 0.1, train/per_class/0 = 0.5, evaluate/per_class/0 = 0.5."
    assert section.text == f"The same in all rounds: {constant}"
    alike = [{"round": n, "stage": "train", "metrics": {"rate": 0.1}} for n in (1, 2)]
    assert PAGE.sections["metrics"](alike) is None


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_page_stands_beside_its_file(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "report.jsonl", ROWS)
    path = write_strategy_report(file)
    page = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.html"
    assert "<title>fedrot: report</title>" in page
    assert (len(Outline(page).links), Outline(page).silent) == (1, 0)
    with file.open("a") as unfinished:
        unfinished.write('{"round": 4, "cli')
    other = write_strategy_report(file, tmp_path / "other.html")
    assert other.read_text(encoding="utf-8") == page


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json\n",
        '{"client": 1}\n',
        "[1, 2]\n",
        '{"round": 1, "stage": "train"}\n',
        '{"round": 1, "metrics": {}}\n',
        '{"round": 1, "before": 1}\n',
    ],
)
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text(content)
    with pytest.raises((ValueError, FedrotError), match=r"report\.jsonl"):
        write_strategy_report(tmp_path / "report.jsonl")
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
    page = write_strategy_report(tmp_path / "report.jsonl").read_text()
    assert len(Outline(page).links) == 1
    assert page.count("holds NaN or Inf") == 1
    assert "train/loss = 0.5" in page
    assert "alignment moved groups in 0 of 2" in page
    assert "Round 2: alignment found nothing beyond chance." in page
