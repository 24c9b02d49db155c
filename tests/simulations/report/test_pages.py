"""The page of complete, partial and hostile run folders, and results on a terminal."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fedrot.simulations.report.pages import present
from tests.simulations.report.runs import HOSTILE, write_folder

GAINS = {"fedavg": 0.0, "aligned": 0.0008, "fit_head": 0.05, "joined": 0.09}
TWO = {"skewed": {"fedavg": 0.0, "fit_head": 0.05}, "apart": {"fedavg": 0.0, "aligned": -0.02}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the run of one experiment."""
    return write_folder(tmp_path / "run", {"main": GAINS})


class Outline(HTMLParser):
    """Checks that tags close in order; collects tags, attributes, and sources of pictures."""

    VOID = frozenset({"meta", "img", "br", "link", "wbr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags |= {tag, *(name for name, _ in attrs)}
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(run: Path) -> str:
    return present(run, Console(quiet=True)).read_text(encoding="utf-8")


def has_in_order(page: str, words: Sequence[str]) -> None:
    """The page is well formed and has these words, in this order."""
    Outline(page)
    text, place = re.sub(r"\s+", " ", html.unescape(page.split("</style>")[1])), 0
    for own in words:
        assert own in text[place:], own
        place = text.index(own, place)


def test_the_page_begins_with_the_verdict(run: Path) -> None:
    page = page_of(run)
    parts = [
        *("fedrot: run", "Use fit_head: accuracy 0.670, fedavg 0.620", "<code>FedRot(fit_head)<"),
        *("<li>Also macro F1 0.620", "fit_head: 0.670, 0.620, 0.995,", "mean over 5 seeds"),
        *("<dt>fit_head</dt><dd>It is fit_head.<", "Seed 0", ">client (its rows)<", ">1 (203)<"),
        *(">anger</th>", ">40</td>", "Other seeds"),
        *("Seed 1", "accuracy after the last round: fedavg 0.620", "accuracy (higher is better), 5"),
        *("loss (lower is better), 5 seeds", "Grey: no more than they remove from noise", "aligned"),
        *(
            '>attention, layer 0</th> <td class="found" style="--strength: 0.60">30</td>',
            ">ffn, layer 1",
        ),
        *('"lines"> <thead><tr> <th scope="col">strategy<', 'fedavg" class="number">-<', ">fit_head<"),
        *('"accuracy" class="number">0.670<', '"ece" class="number">0.100<', "+0.050 [+0.048, +0.052]"),
        *("Lost replies", "NaN in 'w'", "fedrot simulate --data 'a <b>.csv'", "Configuration of main"),
        *("<dt>rounds</dt><dd>3<", "<dd>0, 1, 2, 3, 4<", "<dd>fedavg, aligned, fit_head, joined<"),
        "<dt>torch</dt><dd>2.9.0<",
    ]
    has_in_order(page, parts)
    links = Outline(page).links
    assert [link[:26] for link in links] == 4 * ["data:image/svg+xml;base64,"]
    assert not re.search(r"https?://|<script|@import|url\(|<h3|class=\"warning\"", page)
    assert {"cell", "start", "arm", "setting"}.isdisjoint(re.findall(r"\w+", page.split("</style>")[1]))


def test_of_several_experiments_each_part_has_a_name(tmp_path: Path) -> None:
    page, two = page_of(write_folder(tmp_path / "two", TWO)), printed(tmp_path / "two")
    assert page.count("<h3>skewed</h3>") == page.count("<h3>apart</h3>") == 5
    assert (page.count("It is fedavg."), len(Outline(page).links)) == (1, 8)
    has_in_order(page, ["Use fit_head", "Keep fedavg: nothing", "Lost replies: skewed"])
    assert [line.split(":")[0] for line in two[:2]] == ["skewed", "apart"]
    assert (two.count("skewed"), two.count("apart")) == (1, 1)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (
            "*/*seed-4-aligned*",
            ['class="warning"', "No results yet: main · seed 4 · aligned", "Use fit_"],
        ),
        *(("cells", ['class="warning"', "There are no results yet."]), ("[!c]*", ["Use fit_head"])),
    ],
)
def test_missing_parts_are_no_obstacle(run: Path, lost: str, said: list[str]) -> None:
    for path in run.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    has_in_order(page_of(run), said)


def printed(run: Path) -> list[str]:
    text = StringIO()
    present(run, Console(file=text, width=100))
    return text.getvalue().splitlines()


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", {HOSTILE: {"fedavg": 0.0, HOSTILE: 0.01}})
    tags = Outline(page_of(run)).tags
    assert not {name for name in tags if name.startswith("on")} | tags & {"q", "x", "script"}
    assert HOSTILE[:20] in "\n".join(printed(run))


def test_the_terminal_has_the_verdict_the_line_to_copy_and_all_strategies(run: Path) -> None:
    lines = printed(run)
    assert lines[0].startswith("main: Use fit_head: accuracy 0.670, fedavg 0.620 (+0.050")
    assert "  FedRot(fit_head)" in lines
    assert all(any(line.startswith(name) for line in lines) for name in GAINS)
