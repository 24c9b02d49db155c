"""The page of complete, partial and hostile run folders, and results on a terminal."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations.report.pages import present, write_strategy_report
from fedrot.strategies import FedRot
from fedrot.strategies.settings import Reporting
from tests.models import near
from tests.simulations.report.runs import HOSTILE, group, write_folder
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import ArrayRecord, grid_of, reply

GAINS = {"fedavg": 0.0, "aligned": 0.0008, "fit_head": 0.05, "joined": 0.09}
TWO = {
    "skewed": {"fedavg": 0.0, "fit_head": 0.05},
    "apart": {"fedavg": 0.0, "aligned": -0.02},
}


def shown(run):
    """Return the page of a run, and the lines on the terminal."""
    text = StringIO()
    page = present(run, Console(file=text, width=100)).read_text(encoding="utf-8")
    return page, text.getvalue().splitlines()


class Outline(HTMLParser):
    """Checks that tags close in order; collects tags, attributes, and sources of
    pictures.
    """

    VOID = frozenset({"meta", "img", "br", "link", "wbr"})

    def __init__(self, page):
        super().__init__()
        self.open = []
        self.tags = set()
        self.links = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags |= {tag, *(name for name, _ in attrs)}
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def has_in_order(page, words):
    """The page is well formed and has these words, in this order."""
    Outline(page)
    text = re.sub(r"\s+", " ", html.unescape(page.split("</style>")[1]))
    place = 0
    for own in words:
        assert own in text[place:], own
        place = text.index(own, place)


def test_the_page_and_the_terminal_begin_with_the_verdict(tmp_path):
    page, lines = shown(write_folder(tmp_path / "run", {"main": GAINS}))
    assert lines[0].startswith(
        "main: Use fit_head: accuracy 0.670, fedavg 0.620 (+0.050"
    )
    assert "  FedRot(fit_head)" in lines
    assert all(any(line.startswith(name) for line in lines) for name in GAINS)
    told = " ".join(" ".join(lines).split())
    assert "- Learning rate 0.001 is high for a pretrained model" in told
    assert "1 of 6 classes have no test row." in told
    parts = [
        "Use fit_head: accuracy 0.670, fedavg 0.620",
        "<code>FedRot(fit_head)<",
        "Learning rate 0.001 is high",
        "mean over 5 seeds",
        "Results in numbers",
        "<caption>1 of 6 classes have no test row.<",
        'fedavg" class="number">-<',
        ">fit_head<",
        '"accuracy" class="number">0.670<',
        "+0.050 [+0.048, +0.052]",
        "<dt>fit_head</dt><dd>It is fit_head.<",
        "Seed 0",
        ">client (its rows)<",
        ">1 (203)<",
        ">anger</th>",
        ">40</td>",
        "Seed 1",
        "accuracy (higher is better), 5",
        "loss (lower is better), 5 seeds",
        "Grey: no more than they remove from noise",
        '>attention, layer 0</th> <td class="found" style="--strength: 0.60">30</td>',
        "Lost replies",
        "NaN in 'w'",
        "simulate --data 'a <b>.csv'",
        "<dt>rounds</dt><dd>3<",
        "<dd>0, 1, 2, 3, 4<",
        "<dt>torch</dt><dd>2.9.0<",
    ]
    has_in_order(page, parts)
    links = Outline(page).links
    assert [link[:26] for link in links] == 4 * ["data:image/svg+xml;base64,"]
    assert not re.search(r"https?://|<script|@import|url\(|<h3|class=\"warning\"", page)


def test_of_several_experiments_each_part_has_a_name(tmp_path):
    page, two = shown(write_folder(tmp_path / "two", TWO))
    assert page.count("<h3>skewed</h3>") == page.count("<h3>apart</h3>") == 5
    assert (page.count("It is fedavg."), len(Outline(page).links)) == (1, 8)
    has_in_order(page, ["Use fit_head", "Keep fedavg: nothing", "Lost replies: skewed"])
    assert [line.split(":")[0] for line in two if re.search(": (Use|Keep) ", line)] == [
        "skewed",
        "apart",
    ]
    assert (two.count("skewed"), two.count("apart")) == (1, 1)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("*/*seed-4-aligned*", ["No results yet: main · seed 4 · aligned", "Use fit_"]),
        ("cells", ['class="warning"', "There are no results yet."]),
    ],
)
def test_missing_parts_are_no_obstacle(tmp_path, lost, said):
    run = write_folder(tmp_path / "run", {"main": GAINS})
    for path in run.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    has_in_order(shown(run)[0], said)


def test_names_are_text_and_no_markup(tmp_path):
    page, lines = shown(
        write_folder(tmp_path / "run", {HOSTILE: {"fedavg": 0.0, HOSTILE: 0.01}})
    )
    tags = Outline(page).tags
    assert not {name for name in tags if name.startswith("on")} | tags & {
        "q",
        "x",
        "script",
    }
    assert HOSTILE[:20] in "\n".join(lines)


BEYOND = {"found": 1.0, "chance": 0.1, "moved": 4}
METRICS = [
    {"round": r, "stage": stage, "metrics": metrics}
    for r in (2, 1, 3)
    for stage, metrics in (
        (
            "train",
            {"loss": 1.0 / r if r != 2 else None, "rate": 0.1, "per_class": [0.5, r]},
        ),
        ("evaluate", {"per_class": [0.5, 0.25 * r]}),
        ("server", {"accuracy": 0.1 * r, "fedrot-seconds": r}),
    )
]
ROWS = [
    group(1, "attention", 0, 0.5, **BEYOND),
    group(2, "attention", 0, 0.0, found=0.1, chance=0.1, moved=0),
    group(3, "residual", -1, 0.5, found=1.0, chance=None, moved=1),
    *({"round": n, "said": f"verdict {n}"} for n in (1, 2, 4)),
    *({"round": n, "client": 7, "dropped": "<NaN> in 'a'"} for n in (1, 3)),
    {"round": 2, "client": 3, "failed": "No answer before the timeout."},
    {"round": 2, "lost": "0 good replies, 1 needed."},
    {"round": 2, "tensor": "w", "note": "a note"},
    *METRICS,
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_page_stands_beside_its_file(tmp_path):
    file = write_lines(tmp_path / "report.jsonl", ROWS)
    page = write_strategy_report(file).read_text(encoding="utf-8")
    assert page == (tmp_path / "report.html").read_text(encoding="utf-8")
    parts = [
        "fedrot: report",
        "4 rounds reported; alignment moved groups in 2 of 3.",
        "Round 1: the clients are in different coordinates.",
        "Round 3: replies were in another basis, and were matched as whole models.",
        "Round 1: verdict 1.",
        "Round 4: verdict 4.",
        "evaluate/per_class/1: 0.250 in round 1 → 0.750 in round 3.",
        "server/accuracy: 0.100 in round 1 → 0.300 in round 3.",
        "train/loss: 1.000 to 0.333; train/rate: 0.100 to",
        ">attention, layer 0</th>",
        ">residual</th>",
        ">7<",
        ">1 to 3<",
        "<NaN> in 'a'<",
        ">failed<",
        "Round 2: 0 good replies, 1 needed.",
    ]
    has_in_order(page, parts)
    assert len(Outline(page).links) == 1
    assert ("verdict 2" in page, "seconds: 1.000 in" in page) == (False, False)
    page = write_strategy_report(
        write_lines(tmp_path / "a.jsonl", [{"round": 1}])
    ).read_text("utf-8")
    has_in_order(
        page, ["1 rounds reported; none was aligned.", "Lost replies", "None."]
    )


def live_site(site, rows, before, after, **more):
    """Return a site's row of a live run in its second round."""
    scores = {
        name: {"loss": 2 - accuracy, "accuracy": accuracy, "macro_f1": 0.1}
        for name, accuracy in (("alone", before), ("global", 0.25), ("own", after))
    }
    gain = [after - before + shift for shift in (0, -0.1, 0.05)]
    told = {"round": 2, "stage": "site", "client": 70, "training": 90, "chose": False}
    counted = {"rows": rows, "classes": {"joy": [60, 9]}, "gain": gain}
    return {**told, "site": site, **counted, **scores, **more}


OF_SITES = {
    "sites": 3,
    "withheld": 2,
    "sites-better": 1,
    "sites-worse": 1,
    "own-accuracy": 0.7,
    "own-accuracy-worst": None,
}
LIVE = [
    live_site("north", 40, 0.5, 0.7, round=1),
    live_site("north", 40, 0.5, 0.75),
    live_site("<b>", 60, 0.625, 0.5),
    live_site("", 12, 0.5, 0.5, chose=True),
    {"round": 2, "stage": "sites", "metrics": OF_SITES},
]


def test_sites_of_a_live_run_have_a_line_with_support_each(tmp_path):
    page = write_strategy_report(write_lines(tmp_path / "rows.jsonl", LIVE)).read_text()
    parts = [
        "1 of 3 sites are better with their own head than alone, 1 of them beyond",
        "1 is worse beyond it.",
        "Accuracy in round 2. Figures of 3 sites; 2 withhold theirs.",
        '"site"><b><',
        '"test rows" class="number">60<',
        '"alone" class="number">0.625<',
        '"global head" class="number">0.250<',
        '"own head" class="number">0.500<',
        ">-0.125 [-0.225, -0.075]<",
        '"site">north<',
        ">+0.250 [+0.150, +0.300]<",
        ">client 70<",
        ">12, few, also chose<",
        "<b> 0.625 and 0.500; north 0.500 and 0.750; client 70 0.500 and 0.500;",
        "What happened",
    ]
    has_in_order(page, parts)
    assert "0.700" not in page
    assert "Metrics by round" not in page
    # A regression has losses alone, and one that diverged has no number.
    losses = {name: {"loss": None} for name in ("alone", "global", "own")}
    rows = [live_site("a", 30, 0, 0, **losses, gain=[None] * 3)]
    page = write_strategy_report(write_lines(tmp_path / "b.jsonl", rows)).read_text()
    has_in_order(page, ["Loss in round 2", ">- [-, -]<"])


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(live_site("a", 9, 0.5, 0.5, gain=[0.1])) + "\n",
        json.dumps(live_site("a", 9, 0.5, 0.5, own={"loss": "x"})) + "\n",
        "",
        '{"client": 1}\n',
        "[1, 2]\n",
        '{"round": 1, "stage": "train"}\n',
        '{"round": 1, "metrics": {}}\n',
        '{"round": 1, "before": 1}\n',
    ],
)
def test_another_file_is_refused(content, tmp_path):
    (tmp_path / "report.jsonl").write_text(content)
    with pytest.raises((ValueError, FedrotError), match=r"report\.jsonl"):
        write_strategy_report(tmp_path / "report.jsonl")
    assert not list(tmp_path.glob("*.html"))


def test_a_page_replaces_an_older_one_and_no_file_of_the_user(tmp_path):
    file = write_lines(tmp_path / "report.jsonl", [{"round": 1}])
    page = write_strategy_report(file)
    assert write_strategy_report(file) == page
    page.write_text("mine")
    with pytest.raises(FileExistsError, match=r"report\.html"):
        write_strategy_report(file)
    assert page.read_text() == "mine"


def test_what_a_strategy_writes_can_be_shown(tmp_path):
    """The rows of a real run of two rounds, one client of which sends NaN."""

    def client(index):
        update = near(state(), 0.05, index)
        sent = (
            update
            if index < 2
            else {name: tensor * math.nan for name, tensor in update.items()}
        )
        return lambda message: reply(message, sent, 10, index, loss=0.5)

    rows = Reporting(tmp_path / "report.jsonl")
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=rows)
    strategy.start(grid_of(map(client, range(3))), ArrayRecord(state()), 2)
    page = write_strategy_report(tmp_path / "report.jsonl").read_text()
    words = [
        "moved groups in 0 of 2",
        "Round 2: alignment found nothing beyond chance.",
        "loss: 0.500",
    ]
    has_in_order(page, words)
    assert page.count("holds NaN or Inf") == 1
