"""The report of complete, partial and hostile run folders."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from rich.console import Console

from fedrot.simulations.report import plots, run_page
from fedrot.simulations.report.findings.sentences import verdicts
from fedrot.simulations.report.heat_map import RATIO, SHARE
from fedrot.simulations.report.html_page import HtmlPage, Section, broken, list_of
from fedrot.simulations.report.run_page import (
    PAGE,
    file_name,
    in_use,
    markdown_report,
    write_report,
)
from fedrot.simulations.report.summaries import results
from fedrot.simulations.report.tables import Table, format_score, result_tables

ARMS, STARTS, SEEDS, ROUNDS = ("plain", "aligned", "hurtful"), ("same", "scrambled"), (0, 1, 2), 2
# Arm -> offset of the accuracy; seeds move all arms together by 0.01, and differ by 0.001 in pairs.
LEVEL = {"plain": 0.5, "aligned": 0.6, "hurtful": 0.4}
WOBBLE = {"plain": (0.0, 0.0, 0.0), "aligned": (0.0, 0.001, 0.002), "hurtful": (-0.001, 0.0, 0.001)}


def result_rows(setting: str = "main") -> list[dict[str, Any]]:
    rows = []
    for start in STARTS:
        for arm in ARMS:
            for seed in SEEDS:
                for number in range(ROUNDS + 1):
                    value = LEVEL[arm] * number / ROUNDS + 0.01 * seed + WOBBLE[arm][seed]
                    about = {"setting": setting, "arm": arm, "start": start, "seed": seed}
                    about |= {"round": number, "scope": "central"}
                    rows.append({**about, "metric": "accuracy", "value": value})
                    rows.append({**about, "metric": "loss", "value": 1 - value})
    return rows


def alignment_rows(setting: str = "main") -> list[dict[str, Any]]:
    about = {"setting": setting, "arm": "aligned", "seed": 0, "round": 1, "client": 0, "group": "g"}
    shares = {"attention": 0.3, "ffn": 0.001}
    measured = [
        {
            **about,
            "start": start,
            "layer": layer,
            "part": part,
            "before": 2.0,
            "after": 2.0 * (1 - share),
            "found": 2.0 * share,
            "moved": 0,
        }
        for start in STARTS
        for layer in (0, 1)
        for part, share in shares.items()
    ]
    return [*measured, {**about, "start": "same", "dropped": "a tensor is not finite"}]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path) -> Path:
    setting = {"setting": "main", "data": "goemotions_ekman", "arms": ARMS, "starts": STARTS}
    setting |= {"seeds": SEEDS, "rounds": ROUNDS, "data_dir": None, "architecture": "bert"}
    files = {
        "config.json": {"command": "fedrot simulate --out 'a <b>'", "settings": [setting]},
        "versions.json": {"date": "2026-01-31", "python": "3.11.0", "torch": "2.9.0"},
        "partition.json": {
            "main": {
                "label_names": ["sad", "<glad>"],
                "seeds": {str(s): {"sizes": [30, 71], "counts": [[10, 20], [31, 40]]} for s in SEEDS},
            }
        },
        "status.json": {"complete": True},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    write_lines(folder / "rows.jsonl", result_rows())
    write_lines(folder / "alignment.jsonl", alignment_rows())
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def page_of(run: Path) -> str:
    """Write the page of a run, and return it without the places where a line may end."""
    return write_report(run).read_text(encoding="utf-8").replace("<wbr>", "")


class Outline(HTMLParser):
    """Checks that tags close in order and collects what the page refers to."""

    VOID = frozenset({"meta", "img", "br", "link", "wbr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_complete_run(run: Path) -> None:
    path = write_report(run)
    page = path.read_text(encoding="utf-8").replace("<wbr>", "")
    assert path == run / "report.html"
    assert "incomplete" not in page.split("</style>")[1]
    # First when and what, then the verdict, then tables.
    assert "2026-01-31 · data: goemotions_ekman · model: bert" in page
    assert page.index("start same: alignment helped (accuracy") < page.index("<table>")
    assert "<dt>scrambled</dt>" in page
    assert "<dt>different</dt>" not in page
    # 0.6 + 0.011 seed over three seeds: mean 0.611, sd 0.011.
    assert "0.611 ± 0.011" in page
    # Differences 0.1, 0.101, 0.102: 0.101 ± 4.302653 * 0.001 / sqrt(3).
    assert "+0.101 [+0.099, +0.103] better" in page
    assert '<td class="number ">+0.101 [+0.099, +0.103]</td>' in page
    assert '<td class="number better">better</td>' in page
    assert "hurtful hurt against plain: accuracy -0.100" in page
    assert "less than 1 % of the squared distance by ffn in layer 0 (0.1 %), 1 (0.1 %)" in page
    assert "aligned dropped a reply 1 time(s): a tensor is not finite" in page
    assert "2.9.0" in page
    assert "Configuration of main" in page
    # Of every seed, although only the first has a picture.
    assert [page.count(f"Rows per client: main, seed {seed}") for seed in SEEDS] == [1, 1, 1]
    assert ">71</td>" in page
    assert "<td>&lt;glad&gt; 40, sad 31</td>" in page


def test_the_configuration_has_what_has_an_effect() -> None:
    given = {"layers": 2, "width": 8, "server": "mean", "server_lr": 0.1, "lora": "", "missing": None}
    own = {**given, "starts": ["same"], "model": None, "pretrain_epochs": 1, "rounds": 0}
    small = {"layers": 2, "width": 8, "server": "mean", "starts": ["same"], "rounds": 0}
    assert in_use(own) == small
    both = {**own, "starts": ["same", "pretrained"], "server": "adam"}
    assert in_use(both).keys() == {*small, "pretrain_epochs", "server_lr"}
    assert in_use({**own, "model": "minilm"}).keys() == {"model", "server", "starts", "rounds"}


def test_share_and_chance_are_in_the_page_and_the_findings(run: Path) -> None:
    """Attention removes 30 % where chance removes 6 %; the neurons remove less than chance."""
    rows = alignment_rows()
    for row in rows[:-1]:
        row |= {"found": row["before"] - row["after"], "chance": 0.12}
    write_lines(run / "alignment.jsonl", rows)
    page = page_of(run)
    Outline(page)
    assert RATIO.caption in page
    assert (
        "found no more than chance by ffn in layer 0 (0.1 %, chance 6 %), 1 (0.1 %, chance 6 %)." in page
    )
    assert "by attention in layer" not in page


def test_without_chance_the_heat_map_shows_what_was_removed(run: Path) -> None:
    assert SHARE.caption in page_of(run)


def test_the_page_is_self_contained_and_escaped(run: Path) -> None:
    page = page_of(run)
    outline = Outline(page)
    assert len(outline.links) == 4
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in outline.links)
    assert not re.search(r"https?://|<script|@import|url\(", page)
    assert "&lt;glad&gt;" in page
    assert "a &lt;b&gt;" in page


def test_plots_are_png_files_and_nothing_temporary_stays(run: Path) -> None:
    write_report(run)
    write_report(run)
    plots = sorted(path.name for path in (run / "plots").iterdir())
    assert plots == [f"main-{kind}.png" for kind in ("accuracy", "alignment", "loss", "partition")]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (run / "plots").iterdir())
    assert not list(run.rglob(".*"))


def test_an_interrupted_run_says_so(run: Path) -> None:
    (run / "status.json").unlink()
    (run / "alignment.jsonl").unlink()
    unfinished = [
        r for r in result_rows() if (r["start"], r["arm"], r["seed"]) != ("same", "aligned", 2)
    ]
    write_lines(run / "rows.jsonl", unfinished)
    with (run / "rows.jsonl").open("a") as file:
        file.write('{"setting": "main", "arm": "alig')
    page = page_of(run)
    assert "This run is incomplete." in page
    assert "the run has not finished" in page
    assert "1 of 18 runs (start, arm, seed) have no final round yet" in page
    assert "0.611 ± 0.011" in page  # the other start is whole


@pytest.mark.parametrize(
    "instead",
    [{"scope": "client:0"}, {"scope": "alone:0"}, {"scope": "alignment"}, {"round": ROUNDS - 1}],
    ids=str,
)
def test_a_run_is_done_when_its_last_model_is_evaluated(
    run: Path, monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any]
) -> None:
    """What clients report of the last round comes before: their own metrics, the alignment."""
    monkeypatch.delitem(PAGE.sections, "settings")
    rows = result_rows()
    ended = ("same", "aligned", 2, ROUNDS)
    for row in rows:
        if (row["start"], row["arm"], row["seed"], row["round"]) == ended:
            row |= instead
    assert rows != result_rows()
    write_lines(run / "rows.jsonl", rows)
    page = page_of(run)
    said = "1 of 18 runs (start, arm, seed) have no final round yet"
    assert f"{said}: the last command finished without asking for them" in page
    (run / "status.json").write_text('{"complete": false}')
    assert f"{said} (arms aligned)<" in page_of(run)


def test_a_run_that_does_not_say_that_it_ended_is_incomplete(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PAGE.sections, "settings")
    (run / "status.json").write_text('{"complete": false}')
    page = page_of(run)
    assert "the run has not finished" in page
    assert "have no final round yet" not in page


@pytest.mark.parametrize("keep", [(), ("config.json",), ("partition.json",), ("rows.jsonl",)])
def test_missing_files_are_no_obstacle(run: Path, keep: tuple[str, ...]) -> None:
    for path in list(run.iterdir()):
        if path.name not in keep:
            path.unlink()
    page = page_of(run)
    Outline(page)
    assert "This run is incomplete." in page
    assert "versions.json is missing or unreadable" in page
    assert ("There are no results yet." in page) == ("rows.jsonl" not in keep)
    assert ("rows.jsonl is missing or unreadable" in page) == ("rows.jsonl" not in keep)
    assert ("What helped?" in page) == ("rows.jsonl" in keep)
    assert "What was run" not in page


def test_a_run_without_the_arm_that_verdicts_are_about_says_what_was_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PAGE.sections, "settings")
    monkeypatch.chdir(run)
    rows = [row for row in result_rows("") if row["arm"] != "aligned" and row["start"] == "same"]
    rows = [{**row, "arm": row["arm"].replace("hurtful", "joined")} for row in rows]
    for row in rows:
        row["value"] = row["value"] if row["arm"] == "plain" else 1.5 - row["value"]
    failed = {"scope": "alignment", "metric": "fedrot-replies-failed", "value": 2}
    write_lines(run / "rows.jsonl", [*rows, {**rows[0], **failed}])
    (run / "alignment.jsonl").unlink()
    # The title is the folder's name, even if the path has none.
    page = write_report(Path()).read_text(encoding="utf-8").replace("<wbr>", "")
    assert f"<title>fedrot: {run.name}</title>" in page
    assert "<h2>What was run</h2>" in page
    assert "<dt>joined</dt>" in page
    assert "<dt>aligned</dt>" not in page
    assert "plain was run without 2 replies of failed clients" in page
    assert "No such case" not in page
    write_lines(run / "rows.jsonl", [row for row in rows if row["metric"] == "accuracy"])
    page = write_report(Path()).read_text(encoding="utf-8")
    assert "No such case among the results with intervals." in page


def test_tables_of_plug_ins_stand_after_the_results(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[run_page.MarkdownTable] = [
        lambda rows, settings: f"{len(rows)} rows of {settings[0]['setting']}\n",
        lambda rows, settings: "",
    ]
    monkeypatch.setattr(run_page, "MARKDOWN_TABLES", tables)
    found = markdown_report(run)
    places = [found.index(text) for text in ("verdict", "108 rows of main")]
    assert places == sorted(places)
    assert "\n\n\n" not in found
    (run / "config.json").unlink()
    monkeypatch.setattr(run_page, "MARKDOWN_TABLES", [lambda rows, settings: f"{len(settings)} known"])
    assert "0 known" in markdown_report(run)


def test_an_unreadable_file_is_named(run: Path) -> None:
    (run / "config.json").write_text('{"command": ')
    page = page_of(run)
    assert "config.json is missing or unreadable" in page
    assert "The command was not recorded." in page


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="check the path"):
        write_report(tmp_path / "nowhere")


def test_one_seed_and_no_baseline(run: Path) -> None:
    rows = [r for r in result_rows() if r["seed"] == 0]
    write_lines(run / "rows.jsonl", rows)
    page = page_of(run)
    assert "(accuracy 0.500 → 0.600, +0.100 one seed: no interval" in page
    write_lines(run / "rows.jsonl", [r for r in rows if r["arm"] == "aligned"])
    assert "There is no comparison with plain yet." in page_of(run)


def test_the_terminal_has_a_table_per_setting_and_metric() -> None:
    text = StringIO()
    accuracy, loss = result_tables(result_rows())
    Console(file=text, width=140).print(accuracy)
    assert "0.611 ± 0.011" in text.getvalue()
    assert "+0.101 [+0.099, +0.103] │  better" in text.getvalue()
    assert "3 seed(s)" in text.getvalue()
    assert loss.title.startswith("main: loss (nats, lower is better)")
    both = result_tables(result_rows("one") + result_rows("two"))
    assert [len(t.lines) for t in both] == [6, 6, 6, 6]
    assert [t.title.split(":")[0] for t in both] == ["one", "one", "two", "two"]
    assert result_tables([]) == []


def test_sentences_and_tables_compare_the_seeds_in_common() -> None:
    """An interrupted grid: seeds 1 and 2 of one arm are missing."""
    rows = [row for row in result_rows() if row["arm"] != "aligned" or row["seed"] != 1]
    rows = [row for row in rows if row["start"] == "same" or row["seed"] == 0]
    (said,) = verdicts([row for row in rows if row["start"] == "same"])
    # Seeds 0 and 2: plain 0.50 and 0.52, aligned 0.600 and 0.622. All of plain have a mean of 0.510.
    assert "accuracy 0.510 → 0.611, +0.101" in said
    (said,) = verdicts(
        [row for row in rows if row["start"] == "same" and row["seed"] != 1]
        + [{**row, "value": 9.0} for row in result_rows() if (row["arm"], row["seed"]) == ("plain", 1)]
    )
    assert "accuracy 0.510 → 0.611, +0.101" in said
    (table,) = result_tables([row for row in rows if row["start"] == "same"], ["accuracy"])
    assert table.lines[1][:2] == ["aligned", "0.611 ± 0.016 (2 seeds)"]
    fewer = [row for row in result_rows() if row["arm"] != "plain" or row["seed"] != 1]
    (table,) = result_tables([row for row in fewer if row["start"] == "same"], ["accuracy"])
    assert table.lines[1][-1] == "better (2 seeds)"


def test_settings_with_one_file_name_keep_their_pictures(run: Path) -> None:
    nameless = [row for row in result_rows("") if row["metric"] == "accuracy"]
    write_lines(run / "rows.jsonl", [*result_rows("a, lr 0.1"), *result_rows("a lr 0-1"), *nameless])
    page = write_report(run).read_text(encoding="utf-8")
    assert len(list((run / "plots").glob("a-lr-0-1*-accuracy.png"))) == 2
    assert (run / "plots" / "run-accuracy.png").is_file()
    assert page.count("<h3>All arms</h3>") == 2  # Of results and of pictures.


def test_results_as_markdown() -> None:
    (table,) = result_tables(result_rows(), ["accuracy"])
    title, _, *lines, _, caption = table.markdown().splitlines()
    assert title == "**main: accuracy (0 to 1, higher is better), final round, 3 seed(s)**"
    assert lines[0] == (
        "| start | arm | mean ± sd | difference from plain [95 % t interval] | verdict |"
    )
    assert lines[1] == "| --- | --- | ---: | ---: | ---: |"
    assert lines[2] == "| same | plain | 0.510 ± 0.010 | - | - |"
    assert lines[3] == "| same | aligned | 0.611 ± 0.011 | +0.101 [+0.099, +0.103] | better |"
    assert len(lines) == 8
    assert "Within noise of x" in caption


def test_a_diverged_arm_is_named(run: Path) -> None:
    rows = result_rows()
    for row in rows:
        if (row["arm"], row["metric"], row["round"]) == ("hurtful", "loss", ROUNDS):
            row["value"] = float("inf") if row["seed"] else float("nan")
    write_lines(run / "rows.jsonl", rows)
    page = page_of(run)
    assert "hurtful or plain diverged: loss" in page


def masked_rows(setting: str = "masked") -> list[dict[str, Any]]:
    """Pseudo-perplexities from 6000 down, 40 lower when aligned; accuracy and loss beside them."""
    rows = []
    for row in result_rows(setting):
        if row["metric"] == "loss":
            gain = 40 + row["seed"] if row["arm"] == "aligned" else 0
            value = 6000 / (1 + 9 * row["round"]) - row["round"] * gain
            rows.append({**row, "metric": "pseudo_perplexity", "value": value})
            rows.append({**row, "metric": "accuracy", "value": 0.1})
            rows.append(row)
    return rows


def test_tasks_side_by_side_keep_their_own_headline(run: Path) -> None:
    rows = result_rows() + masked_rows()
    metrics = [table.title.split(" (")[0] for table in result_tables(rows)]
    assert metrics == ["main: accuracy", "main: loss", "masked: pseudo_perplexity", "masked: loss"]

    write_lines(run / "rows.jsonl", rows)
    page = page_of(run)
    drawn = {path.name for path in (run / "plots").iterdir()}
    assert {"main-accuracy.png", "masked-pseudo_perplexity.png", "masked-loss.png"} <= drawn
    assert not {"main-pseudo_perplexity.png", "masked-accuracy.png"} & drawn
    assert "pseudo_perplexity (from 1 up, lower is better) on the held-out split by round" in page
    # 6000 / 19 = 315.8; differences -80, -82, -84: -82 ± 4.302653 * 2 / sqrt(3).
    assert "-82.00 [-86.97, -77.03]</td>" in page
    assert "233.8 ± 2.0" in page
    # Of the setting with a third metric, that one is folded.
    assert page.count("<summary>Other metrics</summary>") == 1
    folded = page.split("<summary>Other metrics</summary>")[1].split("</details>")[0]
    assert "masked: accuracy (0 to 1, higher is better)" in folded
    assert "pseudo_perplexity" not in folded


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.694, 0.706), "0.700 ± 0.008"),
        ((5.5, 5.7), "5.600 ± 0.141"),
        ((31.25, 31.35), "31.30 ± 0.07"),
        ((312.34, 315.34), "313.8 ± 2.1"),
        ((6012.3, 6014.3), "6013 ± 1"),
        ((2.5e30, 2.5e30), "2.5e+30 ± 0"),
        ((float("inf"), 1.0), "inf"),
    ],
)
def test_large_numbers_have_fewer_decimals(values: tuple[float, float], expected: str) -> None:
    (score,) = results(
        [
            {"setting": "s", "start": "same", "arm": "plain", "seed": seed, "round": 1}
            | {"scope": "central", "metric": "pseudo_perplexity", "value": value}
            for seed, value in enumerate(values)
        ]
    )
    assert format_score(score) == expected


@pytest.mark.parametrize("lost", ["aligned", "plain"])
def test_a_difference_over_fewer_seeds_than_the_table_says_so(lost: str) -> None:
    rows = [row for row in result_rows() if row["arm"] != "hurtful" and row["start"] == "same"]
    # An arm with values of other seeds: both have as many, of which they share fewer.
    for row in rows:
        if (row["arm"], row["seed"]) == (lost, 2):
            row["seed"] = 7
    for table in result_tables(rows):
        assert "3 seed(s)" in table.title
        assert table.lines[1][-1] == "better (2 seeds)"


def test_names_of_files_are_short_and_plain() -> None:
    assert file_name("a/b: c, 0.5") == "a-b-c-0-5"
    assert file_name("x" * 100) == "x" * 60


def test_a_partition_without_results_is_drawn_and_models_have_short_names(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "partition_plot", lambda path, *given: drawn.append(given) or path)
    monkeypatch.setattr(run_page, "data_uri", lambda path: f"data:{path.name}")
    config = json.loads((run / "config.json").read_text())
    first = config["settings"][0]
    config["settings"] += [{**first, "setting": "other", "model": "/some/where/minilm"}, first]
    (run / "config.json").write_text(json.dumps(config))
    partition = {str(seed): {"sizes": [1], "counts": [[seed]]} for seed in (7, 8)}
    (run / "partition.json").write_text(
        json.dumps({"other": {"label_names": ["x"], "seeds": partition}})
    )
    page = page_of(run)
    assert "2026-01-31 · data: goemotions_ekman · model: bert, minilm" in page
    assert drawn == [([[7]], ["x"])]
    assert "with held-out rows of the clients, seed 7" in page
    assert page.index("data:other-partition.png") < page.index("data:main-accuracy.png")
    assert "setting other: 18 of 18 runs (start, arm, seed) have no final round yet" in page


def test_the_markdown_of_a_run_has_all_of_its_tables(run: Path) -> None:
    tables = markdown_report(run)
    for table in result_tables(result_rows()):
        assert table.markdown() in tables


def test_all_classes_of_a_client_are_listed(run: Path) -> None:
    names, counts = [f"emotion-{number:02d}" for number in range(12)], [*range(1, 13)]
    seeds = {str(seed): {"sizes": [sum(counts)], "counts": [counts]} for seed in SEEDS}
    (run / "partition.json").write_text(json.dumps({"main": {"label_names": names, "seeds": seeds}}))
    page = page_of(run)
    assert all(f"{name} {count}" in page for name, count in zip(names, counts, strict=True))
    assert "others 36" not in page


def test_a_page_shows_its_sections_in_their_order(tmp_path: Path) -> None:
    page: HtmlPage[str] = HtmlPage()
    table = Table("T & t", ["name", "n"], [["a<b", "worse (2 seeds)"], ["c", "0.5"]], ["name"], "below")

    @page.section
    def first(source: str) -> Section:
        more = [Section("Inner", text="deep", folded=True)]
        return Section(
            "One",
            source,
            ["s1", "s2"],
            {"w": ["x", 1], "n": 3},
            "x < y",
            {"cap": "data:,"},
            [table],
            more,
        )

    @page.section
    def nothing(source: str) -> Section | None:
        return list_of("Nothing", (word for word in source.split() if word == "absent"))

    @page.section
    def last(source: str) -> Section | None:
        return list_of("Last", (word for word in source.split()), "said")

    again = HtmlPage[str]()
    again.section(last)
    assert (len(page.sections), len(again.sections)) == (3, 1)
    out = tmp_path / "a.html"
    assert page.write(out, "a & b", "the source") == out
    text = re.sub(r"\s*\n\s*", "", out.read_text(encoding="utf-8").split("</style>")[1])
    Outline(out.read_text(encoding="utf-8"))
    assert "<h1>fedrot: a &amp; b</h1><section><h2>One</h2>" in text
    parts = [
        '<p class="soft">the source</p><ul><li>s1</li><li>s2</li></ul>',
        '<dt>w</dt><dd>["x", 1]</dd>',
        "<dt>n</dt><dd>3</dd>",
        "<pre>x &lt; y</pre>",
        '<img src="data:," alt="cap"><figcaption>cap</figcaption>',
        "<caption>T &amp; t</caption>",
        '<th>name</th><th class="number">n</th>',
        '<td>a&lt;b</td><td class="number worse">worse (2 seeds)</td>',
        '<td>c</td><td class="number ">0.5</td>',
        '<p class="soft">below</p>',
        "<details><summary>Inner</summary>",
        '<p class="soft">deep</p></details></section>',
        '<section><h2>Last</h2><p class="soft">said</p><ul><li>the</li><li>source</li></ul></section>',
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places, [part for part in parts if part not in text]
    assert places == sorted(places)
    assert "Nothing" not in text
    assert 'class="warning"' not in text
    page.sections = {"first": lambda source: Section(source, warning=True)}
    assert '<section class="warning">\n<h2>now</h2>' in page.write(out, "", "now").read_text()


def test_long_words_may_be_broken_after_signs() -> None:
    found = broken("of attention+ffn@running <b>")
    assert found == "of attention+<wbr>ffn@<wbr>running &lt;b&gt;"
    assert escape(found) == found  # The page does not escape it again.
    assert broken("x" * 27) == "<wbr>".join(["x" * 10, "x" * 10, "x" * 7])
