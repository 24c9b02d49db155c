"""The page of complete, partial and hostile run folders, and results on a terminal."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrot.simulations.folder import read_run
from fedrot.simulations.report.page import Cell, Page, Picture, Section
from fedrot.simulations.report.run_page import (
    PAGE,
    Results,
    print_results,
    write_report,
)
from fedrot.simulations.report.tables import Table, pipe_table
from fedrot.simulations.summary import verdicts_of
from tests.simulations.report.runs import HOSTILE, write_folder

GAINS = {"fedavg": 0.0, "aligned": 0.0008, "fit_head": 0.05, "joined": 0.09}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of one and of two experiments."""
    folder = tmp_path_factory.mktemp("runs")
    two = {"skewed": {"fedavg": 0.0, "fit_head": 0.05}, "apart": {"fedavg": 0.0, "aligned": -0.02}}
    return {
        "one": write_folder(folder / "one", {"main": GAINS}),
        "two": write_folder(folder / "two", two),
    }


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the run of one experiment."""
    return Path(shutil.copytree(runs["one"], tmp_path / "run"))


class Outline(HTMLParser):
    """Checks that tags close in order; collects tags, links, and pictures without a text."""

    VOID = frozenset({"meta", "img", "br", "link", "wbr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.silent = 0
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags |= {tag, *(name for name, _ in attrs)}
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.silent += tag == "img" and not dict(attrs).get("alt")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def text_of(section: Section | None) -> str:
    """Return everything that a section says."""
    if section is None:
        return ""
    words = [section.title, section.lead, section.code, section.text, *section.sentences]
    words += [f"{word} {meaning}" for word, meaning in section.terms.items()]
    words += [f"{picture.alt} {picture.caption}" for picture in section.pictures]
    words += [
        f"{grid.title} {name} {[c.text for c in cells]}"
        for grid in section.grids
        for name, cells in [*grid.lines.items(), (grid.below, map(Cell, grid.columns))]
    ]
    words += [f"{t.title}\n{pipe_table(t.header, t.lines, t.texts)}" for t in section.tables]
    return "\n".join([*words, *map(text_of, section.sections)])


#: What a section of the run of one experiment says, and its number of pictures. A section without a
#: line here fails.
SAYS: dict[str, tuple[int, list[str]]] = {
    "incomplete": (0, []),
    "verdict": (
        1,
        ["Use fit_head: accuracy 0.670, fedavg 0.620", "FedRot(fit_head)", "fit_head: 0.670"],
    ),
    "strategies": (0, ["fit_head It is fit_head.", "joined It is joined."]),
    "clients": (0, ["Seed 0 joy ['15', '120',", "'1 (203)'", "Seed 1", "Other seeds"]),
    "curves": (
        3,
        ["accuracy after the last round: fedavg 0.62", "loss (nats, lower is better), 5 seeds"],
    ),
    "alignment": (
        0,
        ["aligned attention, layer 1 ['60', '30', '20']", "Grey: no more than they remove from noise"],
    ),
    "tables": (0, ["| fit_head | 0.670 | 0.620 | 0.995 | +0.050 [", "Every metric", "ece (expected"]),
    "lost": (0, ["| aligned | 3 | dropped | 1 | 1 | NaN in 'w' |"]),
    "repeat": (0, ["fedrot simulate --data 'a <b>.csv'", "Configuration of main", "torch 2.9.0"]),
}


def pictures_in(section: Section | None) -> int:
    return 0 if section is None else len(section.pictures) + sum(map(pictures_in, section.sections))


@pytest.mark.parametrize(
    "name", [name for name, own in PAGE.sections.items() if "fedrot" in own.__module__]
)
def test_every_section_says_its_part(name: str, runs: dict[str, Path]) -> None:
    run = read_run(runs["one"])
    section = PAGE.sections[name](Results(run, verdicts_of(run)))
    pictures, said = SAYS[name]
    assert pictures_in(section) == pictures
    assert [words for words in said if words not in text_of(section)] == []
    assert (section is None) == (not said)
    # With nothing at all a section is left out, or says so.
    nothing = text_of(PAGE.sections[name](Results(type(run)(), [])))
    assert {"incomplete": "There are no results yet", "repeat": "not recorded"}.get(name, "") in nothing
    assert nothing == "" or name in ("incomplete", "repeat")


def test_the_verdict_comes_first_and_the_page_is_self_contained(run: Path) -> None:
    page = page_of(run)
    outline = Outline(page)
    assert "<title>fedrot: run</title>" in page
    places = [
        page.index(words) for words in ("Use fit_head", "<pre><code>FedRot(fit_head)", "<img", "<table")
    ]
    assert places == sorted(places)
    assert len(outline.links) == 4
    assert all(link.startswith("data:image/svg+xml;base64,") for link in outline.links)
    assert not re.search(r"https?://|<script|@import|url\(", page)
    assert "a &lt;b&gt;.csv" in page
    assert {"cell", "start", "arm", "setting"}.isdisjoint(re.findall(r"\w+", page.split("</style>")[1]))
    assert 'class="warning"' not in page
    assert [path.name for path in run.rglob("*") if path.name not in ("cells", "0.json")].count(
        "report.html"
    )
    assert not list(run.rglob(".*"))


def test_of_several_experiments_each_part_has_a_name(runs: dict[str, Path]) -> None:
    page = page_of(runs["two"])
    assert page.count("<h3>skewed</h3>") == page.count("<h3>apart</h3>") == 6
    assert page.index("Use fit_head") < page.index("Keep fedavg: nothing is better beyond noise")
    assert "<h3>main</h3>" not in page_of(runs["one"])


def test_an_incomplete_run_warns_before_the_verdict(run: Path) -> None:
    lost = next((run / "cells").glob("*seed-4-aligned*"))
    lost.unlink()
    page = page_of(run)
    assert page.index('<section class="warning">') < page.index("Use fit_head")
    assert "No results yet: " in page
    assert "seed 4 · aligned" in page


@pytest.mark.parametrize("keep", [(), ("partition.json",), ("cells",)])
def test_missing_files_are_no_obstacle(run: Path, keep: tuple[str, ...]) -> None:
    for path in list(run.iterdir()):
        if path.name not in ("config.json", *keep):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of(run)
    Outline(page)
    assert ("There are no results yet." in page) == ("cells" not in keep)
    assert ("Use fit_head" in page) == ("cells" in keep)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="check the path"):
        write_report(tmp_path / "nowhere")


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "a" / "run", {HOSTILE: {"fedavg": 0.0, HOSTILE: 0.01}})
    outline = Outline(page_of(run))
    assert "script" not in outline.tags
    assert not {name for name in outline.tags if name.startswith("on")} | outline.tags & {"q", "x"}
    assert outline.silent == 0
    assert {path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("*")} == {"a"}
    assert HOSTILE[:20] in printed(run)


def printed(run: Path, width: int = 100) -> str:
    text = StringIO()
    print_results(read_run(run), Console(file=text, width=width))
    return text.getvalue()


def test_the_terminal_has_the_verdict_the_line_to_copy_and_all_strategies(runs: dict[str, Path]) -> None:
    lines = printed(runs["one"]).splitlines()
    assert lines[1].startswith("main: Use fit_head: accuracy 0.670, fedavg 0.620 (+0.050")
    assert "  FedRot(fit_head)" in lines
    assert all(any(line.lstrip().startswith(name) for line in lines) for name in GAINS)
    two = printed(runs["two"])
    assert 0 < two.index("skewed: Use") < two.index("apart: Keep")


def test_a_page_shows_its_sections_in_their_order(tmp_path: Path) -> None:
    page: Page[str] = Page()
    table = Table("T & t", ["name", "n"], [["a<b", "0.5"]], ["name"])

    def show(function: Callable[[str], Section | None]) -> None:
        page.section(function)

    @show
    def first(source: str) -> Section:
        about: dict[str, Any] = {"terms": {"w": ["x", 1], "n": 3}, "beside": True, "tables": [table]}
        pictures, more = [Picture("data:,", "alt", "cap")], [Section("Inner", text="deep", folded=True)]
        return Section("One", "Lead", "x < y", source, ["s1"], pictures=pictures, sections=more, **about)

    @show
    def nothing(source: str) -> None:
        return None

    @show
    def last(source: str) -> Section:
        return Section("Last", warning=True)

    out = tmp_path / "a.html"
    assert page.write(out, "a & b", "the source") == out
    text = re.sub(r"\s*\n\s*", "", out.read_text(encoding="utf-8").split("</style>")[1])
    Outline(out.read_text(encoding="utf-8"))
    parts = [
        "<h1>fedrot: a &amp; b</h1><section><h2>One</h2>",
        '<p class="lead">Lead</p><pre><code>x &lt; y</code></pre>',
        '<p class="soft">the source</p><ul><li>s1</li></ul>',
        '<dt>w</dt><dd>["x", 1]</dd><dt>n</dt><dd>3</dd>',
        '<img src="data:," alt="alt"><figcaption>cap</figcaption>',
        "<caption>T &amp; t</caption>",
        '<th scope="col">name</th><th scope="col" class="number">n</th>',
        '<td data-name="name">a&lt;b</td><td data-name="n" class="number">0.5</td>',
        "<details><summary>Inner</summary>",
        '<section class="warning"><h2>Last</h2>',
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places, [part for part in parts if part not in text]
    assert places == sorted(places)
